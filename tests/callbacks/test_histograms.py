from __future__ import annotations

from typing import Any

import pytest
from trainkit.callbacks.histograms import Histograms

from tests.tasks import Regression, data
from trainkit import UserError


def test_histograms_are_written_for_matching_parameters_at_the_interval(make_trainer: Any, media_logger: Any) -> None:
    task = Regression(hidden=3)
    callbacks = [Histograms(every="2step", pattern="*.weight")]

    make_trainer(callbacks=callbacks, loggers=[media_logger]).fit(task, data())

    names = ["network.0.weight", "network.3.weight"]
    kinds = [("weights", 2), ("gradients", 2), ("weights", 4)]  # no step has a gradient of the last weights
    expected = [(f"{kind}/{name}", step) for kind, step in kinds for name in names]
    assert [(name, step) for name, _, step in media_logger.histograms] == expected
    assert media_logger.histograms[-2][1].num_elements == 12
    assert media_logger.histograms[2][1].num_elements == 12
    with pytest.raises(UserError, match=r"histograms\.pattern='encoder' matches no parameter"):
        make_trainer(callbacks=[Histograms(pattern="encoder")]).fit(task, data())
