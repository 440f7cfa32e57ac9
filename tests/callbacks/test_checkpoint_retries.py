"""A save that the disk refuses is tried again while training goes on."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.progress_bar import ProgressBar
from trainkit.strategies.ddp import DDPStrategy

from tests.tasks import Regression, regression_data
from trainkit import Callback, Data, Trainer, UserError
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import CheckpointError
from trainkit.testing import run_ranks

Fit = Callable[..., Any]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The steps whose checkpoints the disk has no room for."""
    steps: set[int] = set()
    fill(monkeypatch, steps)
    return steps


def fill(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    from trainkit.checkpoint import store

    written = store.write_payload

    def write(path: Path, content: Any) -> Any:
        if content["state"]["step"] in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, content)

    monkeypatch.setattr(store, "write_payload", write)


def saved(folder: Path) -> list[int]:
    return [entry.step for entry in CheckpointStore(folder / "checkpoints").entries()]


@pytest.mark.parametrize("background", [False, True])
def test_training_continues_and_a_later_step_is_saved(
    fit: Fit, scripted: Any, full_disk: set[int], caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    full_disk |= {8}
    with caplog.at_level(logging.WARNING):
        result = fit(
            scripted(), Checkpoint(every="4step", save_last_k=None, retry_every="3step", async_save=background)
        )
    assert result.steps == 20
    assert saved(result.run_dir) == ([4, 12, 16, 20] if background else [4, 11, 12, 16, 20])
    for part in ("No space left on device", "are free there", "run_dir=", "tried again"):
        assert part in caplog.text


def test_too_many_failures_in_a_row_end_the_run(fit: Fit, scripted: Any, full_disk: set[int], tmp_path: Path) -> None:
    full_disk |= set(range(8, 21))
    task = scripted()
    with pytest.raises(CheckpointError, match="No space left"):
        fit(task, Checkpoint(every="4step", max_retries=2, retry_every="1step"))
    assert task.steps == 10  # 8, 9, 10
    assert saved(tmp_path / "run") == [4]


@pytest.mark.parametrize("background", [False, True])
def test_a_failure_at_the_end_is_raised(
    fit: Fit, scripted: Any, full_disk: set[int], tmp_path: Path, background: bool
) -> None:
    full_disk |= {20}
    with pytest.raises(CheckpointError, match="No space left"):
        fit(scripted(), Checkpoint(every="4step", async_save=background))
    assert saved(tmp_path / "run") == [16]


def test_after_a_failure_at_the_end_metrics_and_checkpoints_are_shown(
    fit: Fit, scripted: Any, full_disk: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    full_disk |= {20}
    with pytest.raises(CheckpointError, match="No space left"):
        fit(scripted(), Checkpoint(every="4step"), ProgressBar())
    shown = capsys.readouterr().out
    assert "ended by an error: 20 steps" in shown and "train/loss" in shown and "step_00000016" in shown


def test_without_retries_the_first_failure_ends_the_run(fit: Fit, scripted: Any, full_disk: set[int]) -> None:
    full_disk |= {4}
    with pytest.raises(CheckpointError, match="No space left"):
        fit(scripted(), Checkpoint(every="4step", max_retries=0))


def test_the_wait_is_converted_to_steps_at_the_pace_so_far(
    fit: Fit, scripted: Any, full_disk: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full_disk |= {4}
    fit(scripted(), Checkpoint(every="4step", save_last_k=None, retry_every="1h"))
    assert saved(tmp_path / "run") == [20]  # the hour is not over, but training is
    assert "saving is tried again at the end of training" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_retries": -1}, "checkpoint.max_retries"), ({"retry_every": "soon"}, "checkpoint.retry_every")],
)
def test_a_wrong_setting_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Checkpoint(**settings)


class SlowerFirst(Callback):
    """Lets rank 0 have trained for so long that a second is less than a step; on rank 1 it is many."""

    def on_fit_start(self, run: Any) -> None:
        run.state.resume_clock(0.0 if run.strategy.comm.rank else 1000.0)


def on_two_ranks(run_dir: Path) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        fill(monkeypatch, {2})
        callbacks = [SlowerFirst(), Checkpoint(every="2step", save_last_k=None, retry_every="1s")]
        trainer = Trainer(DDPStrategy(device="cpu"), callbacks=callbacks, loggers=[], run_dir=run_dir)
        return trainer.fit(Regression(), Data(train=regression_data(20), batch_size=4)).steps


def test_ranks_try_again_together(tmp_path: Path) -> None:
    assert run_ranks(on_two_ranks, 2, tmp_path) == [5, 5]
    assert saved(tmp_path) == [3, 4, 5]
