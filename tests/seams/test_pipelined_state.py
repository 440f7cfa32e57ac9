"""State that a pipelined step changes: what is sent to the next stage is that of its micro-batch."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.seams.training import BOUND, MAKE_STRATEGY, Layers, batches, difference, trained


@pytest.fixture(autouse=True)
def _four_micro_batches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"device": "cpu", "stages": 2, "accumulate": 4, "schedule": "gpipe", "verify": "off"}
    monkeypatch.setitem(MAKE_STRATEGY, "pipeline", lambda: PipelineStrategy(split_points=["c"], **settings))


class Average(nn.Module):
    """Returns its moving average of the inputs, too large to be sent at once."""

    def __init__(self):
        super().__init__()
        self.average = torch.zeros(1 << 19, dtype=torch.float64)

    def forward(self, inputs):
        return self.average.mul_(0.5).add_(inputs.mean())


class AverageInAnObject(Average):
    """The same with the average in an object that is no module."""

    def __init__(self):
        super().__init__()
        self.state = SimpleNamespace(average=self.average)
        del self.average

    def forward(self, inputs):
        return self.state.average.mul_(0.5).add_(inputs.mean())


class Averaged(Layers):
    """The average, which changes at the beginning of a step, is used at its end."""

    kind = Average

    def build(self):
        self.inside = self.kind()

    def training_step(self, batch):
        inputs, targets = batch
        average = self.inside(inputs)
        return nn.functional.mse_loss(self(inputs) + average.mean(), targets)


class AveragedInAnObject(Averaged):
    kind = AverageInAnObject


@pytest.mark.parametrize("make_task", [Averaged, AveragedInAnObject])
def test_state_that_is_sent_is_that_of_its_micro_batch(make_task):
    task = make_task()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for inputs, targets in batches():
        for rows in range(0, 8, 2):
            (task.training_step((inputs[rows : rows + 2], targets[rows : rows + 2])) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(trained("pipeline", make_task()), task.state_dict()) < BOUND
