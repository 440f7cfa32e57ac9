import json
import warnings
from pathlib import Path

import pytest

from trainkit.loops.checkpointer import Checkpointer
from trainkit.loops.fit_loop import FitLoop
from trainkit.loops.worker import prepare_fit
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.phases import PhaseControl
from trainkit.run import Run
from trainkit.run_dir.failure import FILENAME, PHASE_OF_FUNCTION, warnings_kept
from trainkit.strategy import Strategy


def test_every_phase_of_a_failure_is_named_after_a_function_that_exists() -> None:
    functions = [
        PhaseControl.backward,
        Strategy.optimizer_step,
        Strategy._normalize_gradients,
        Checkpointer.save,
        Run.log,
        FitLoop._log,
        PhaseOptimizer.step_schedules,
        Checkpointer.restore,
        Strategy.step_batches,
        Strategy.forward_backward,
        prepare_fit,
    ]
    assert [function.__name__ for function in functions] == list(PHASE_OF_FUNCTION)


@pytest.mark.parametrize("in_run_folder", [True, False])
def test_a_warning_reaches_the_terminal_without_escape_sequences_and_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_run_folder: bool
) -> None:
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *more: shown.append(str(message)))
        with warnings_kept(tmp_path if in_run_folder else None, process=0):
            warnings.warn("\x1b]52;c;ZXZpbA==\x07 metric", stacklevel=1)
    assert shown == ["\\x1b]52;c;ZXZpbA==\\x07 metric"]
    if in_run_folder:
        assert json.loads((tmp_path / FILENAME).read_text())["text"] == "UserWarning: \x1b]52;c;ZXZpbA==\x07 metric"
