"""Loggers that write files: nothing is lost by a kill, and a resumed run goes on behind the step that was restored."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.program import Program
from trainkit.loggers.csv import CsvLogger
from trainkit.loggers.jsonl import JsonlLogger
from trainkit.loggers.tensorboard import TensorBoardLogger

LOGGERS: dict[str, Any] = {"csv": CsvLogger, "jsonl": JsonlLogger, "tensorboard": TensorBoardLogger}


def write(name: str, folder: Path, *steps: int, opened_at: int = 0, is_killed: bool = False) -> None:
    logger = LOGGERS[name]()
    logger.open(folder, step=opened_at)
    for step in steps:
        logger.write({"train/loss": 1.0 / step}, step=step)
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    logger.close()


def write_and_be_killed(name: str, folder: Path) -> None:
    write(name, folder, 4, is_killed=True)


def steps_in(name: str, folder: Path) -> list[int]:
    if name == "csv":
        rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines(), strict=True))
    elif name == "jsonl":
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("train/loss")  # checksums included
        rows = [{"step": event.step, "train/loss": event.value} for event in events]
    for row in rows:
        assert float(row["train/loss"]) == pytest.approx(1.0 / int(row["step"]))
    return [int(row["step"]) for row in rows]


@pytest.mark.parametrize("name", LOGGERS)
def test_resuming_removes_what_was_written_beyond_the_step(tmp_path: Path, name: str) -> None:
    write(name, tmp_path, 10, 20, 30)
    write(name, tmp_path, 21, opened_at=20)
    assert steps_in(name, tmp_path) == [10, 20, 21]


@pytest.mark.parametrize(("name", "missing"), [("csv", 2), ("jsonl", 1), ("jsonl", 10), ("tensorboard", 5)])
def test_what_a_kill_left_incomplete_is_dropped(tmp_path: Path, name: str, missing: int) -> None:
    write(name, tmp_path, 10, 20)
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    path.write_bytes(path.read_bytes()[:-missing])
    write(name, tmp_path, 21, opened_at=20)
    assert steps_in(name, tmp_path) == [10, 21]


@pytest.mark.parametrize("name", LOGGERS)
def test_a_killed_process_loses_nothing(tmp_path: Path, name: str) -> None:
    with Program(write_and_be_killed, name, tmp_path) as program:
        assert program.wait() == -signal.SIGKILL
    assert steps_in(name, tmp_path) == [4]
