"""The loss between log points, which a display reads without waiting."""

import math
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks import progress_bar
from trainkit.strategies.single import SingleStrategy

from tests.marks import on_gpu
from tests.tasks import Fitting
from trainkit import Callback, Data, Trainer
from trainkit.metrics.latest import SECONDS, LatestLoss
from trainkit.metrics.step_output import StepOutput


@pytest.fixture
def clock(monkeypatch):
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def test_a_loss_is_taken_at_most_twice_a_second(clock):
    latest, seen = LatestLoss(), []
    for step in range(1, 8):
        latest.offer([StepOutput(torch.tensor(step / 8.0), 4)], step)
        seen.append(latest.read())
        clock[0] += SECONDS / 2

    assert seen == [(1, 0.125), (1, 0.125), (3, 0.375), (3, 0.375), (5, 0.625), (5, 0.625), (7, 0.875)]


def test_a_step_without_outputs_or_without_a_loss_changes_nothing(clock):
    latest = LatestLoss()
    latest.offer([], 1)
    latest.offer([StepOutput(None, 4)], 2)

    assert latest.read() is None
    latest.offer([StepOutput(torch.tensor(0.5), 4)], 3)
    assert latest.read() == (3, 0.5)


@on_gpu
def test_a_loss_on_a_gpu_is_read_once_its_copy_has_ended(clock):
    latest = LatestLoss()
    large = torch.full((2048, 2048), 2.0**-11, device="cuda")
    for step in range(1, 5):
        loss = (large @ large).mean() * step
        latest.offer([StepOutput(loss, 4)], step)
        seen = latest.read()
        assert seen is None or seen[1] == 2.0**-11 * seen[0]
        clock[0] += 2 * SECONDS
    torch.cuda.synchronize()
    latest.offer([StepOutput(loss, 4)], 5)
    step, value = latest.read()
    assert value == 2.0**-11 * step


def test_only_a_display_makes_the_loop_take_losses():
    class Ask(Callback):
        def on_step_end(self, run):
            asked.append(run.means.latest)

    asked = []
    data = Data(train=TensorDataset(torch.ones(8, 1)), batch_size=4)
    task = Fitting(nn.Linear(1, 1), lambda task: torch.optim.SGD(task.parameters(), lr=0.1))
    callbacks = ["progress_bar", Ask()]
    trainer = Trainer(SingleStrategy(device="cpu"), max_duration="2step", callbacks=callbacks, loggers=[], report=False)
    trainer.fit(task, data)
    assert asked == [None, None]


def test_a_display_makes_the_loop_take_losses(monkeypatch):
    class Ask(Callback):
        def on_step_end(self, run):
            asked.append(run.means.latest)

        def on_fit_end(self, run):
            asked.append(run.means.latest.read())

    asked = []
    monkeypatch.setattr(progress_bar, "on_terminal", lambda: True)
    data = Data(train=TensorDataset(torch.ones(8, 1)), batch_size=4)
    task = Fitting(nn.Linear(1, 1), lambda task: torch.optim.SGD(task.parameters(), lr=0.1))
    callbacks = ["progress_bar", Ask()]
    trainer = Trainer(SingleStrategy(device="cpu"), max_duration="2step", callbacks=callbacks, loggers=[], report=False)
    trainer.fit(task, data)
    first, second, (step, loss) = asked
    assert isinstance(first, LatestLoss) and second is first
    assert step in (1, 2) and math.isfinite(loss)
