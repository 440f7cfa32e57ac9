from __future__ import annotations

import csv
import math
from pathlib import Path

from trainkit.loggers.csv import CsvLogger


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [
            {name: value for name, value in row.items() if name != "time"} for row in csv.DictReader(file, strict=True)
        ]


def test_a_metric_that_comes_later_adds_a_column_and_leaves_cells_empty(tmp_path: Path) -> None:
    logger = CsvLogger()
    logger.open(tmp_path, step=0)
    logger.write({"train/loss": 0.5}, step=1)
    logger.write({"validation/loss": 0.25}, step=1)
    logger.write({"train/loss": 0.125}, step=2)
    logger.close()

    assert rows(tmp_path) == [
        {"step": "1", "train/loss": "0.5", "validation/loss": ""},
        {"step": "1", "train/loss": "", "validation/loss": "0.25"},
        {"step": "2", "train/loss": "0.125", "validation/loss": ""},
    ]


def test_resuming_removes_what_was_written_beyond_the_step_and_keeps_the_columns(tmp_path: Path) -> None:
    logger = CsvLogger()
    logger.open(tmp_path, step=0)
    for step in (10, 20, 30):
        logger.write({"train/loss": float(step)}, step=step)

    resumed = CsvLogger()
    resumed.open(tmp_path, step=20)
    resumed.write({"train/accuracy": 0.5}, step=21)
    resumed.close()
    logger.close()

    assert [(row["step"], row["train/loss"], row["train/accuracy"]) for row in rows(tmp_path)] == [
        ("10", "10.0", ""),
        ("20", "20.0", ""),
        ("21", "", "0.5"),
    ]


def test_names_with_commas_and_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    logger = CsvLogger()
    logger.open(tmp_path, step=0)
    logger.write({'a,"b"': math.nan, "c": -math.inf}, step=1)
    logger.close()

    (row,) = rows(tmp_path)
    assert math.isnan(float(row['a,"b"']))
    assert float(row["c"]) == -math.inf
