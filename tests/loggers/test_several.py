"""One run that writes to all loggers at once: what each kept is read back with the package that reads it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.loggers import test_mlflow, test_tensorboard
from tests.loggers.test_wandb import history
from tests.program import Program
from tests.tasks import Regression, regression_data
from trainkit import Data, Trainer


def train() -> None:
    from trainkit.loggers.mlflow import MlflowLogger
    from trainkit.loggers.wandb import WandbLogger

    loggers = ["tensorboard", "jsonl", "csv", WandbLogger(mode="offline", project="p"), MlflowLogger()]
    data = Data(train=regression_data(24), validation=regression_data(8, seed=1), batch_size=8)
    settings: dict[str, Any] = {"max_duration": "2epoch", "log_every": "1step", "callbacks": []}
    Trainer("single", run_dir=Path("run"), loggers=loggers, **settings).fit(Regression(), data)


@pytest.mark.slow
def test_all_loggers_at_once_keep_the_same_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a separate process, since W&B starts a service."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    with Path("errors.txt").open("w") as file, Program(train, streams=(0, 1, file.fileno())) as program:
        code = program.wait()
    errors = Path("errors.txt").read_text()
    assert code == 0, errors
    assert "logger" not in errors  # none has failed

    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6]
    with (folder / "metrics.csv").open() as file:
        rows = [(int(row["step"]), float(row["train/loss"])) for row in csv.DictReader(file) if row["train/loss"]]
    assert rows == expected
    of_wandb = [(row["step"], row["train/loss"]) for row in history(folder)[0] if "train/loss" in row]
    assert of_wandb == expected
    assert sorted(test_mlflow.curve(folder, "train/loss")) == expected
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    single = [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]  # TensorBoard keeps 32 bits
    assert test_tensorboard.curve(events, "train/loss") == single
