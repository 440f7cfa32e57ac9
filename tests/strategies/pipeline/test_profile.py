"""Seconds of nodes, and the rates from which they are estimated."""

import pytest
import torch
from torch import nn
from trainkit.strategies.pipeline.graph import NOMINAL, NodeCost, Rates, estimated_seconds
from trainkit.strategies.pipeline.planner import TraceInput, TrainingStep, plan_steps
from trainkit.strategies.pipeline.profile import measured_rates, rates_of

from tests.strategies.pipeline.models import Gpt
from trainkit.task import TaskModule

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_an_estimate_adds_operations_bytes_and_calls_at_the_rates_of_a_device():
    cost = NodeCost(flops=8.0, moved_bytes=6.0, num_calls=2)

    assert estimated_seconds(cost, Rates(flops=4.0, bytes=2.0, seconds_per_call=0.5)) == 2.0 + 3.0 + 1.0


def test_estimates_for_a_cpu_do_not_depend_on_measured_rates():
    assert rates_of(CPU) is NOMINAL


def test_the_measured_rates_of_a_device_are_those_of_its_own_work():
    rates = measured_rates(CPU)

    assert rates.flops > 0 and rates.bytes > 0 and rates.seconds_per_call > 0


class _Host(TaskModule):
    """Adds a tensor that stays in host memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.shift = [torch.ones(4)]

    def training_step(self, batch):
        return (self.layers(batch) + self.shift[0]).sum()


def _planned(task, batch, device):
    return plan_steps(
        [TraceInput(task, TrainingStep(task.training_step), batch, "measured", device=device)], num_stages=2
    )


@needs_cuda
@pytest.mark.gpu
def test_a_step_is_measured_on_the_cuda_device_that_trains_and_the_task_is_as_before():
    task = Gpt()
    before = {name: (id(tensor), tensor.detach().clone()) for name, tensor in task.state_dict(keep_vars=True).items()}

    planned = _planned(task, Gpt.batch(4, torch.Generator()), torch.device("cuda", 0))

    assert planned.whole.measured
    assert all(node.cost.forward_seconds > 0 for node in planned.whole.nodes if node.cost.flops)
    for name, tensor in task.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0] and tensor.is_cpu and torch.equal(tensor, before[name][1])


@needs_cuda
@pytest.mark.gpu
def test_a_step_that_cannot_be_run_on_the_cuda_device_alone_is_estimated():
    planned = _planned(_Host(), torch.ones(2, 4), torch.device("cuda", 0))

    assert not planned.whole.measured
    assert all(node.cost.forward_seconds > 0 for node in planned.whole.nodes if node.cost.flops)
