from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from trainkit.callbacks.gradual_unfreezing import GradualUnfreezing

from tests.tasks import Regression, assert_same_bits, regression_data, weights
from trainkit import Callback, Data, UserError


class Steps(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_fit_start(self, run: Any) -> None:
        self.steps.append(weights(run.task))

    def on_step_end(self, run: Any) -> None:
        self.steps.append(weights(run.task))


def adamw(task: Any) -> Any:
    return torch.optim.AdamW(task.parameters(), lr=0.05, weight_decay=0.1)


def trained(make_trainer: Any, at: dict[str, str], **settings: Any) -> list[dict[str, torch.Tensor]]:
    steps = Steps()
    trainer = make_trainer(callbacks=[GradualUnfreezing(at=at), steps], max_duration="2epoch", **settings)
    trainer.fit(Regression(adamw, hidden=3), Data(train=regression_data(32), batch_size=8))
    return steps.steps


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}])
def test_a_pattern_stays_to_the_bit_until_its_time_and_moves_then(make_trainer: Any, settings: Any) -> None:
    """Weight decay would move a parameter whose gradient were zero."""
    steps = trained(make_trainer, {"network.0.*": "1epoch", "network.0.bias": "6step"}, **settings)

    def moves(name: str) -> list[bool]:
        return [not torch.equal(a[name], b[name]) for a, b in pairwise(steps)]

    assert moves("network.0.weight") == [False] * 4 + [True] * 4
    assert moves("network.0.bias") == [False] * 6 + [True] * 2
    assert moves("network.3.weight") == [True] * 8


def test_frozen_parameters_do_not_count_in_the_norm(make_trainer: Any) -> None:
    """Clipped to the same norm, the head moves as if the rest were not there."""
    steps = trained(make_trainer, {"network.0.*": "2epoch"}, clip_norm=0.01)
    task = Regression(lambda task: torch.optim.AdamW(task.network[3].parameters(), lr=0.05, weight_decay=0.1), hidden=3)
    task.network[0].requires_grad_(False)
    make_trainer(max_duration="2epoch", clip_norm=0.01).fit(task, Data(train=regression_data(32), batch_size=8))

    assert_same_bits(weights(task), steps[-1])


def test_a_pattern_that_fits_nothing_is_told(make_trainer: Any) -> None:
    with pytest.raises(UserError, match=r"at\.encoder\.\* fits no parameter; there are network\.0\.weight"):
        trained(make_trainer, {"encoder.*": "1epoch"})
