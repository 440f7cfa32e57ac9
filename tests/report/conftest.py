"""Runs whose folders the reports are made of, written once for all tests of this folder."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.tasks import Regression, regression_data
from trainkit import Callback, Data, Trainer
from trainkit.report.run_report import write_report


class Hostile(Callback):
    """Logs metrics whose names and values are meant to break a page."""

    def on_log(self, run, metrics):
        metrics["train/</script><script>alert(1)</script>"] = 1.0
        metrics["train/a&b\"'<i>"] = float("nan") if run.state.step == 4 else 2.0


class Failing(Callback):
    """Raises in the middle of a run."""

    def on_step_end(self, run):
        if run.state.step == 5:
            raise RuntimeError("the disk is full: <script>alert('x')</script>")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """A run with validation, checkpoints and hostile names that came to its end."""
    return _fit(tmp_path_factory.mktemp("runs") / "finished", [Hostile()])


@pytest.fixture(scope="session")
def failed_run(tmp_path_factory) -> Path:
    """A run that a callback ended."""
    folder = tmp_path_factory.mktemp("runs") / "failed"
    with pytest.raises(RuntimeError, match="disk is full"):
        _fit(folder, [Failing()])
    return folder


def _fit(folder: Path, callbacks: list[Callback]) -> Path:
    torch.manual_seed(0)
    trainer = Trainer(
        max_duration="3epoch",
        log_every="2step",
        run_dir=folder,
        loggers=["jsonl"],
        callbacks=["learning_rate_monitor", "speed_monitor", "checkpoint", *callbacks],
    )
    trainer.fit(Regression(), Data(train=regression_data(32), validation=regression_data(16, seed=1), batch_size=8))
    return folder


@pytest.fixture(scope="session")
def long_run(tmp_path_factory) -> Path:
    """The folder of a run of 100,000 steps that logged each of them, with its report."""
    folder = tmp_path_factory.mktemp("runs") / "long"
    folder.mkdir()
    numbers = torch.rand(100_000, 8, generator=torch.Generator().manual_seed(0)).tolist()
    names = [f"metric_{index}" for index in range(6)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step, row in enumerate(numbers, start=1):
            line = {"step": step, "time": 1.0, "train/loss": 5.0 / (1 + step / 5000) + row[0]}
            line |= {f"train/{name}": value for name, value in zip(names, row[1:], strict=False)}
            line["train/samples_per_second"] = 1000 + 100 * row[7]
            if step == 54_321:
                line["train/loss"] = 40.0  # the one spike that must not be lost
            if step % 1000 == 0:
                line["validation/loss"] = 5.2 / (1 + step / 5000)
            file.write(json.dumps(line) + "\n")
    with (folder / "step_times.jsonl").open("w") as file:
        for step in range(1, 100_001, 10):
            seconds = {"data": 0.01, "forward": 0.02, "backward": 0.05, "optimizer": 0.01, "rest": 0.01}
            file.write(json.dumps({"step": step, "steps": 10, "seconds": seconds, "memory": {"host": 10**9}}) + "\n")
    write_report(folder)
    return folder


@pytest.fixture
def in_folder(tmp_path):
    """The test's own folder as the present one."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)
