"""A checkpoint in which one value was altered, with a right hash: it is refused by name, or the run goes on."""

import copy
import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint

from trainkit import Data, LRSchedule, TaskModule, Trainer
from trainkit.errors import CheckpointError, UserError

DELETED = object()
VALUES = [DELETED, None, "text", -1, 2**70, 10**400, 1.5, float("nan"), [], {}, [3], {"a": 1}, True]
VALUES += [torch.zeros(2), torch.zeros(()), torch.full((), -5)]
LONGEST = 20  # of lists whose elements are altered one by one


class Model(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        parts = [LinearLR(optimizer), OneCycleLR(optimizer, 0.1, total_steps=50)]
        plateau = LRSchedule(ReduceLROnPlateau(optimizer), every="metric", metric="validation/loss")
        return optimizer, [SequentialLR(optimizer, parts, milestones=[2]), plateau]


def fit(steps, **settings):
    points = TensorDataset(torch.randn(16, 2))
    trainer = Trainer(
        max_duration=f"{steps}step",
        callbacks=["speed_monitor", Checkpoint(every=None)],
        loggers=[],
        report=False,
        num_sanity_batches=0,
        evaluate_every="2step",
        skip_grad_norm_factor=100.0,
        run_dir=None if settings else "run",
    )
    trainer.fit(Model(), Data(train=points, validation=points, batch_size=4), **settings)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("saved"))
        fit(3)
        [file] = Path("run/checkpoints").glob("*.pt")
        return torch.load(file, weights_only=True)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def places(value, place=()):
    """Yield the places of all values in a payload."""
    if isinstance(value, dict):
        inner = value.items()
    else:
        inner = enumerate(value) if isinstance(value, (list, tuple)) and len(value) < LONGEST else ()
    for key, item in inner:
        yield from places(item, (*place, key))
    if place and place[0] != "trainkit_checkpoint":
        yield place


def altered(value, place, new):
    """Return a copy of a payload with another value at a place."""
    if not place:
        return new
    key, *rest = place
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    items[key] = altered(items[key], rest, new)
    if items[key] is DELETED:
        del items[key]
    return items if isinstance(value, dict) else type(value)(items.values())


def resume(content):
    torch.save(copy.deepcopy(content), "altered.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what was altered
        fit(4, resume="altered.pt")


def check(content, cases):
    assert cases
    failed = []
    for place, value in cases:
        try:
            resume(altered(content, place, value))
        except UserError:
            continue
        except Exception as error:
            failed.append((place, value, repr(error)))
    assert not failed


def test_any_altered_value_is_refused_by_name_or_the_run_goes_on(content):
    check(content, [(place, VALUES[index % len(VALUES)]) for index, place in enumerate(places(content))][::6])


@pytest.mark.slow
def test_every_kind_of_altered_value_is_refused_by_name_or_the_run_goes_on(content):
    check(content, [(place, value) for place in places(content) for value in VALUES])


SILENT = {
    ("optimizer", "state", 2): DELETED,
    ("optimizer", "state", 2, "exp_avg"): DELETED,
    ("optimizer", "state", 0, "exp_avg"): torch.zeros(1),
    ("optimizer", "param_groups", 0, "lr"): DELETED,
    ("optimizer", "param_groups", 0, "maximize"): True,
    ("optimizer", "param_groups", 0, "weight_decay"): -1.0,
    ("schedules", 0, "last_epoch"): DELETED,
    ("schedules", 0, "_schedulers", 1, "last_epoch"): 1.5,
    ("schedules", 1, "num_bad_epochs"): "text",
    ("schedules", 1, "best"): DELETED,
    ("state", "epoch"): 2**70,
    ("state", "position"): 1.5,
    ("task", "net.0.weight"): 3.0,
    ("callbacks", "SpeedMonitor", "evaluation_seconds"): None,
}


@pytest.mark.parametrize("place", SILENT, ids=lambda place: ".".join(map(str, place)))
def test_an_altered_value_that_would_change_the_run_is_refused(content, place):
    with pytest.raises(CheckpointError, match=r"altered\.pt (holds|has|was)"):
        resume(altered(content, place, SILENT[place]))


def test_moments_that_are_missing_since_the_optimizer_ignores_them_are_noticed(content):
    with pytest.raises(CheckpointError, match="values are missing in the state of the optimizer"):
        resume(altered(content, ("optimizer", "state", 0), DELETED))
