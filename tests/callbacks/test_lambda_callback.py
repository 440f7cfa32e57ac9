from __future__ import annotations

from typing import Any

import pytest
from trainkit.callbacks.lambda_callback import LambdaCallback

from tests.tasks import Recorder, Regression, data
from trainkit import UserError


def test_functions_are_called_at_their_hooks_only(make_trainer: Any) -> None:
    steps: list[int] = []
    callback = LambdaCallback(functions={"on_step_end": lambda run: steps.append(run.state.step)})

    make_trainer(callbacks=[callback, Recorder()]).fit(Regression(), data())

    assert steps == [1, 2, 3, 4]


def test_a_function_may_be_a_dotted_path_and_wrong_ones_are_rejected() -> None:
    assert LambdaCallback(functions={"on_step_end": "gc.collect"}).on_step_end.__name__ == "collect"
    with pytest.raises(UserError, match=r"not a hook of a callback\. Did you mean 'on_step_end'"):
        LambdaCallback(functions={"on_step_ended": print})
    with pytest.raises(UserError, match=r"functions\.on_step_end: 'gc\.colect' cannot be imported"):
        LambdaCallback(functions={"on_step_end": "gc.colect"})
    with pytest.raises(UserError, match=r"functions\.on_step_end: 5 is not a function"):
        LambdaCallback(functions={"on_step_end": 5})
    with pytest.raises(UserError, match=r"is not a mapping; write functions=\{'on_step_end': function\}"):
        LambdaCallback(functions=print)
    with pytest.raises(UserError, match="is a int, not a function"):
        LambdaCallback(functions={"on_step_end": "gc.DEBUG_STATS"})
