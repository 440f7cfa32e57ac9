from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest

from tests.program import Program
from trainkit.loggers.guarded import SafeLogger
from trainkit.loggers.jsonl import JsonlLogger


def lines(folder: Path) -> list[dict[str, float | str]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def written(folder: Path, *steps: int, opened_at: int = 0) -> None:
    logger = JsonlLogger()
    logger.open(folder, step=opened_at)
    for step in steps:
        logger.write({"train/loss": 1.0 / step}, step=step)
    logger.close()


def test_a_line_holds_the_step_the_time_and_the_metrics(tmp_path: Path) -> None:
    written(tmp_path, 4)

    (line,) = lines(tmp_path)
    assert line.pop("time") > 1.7e9  # type: ignore[operator]
    assert line == {"step": 4, "train/loss": 0.25}


def test_resuming_removes_what_was_written_beyond_the_step(tmp_path: Path) -> None:
    written(tmp_path, 10, 20, 30)

    written(tmp_path, 21, opened_at=20)

    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 21]


@pytest.mark.parametrize("missing", [1, 10])
def test_a_line_that_a_kill_left_incomplete_is_dropped(tmp_path: Path, missing: int) -> None:
    written(tmp_path, 10, 20)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-missing])

    written(tmp_path, 21, opened_at=20)

    assert [line["step"] for line in lines(tmp_path)] == [10, 21]


def test_numbers_that_are_not_finite_come_back_as_they_were(tmp_path: Path) -> None:
    logger = JsonlLogger()
    logger.open(tmp_path, step=0)
    logger.write({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1}, step=1)
    logger.close()

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert math.isnan(float(line["a"]))
    assert [float(line[name]) for name in "bcd"] == [math.inf, -math.inf, 0.1]


def write_and_be_killed(folder: Path) -> None:
    logger = JsonlLogger()
    logger.open(folder, step=0)
    logger.write({"train/loss": 0.5}, step=7)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_loses_no_line(tmp_path: Path) -> None:
    with Program(write_and_be_killed, tmp_path) as program:
        assert program.wait() == -signal.SIGKILL
    assert [line["step"] for line in lines(tmp_path)] == [7]


def test_it_may_be_closed_twice_and_writes_nothing_then(tmp_path: Path) -> None:
    logger = SafeLogger(JsonlLogger())
    logger.open(tmp_path, step=0)
    logger.close()
    logger.close()

    logger.write({"train/loss": 1.0}, step=1)

    assert lines(tmp_path) == []
