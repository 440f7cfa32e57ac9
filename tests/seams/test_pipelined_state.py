"""State that a pipelined step changes: what is sent to the next stage is that of its micro-batch."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.seams.training import BOUND, Layers, difference
from tests.strategies.pipeline.training import Training, step_batches
from trainkit.testing import run_ranks

SIZES = (2, 2, 2, 2)


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

    def batch(self, size, generator):
        inputs = torch.randn(size, 8, generator=generator)
        return inputs, inputs.sum(1, keepdim=True)


class AveragedInAnObject(Averaged):
    kind = AverageInAnObject


def weights_of_two_stages(make_task):
    """Return the weights after two steps of four micro-batches, by the strategy alone: a run refuses such state."""
    task = make_task()
    strategy = PipelineStrategy(stages=2, device="cpu", schedule="gpipe", verify="off", split_points=["c"])
    Training(task, strategy).run(step_batches(task, sizes=SIZES, num_steps=2))
    weights = copy.deepcopy(strategy.state_dict(task))  # complete on rank 0
    strategy.teardown()
    return weights


@pytest.mark.parametrize("make_task", [Averaged, AveragedInAnObject])
def test_state_that_is_sent_is_that_of_its_micro_batch(make_task):
    task = make_task()
    optimizer = task.configure_optimizers()
    for step in step_batches(task, sizes=SIZES, num_steps=2):
        for micro_batch in step.micro_batches:
            (task.training_step(micro_batch.batch) / len(SIZES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, _ = run_ranks(weights_of_two_stages, 2, make_task)
    assert difference(weights, task.state_dict()) < BOUND
