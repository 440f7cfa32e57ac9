"""A user's own project: its modules in the working folder, its config groups with `--config-dir`."""

import json
import os
import subprocess
import sys

import pytest

from trainkit.cli.main import main

TASK = '''\
import torch
from torch import nn
from trainkit import Data, TaskModule


class Line(TaskModule):
    """Fits a line."""

    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.line = nn.Linear(1, 1)

    def training_step(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.line(x), y)

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Points(Data):
    def __init__(self, points: int = 64, batch_size: int = 16):
        x = torch.linspace(-1, 1, points).unsqueeze(1)
        points = torch.utils.data.TensorDataset(x, 2 * x + 1)
        super().__init__(train=points, validation=points, batch_size=batch_size)
'''
RECIPE = """\
# @package _global_
defaults:
  - override /callbacks: [checkpoint]
  - override /logger: []
task:
  _target_: my_project.tasks.Line
  lr: 0.5
data:
  _target_: my_project.tasks.Points
trainer:
  max_duration: 20epoch
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "__init__.py").write_text('"""Mine."""\n')
    (tmp_path / "my_project" / "tasks.py").write_text(TASK)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(RECIPE)
    return tmp_path


def _trainkit(folder, *argv):
    script = os.path.join(os.path.dirname(sys.executable), "trainkit")  # the installed script, not python -m
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [script, *argv], cwd=folder, capture_output=True, text=True, check=False, timeout=600, env=environment
    )


@pytest.mark.slow
def test_a_project_needs_nothing_but_its_module_and_its_config_folder(project, monkeypatch, capsys):
    ran = _trainkit(project, "fit", "--config-dir", "conf", "recipe=mine", "run_dir=run")
    assert ran.returncode == 0, ran.stderr
    metrics = json.loads((project / "run" / "summary.json").read_text())["metrics"]
    assert metrics["validation/loss"] < 1e-3
    # Its run needs the config folder no more.
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["validate", "checkpoint=run"]) == 0
    assert "validation/loss" in capsys.readouterr().out


def test_a_task_and_data_are_named_on_the_command_line_alone(project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    named = ["task._target_=my_project.tasks.Line", "data._target_=my_project.tasks.Points", "+data.points=32"]
    assert main(["fit", *named, "callbacks=[]", "logger=[]"]) == 0
    assert [path.name for path in (project / "runs").iterdir()] == ["Line"]


def test_own_recipes_are_listed(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    (project / "my_project" / "tasks.py").write_text('"""Fits a line."""\n' + TASK)
    assert main(["recipes", "--config-dir", "conf"]) == 0
    shown = capsys.readouterr().out
    assert "Fits a line.\n" in shown
    assert "trainkit fit --config-dir conf recipe=mine" in shown


def test_an_installed_package_adds_a_strategy_by_its_entry_point(monkeypatch, tmp_path):
    from importlib.metadata import EntryPoint

    from trainkit.strategies.single import SingleStrategy

    from trainkit import registry
    from trainkit.cli.compose import compose_config

    point = EntryPoint("theirs", "trainkit.strategies.single:SingleStrategy", "trainkit.strategies")
    monkeypatch.setattr(registry, "_points", lambda group: [point] if group == "strategy" else [])
    with compose_config() as composer:
        tree = composer.settings(["recipe=digits", "strategy=theirs", "strategy.accumulate=2"]).tree
    assert tree["strategy"] == {"_target_": "trainkit.strategies.single.SingleStrategy", "accumulate": 2}
    assert isinstance(registry.make("strategy", "theirs"), SingleStrategy)
    assert "theirs" in registry.names("strategy")
