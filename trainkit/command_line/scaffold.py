"""`trainkit new NAME`: a project with a task, data, a recipe and a test that pass as they are."""

from __future__ import annotations

import keyword
from pathlib import Path

from trainkit.command_line.cli import Arguments
from trainkit.errors import UserError

_EXAMPLE = "trainkit new my_project"

_README = """\
# {name}

    trainkit fit --config-dir conf recipe={name}
    python -m pytest

| file | what is in it |
|---|---|
| `{name}/task.py` | the model, its loss and its optimizer |
| `{name}/data.py` | what is read |
| `conf/recipe/{name}.yaml` | their settings; every key can be changed on the command line: `task.width=64` |
| `tests/test_{name}.py` | a step by itself, and a run that learns |

Other ways to train it:

    trainkit fit --config-dir conf recipe={name} strategy=ddp strategy.devices=2
    trainkit fit --config-dir conf recipe={name} task.width=64 trainer.max_duration=5epoch
    trainkit fit -m --config-dir conf recipe={name} task.lr=1e-3,1e-2
    trainkit parity --config-dir conf recipe={name} strategies=[single,dp]
    trainkit explain --config-dir conf recipe={name} task.width
"""

_TASK = '''\
"""Points of two rings, told apart by a small network."""

from torch import nn
from torch.nn import functional
from torch.optim import AdamW

from trainkit import TaskModule


class {prefix}Task(TaskModule):
    """Classifies points of the plane.

    Args:
        width: Units of each hidden layer.
        lr: Learning rate of AdamW.

    """

    def __init__(self, *, width: int = 32, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def forward(self, points):
        """Return the logits of points of shape (batch, 2)."""
        return self.network(points)

    def training_step(self, batch):
        """Return the loss, and whatever else should be logged."""
        points, rings = batch
        logits = self(points)
        accuracy = (logits.argmax(dim=1) == rings).float().mean()
        return {{"loss": functional.cross_entropy(logits, rings), "accuracy": accuracy}}

    def validation_step(self, batch):
        """Return the same, without gradients."""
        return self.training_step(batch)

    def predict_step(self, batch):
        """Return the most likely ring of each point."""
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self):
        """Return the optimizer."""
        return AdamW(self.parameters(), lr=self.lr)
'''

_DATA = '''\
"""Points of two rings with noise."""

import torch
from torch.utils.data import TensorDataset

from trainkit import Data

_SEEDS = {{"train": 0}}


class {prefix}Data(Data):
    """Points and the ring that each is of.

    Args:
        num_points: Points to train on; a quarter as many validate.
        noise: Deviation of what is added to every coordinate.
        batch_size: Points of one optimizer step, over all ranks.

    """

    def __init__(self, *, num_points: int = 512, noise: float = 0.1, batch_size: int = 32) -> None:
        super().__init__(batch_size=batch_size)
        self.num_points = num_points
        self.noise = noise

    def dataset(self, stage: str) -> TensorDataset:
        """Return the points of `train`, `validation`, `test` or `predict`."""
        is_train = stage == "train"
        count = self.num_points if is_train else self.num_points // 4
        generator = torch.Generator().manual_seed(_SEEDS.get(stage, 1))
        rings = torch.randint(2, (count,), generator=generator)
        angles = 6.2832 * torch.rand(count, generator=generator)
        points = torch.stack([angles.cos(), angles.sin()], dim=1) * (1.0 + rings[:, None])
        return TensorDataset(points + self.noise * torch.randn(points.shape, generator=generator), rings)
'''

_RECIPE = """\
# @package _global_
task:
  _target_: {name}.task.{prefix}Task
  width: 32 # units of each hidden layer
  lr: 1e-2 # learning rate of AdamW

data:
  _target_: {name}.data.{prefix}Data
  num_points: 512 # points to train on; a quarter as many validate
  noise: 0.1 # deviation of what is added to every coordinate
  batch_size: 32 # points of one optimizer step, over all ranks

trainer:
  max_duration: 10epoch

callbacks:
  checkpoint:
    metric: validation/accuracy # what the best checkpoint is chosen by
    mode: max
"""

_TEST = '''\
"""The task takes a step by itself, and a run learns."""

from {name}.data import {prefix}Data
from {name}.task import {prefix}Task

from trainkit import Trainer


def test_a_step_needs_nothing_but_a_batch():
    batch = {prefix}Data().dataset("train")[:8]
    assert {prefix}Task().training_step(batch)["loss"] > 0


def test_a_run_learns(tmp_path):
    trainer = Trainer(max_duration="10epoch", run_dir=tmp_path / "run", callbacks=[], loggers=[])
    result = trainer.fit({prefix}Task(), {prefix}Data())
    assert result.metrics["validation/accuracy"] > 0.95
'''

_PYPROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.10"
dependencies = ["trainkit"]

[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
packages = ["{name}"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]
"""

_FILES = {
    "README.md": _README,
    "pyproject.toml": _PYPROJECT,
    "{name}/__init__.py": '"""A project that trains with trainkit."""\n',
    "{name}/task.py": _TASK,
    "{name}/data.py": _DATA,
    "conf/recipe/{name}.yaml": _RECIPE,
    "tests/test_{name}.py": _TEST,
    ".gitignore": "runs/\n__pycache__/\n*.egg-info/\n",
}


def new(arguments: Arguments) -> int:
    """Write the project that was named, in a new folder here."""
    if len(arguments.overrides) != 1:
        raise UserError(f"new takes one name. Type {_EXAMPLE}")
    path = Path(arguments.overrides[0])
    _check(path)
    for written in write_project(path):
        print(f"  {written}")
    print(f"\ncd {path}\ntrainkit fit --config-dir conf recipe={path.name}\npython -m pytest")
    return 0


def write_project(path: Path) -> list[Path]:
    """Leave the files of a project named as the folder `path`, and return them."""
    names = {"name": path.name, "prefix": "".join(word.capitalize() for word in path.name.split("_"))}
    written = []
    for place, text in _FILES.items():
        file = path / place.format(**names)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(**names) if "{name}" in text or "{{" in text else text, encoding="utf-8")
        written.append(file)
    return written


def _check(path: Path) -> None:
    name = path.name
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        near = "".join(letter if letter.isalnum() else "_" for letter in name.lower()).strip("_") or "my_project"
        near = near if not near[:1].isdigit() and not keyword.iskeyword(near) else f"project_{near}"
        raise UserError(f"'{name}' cannot be imported in Python. Did you mean '{near}'? Type trainkit new {near}")
    if name in ("trainkit", "torch", "conf", "tests", "hydra"):
        raise UserError(f"'{name}' is the name of something else; choose another. Type {_EXAMPLE}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} is there already; choose another name, or remove it.")
