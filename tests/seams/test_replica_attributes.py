"""Attributes that a step changes under dp, whose replicas share a process: as in a plain loop, or refused by name."""

import random
from collections import deque

import pytest
import torch
from torch import nn

from tests.seams.training import BOUND, Layers, batches, difference, trained
from trainkit.errors import UserError


class Meter:
    def __init__(self):
        self.total = 0.0


class Following(Layers):
    """Weights its loss by what it remembers of earlier losses."""

    def finish(self):
        self.history, self.numbers, self.by_name, self.total = deque(maxlen=4), [], {"loss": 1.0}, 1.0
        self.meter, self.draws, self.mean = Meter(), random.Random(0), torch.ones((), dtype=torch.float64)
        self.assigned, self.steps, self.last = torch.ones((), dtype=torch.float64), 0, 0.0

    def remember(self, loss):
        return 1.0

    def training_step(self, batch):
        loss = super().training_step(batch)
        return loss * self.remember(loss.detach())


class Deque(Following):
    def remember(self, loss):
        self.history.append(float(loss))
        return sum(self.history) / len(self.history)


class Numbers(Following):
    def remember(self, loss):
        self.numbers += [float(loss)]
        return sum(self.numbers)


class ByName(Following):
    def remember(self, loss):
        self.by_name["loss"] = 0.5 * self.by_name["loss"] + float(loss)
        return self.by_name["loss"]


class Total(Following):
    def remember(self, loss):
        self.total += float(loss)
        return self.total


class InAnObject(Following):
    def remember(self, loss):
        self.meter.total += float(loss)
        return self.meter.total


class OwnGenerator(Following):
    def remember(self, loss):
        return self.draws.random()


class InPlace(Following):
    def remember(self, loss):
        self.mean.mul_(0.5).add_(0.5 * loss)
        return self.mean.clone()


class Assigned(Following):
    def remember(self, loss):
        self.assigned = 0.5 * self.assigned + 0.5 * loss
        return self.assigned


class Counter(Following):
    """Counts steps, as every replica does."""

    def remember(self, loss):
        self.steps += 1
        return 1.0 / self.steps


class Kept(Following):
    """Keeps what only this step uses."""

    def remember(self, loss):
        self.last, self.numbers = float(loss), [loss]
        return 1.0 + 0.0 * self.last


def plain_loop(task):
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for inputs, targets in batches():
        loss = nn.functional.mse_loss(task(inputs), targets)
        (loss * task.remember(loss.detach())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Deque, "history"),
        (Numbers, "numbers"),
        (ByName, "by_name"),
        (Total, "total"),
        (InAnObject, "meter"),
        (OwnGenerator, "draws"),
        (InPlace, "mean"),
        (Assigned, "assigned"),
    ],
)
def test_an_attribute_that_replicas_change_by_their_samples_is_refused(make, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"{make.__name__}\.training_step reads and changes {name}, an attribute"):
        trained("dp", make())


@pytest.mark.parametrize("make", [Counter, Kept])
def test_an_attribute_that_is_the_same_in_all_replicas_trains_as_in_a_plain_loop(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert difference(trained("dp", make()), plain_loop(make())) < BOUND
