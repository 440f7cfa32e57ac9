from __future__ import annotations

import json
import math
from pathlib import Path

from trainkit.loggers.guarded import SafeLogger
from trainkit.loggers.jsonl import JsonlLogger


def lines(folder: Path) -> list[dict[str, float | str]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_the_step_the_time_and_the_metrics(tmp_path: Path) -> None:
    logger = JsonlLogger()
    logger.open(tmp_path, step=0)
    logger.write({"train/loss": 0.25}, step=4)
    logger.close()

    (line,) = lines(tmp_path)
    assert line.pop("time") > 1.7e9  # type: ignore[operator]
    assert line == {"step": 4, "train/loss": 0.25}


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


def test_it_may_be_closed_twice_and_writes_nothing_then(tmp_path: Path) -> None:
    logger = SafeLogger(JsonlLogger())
    logger.open(tmp_path, step=0)
    logger.close()
    logger.close()

    logger.write({"train/loss": 1.0}, step=1)

    assert lines(tmp_path) == []
