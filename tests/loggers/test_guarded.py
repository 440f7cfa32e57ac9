from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tasks import MemoryLogger, Regression, regression_data
from trainkit import Callback, Data
from trainkit.loggers.guarded import LONGEST_TEXT, MOST_FAILURES, SafeLogger


class Failing(MemoryLogger):
    """Fails when it is asked to, as a full disk or a network does."""

    def __init__(self, *, fails_at: range = range(0), opens: bool = True) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.opens = opens
        self.tries = 0
        self.texts: list[str] = []
        self.configs: list[str] = []

    def open(self, folder: Path, *, step: int) -> None:
        if not self.opens:
            raise ConnectionError("no route to host")
        super().open(folder, step=step)

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.tries += 1
        if self.tries - 1 in self.fails_at:
            raise OSError(28, "No space left on device")
        super().write(metrics, step=step)

    def write_text(self, name: str, text: str, *, step: int) -> None:
        self.texts.append(text)

    def write_config(self, config: str) -> None:
        self.configs.append(config)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def written(inner: Failing, tmp_path: Path, num_writes: int) -> None:
    guarded = SafeLogger(inner)
    guarded.open(tmp_path, step=0)
    for step in range(num_writes):
        guarded.write({"train/loss": 1.0}, step=step)
    guarded.close()


def test_a_failure_is_one_warning_and_the_logger_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = Failing(fails_at=range(2, 5))

    written(inner, tmp_path, 8)

    assert [step for step, _ in inner.rows] == [0, 1, 5, 6, 7]
    first, last = warnings_of(caplog)
    assert first.startswith("Failing failed (OSError: [Errno 28] No space left on device); training goes on")
    assert last == "Failing dropped 3 records."
    assert inner.closed == 1


def test_a_logger_that_fails_again_and_again_is_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = Failing(fails_at=range(10**6))

    written(inner, tmp_path, 50)

    assert inner.tries == MOST_FAILURES
    assert [text.split(" (")[0] for text in warnings_of(caplog)] == [
        "Failing failed",
        "Failing is switched off for the rest of this run.",
        "Failing dropped 50 records.",
    ]


def test_failures_that_are_not_in_a_row_do_not_switch_a_logger_off(tmp_path: Path) -> None:
    class EverySecond(Failing):
        def write(self, metrics: Mapping[str, float], *, step: int) -> None:
            if step % 2:
                raise OSError("busy")
            super().write(metrics, step=step)

    inner = EverySecond()

    written(inner, tmp_path, 60)

    assert len(inner.rows) == 30


def test_a_run_trains_to_its_end_though_a_logger_cannot_be_opened(
    make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The second logger gets everything that the first one misses."""
    broken, sound = Failing(opens=False), MemoryLogger()
    trainer = make_trainer(loggers=[broken, sound], log_every="2step")

    result = trainer.fit(Regression(), Data(train=regression_data(16), batch_size=4))

    assert result.steps == 4
    assert broken.rows == []
    first = warnings_of(caplog)[0]
    assert first == "Failing cannot be opened (ConnectionError: no route to host); training goes on without it."
    assert [step for step, _ in sound.rows] == [2, 4]


def test_an_exception_that_ends_python_is_not_caught(tmp_path: Path) -> None:
    class Interrupted(Failing):
        def write(self, metrics: Mapping[str, float], *, step: int) -> None:
            raise KeyboardInterrupt

    guarded = SafeLogger(Interrupted())
    guarded.open(tmp_path, step=0)

    with pytest.raises(KeyboardInterrupt):
        guarded.write({}, step=0)


def test_a_slow_logger_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.loggers.guarded.SLOW_SECONDS", -1.0)

    written(Failing(), tmp_path, 3)

    (text,) = warnings_of(caplog)
    assert text.startswith("Failing took 0 s to write, and training waited; log less often")


def test_long_texts_are_truncated_before_a_logger_gets_them(tmp_path: Path) -> None:
    inner = Failing()
    guarded = SafeLogger(inner)
    guarded.open(tmp_path, step=0)

    guarded.write_text("samples", "a" * (LONGEST_TEXT + 1), step=0)
    guarded.write_text("samples", "short", step=0)
    guarded.write_config("#" * (LONGEST_TEXT + 2))

    assert len(inner.texts[0]) == LONGEST_TEXT
    assert inner.texts[0].endswith("... (100,001 characters)")
    assert inner.texts[1] == "short"
    (config,) = inner.configs
    assert len(config) == LONGEST_TEXT and config.endswith("... (100,002 characters)")


def test_callbacks_can_log_text_images_and_histograms_which_other_loggers_ignore(make_trainer: Any) -> None:
    class Writes(Callback):
        def on_fit_end(self, run: Any) -> None:
            weight = run.task.network[0].weight
            run.log_text("samples", "hello")
            run.log_image("weights", weight.abs())
            run.log_histogram("weights", weight)

    texts = Failing()
    trainer = make_trainer(loggers=[texts, "csv", "jsonl"], callbacks=[Writes()])

    trainer.fit(Regression(), Data(train=regression_data(16), batch_size=4))

    assert texts.texts == ["hello"]
