"""Seconds of nodes, and the rates from which they are estimated."""

import pytest
import torch
from torch import nn
from trainkit.strategies.pipeline.plan.planner import TraceInput, TrainingStep, plan_steps, trace_expanding
from trainkit.strategies.pipeline.plan.profile import measured_rates, rates_of
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.pipeline.trace.graph import NOMINAL, NodeCost, Rates, estimated_seconds
from trainkit.strategies.pipeline.trace.tracer import trace

from tests.marks import on_gpu
from tests.strategies.pipeline.models import Gpt
from trainkit import Data
from trainkit.optim.precision import Precision
from trainkit.task import TaskModule
from trainkit.testing import run_ranks

CPU = torch.device("cpu")


def test_an_estimate_adds_operations_bytes_and_calls_at_the_rates_of_a_device():
    cost = NodeCost(flops=8.0, moved_bytes=6.0, num_calls=2)

    assert estimated_seconds(cost, Rates(flops=4.0, bytes=2.0, seconds_per_call=0.5)) == 2.0 + 3.0 + 1.0


def test_estimates_for_a_cpu_do_not_depend_on_measured_rates():
    assert rates_of(CPU) is NOMINAL
    assert rates_of(CPU, torch.bfloat16) is NOMINAL


def test_the_measured_rates_of_a_device_are_those_of_its_own_work():
    rates = measured_rates(CPU)

    assert rates.flops > 0 and rates.bytes > 0 and rates.seconds_per_call > 0


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("fp32", torch.float32), ("bf16-true", torch.bfloat16), ("bf16-mixed", torch.bfloat16), ("fp64", torch.float64)],
)
def test_products_of_matrices_are_measured_in_the_dtype_of_the_run(monkeypatch, precision, expected):
    multiplied, mm = set(), torch.mm

    def seen(first, second):
        multiplied.add(first.dtype)
        return mm(first, second)

    monkeypatch.setattr(torch, "mm", seen)
    measured_rates(CPU, Precision(precision).compute_type)

    assert multiplied == {expected}


class _WideAndDeep(TaskModule):
    """A module with most of the operations and one with most of the calls."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        self.deep = nn.Sequential(*[nn.LayerNorm(256) for _ in range(40)])

    def training_step(self, batch):
        return self.deep(self.wide(batch)).sum()


@pytest.mark.parametrize(
    ("rates", "expanded"),
    [
        (Rates(flops=1.0, bytes=1e12, seconds_per_call=1e-9), "wide"),
        (Rates(flops=1e15, bytes=1e15, seconds_per_call=1.0), "deep"),
    ],
)
def test_the_rates_of_the_device_decide_which_modules_are_expanded(rates, expanded):
    task = _WideAndDeep()
    trace_input = TraceInput(task, TrainingStep(task.training_step), torch.ones(8, 256), "estimated", rates=rates)

    leaf_modules = trace_expanding(
        trace_input, trace_input.trace(frozenset()), limit=0.4, expanded=frozenset(), changed=frozenset()
    ).leaf_modules

    kept = {"wide": "deep", "deep": "wide"}[expanded]
    assert kept in leaf_modules and expanded not in leaf_modules


@pytest.mark.parametrize(("rates", "computed"), [(NOMINAL, True), (Rates(1.0, 1.0, 1.0), False)])
def test_every_stage_computes_what_is_cheap_on_the_device(rates, computed):
    task = _Host()

    def step(batch):
        return (task.layers(batch) + batch.square()).sum()

    graph = trace(task, step, torch.ones(2, 4), leaf_modules=frozenset({"layers"}), rates=rates).graph

    assert {node.name: node.is_batch_only for node in graph.nodes}["square"] == computed


def test_a_plan_takes_the_rates_of_the_device_that_trains_in_the_dtype_of_the_run(monkeypatch):
    asked, cuda = [], torch.device("cuda")

    def rates_of(device, dtype):
        asked.append((device, dtype))
        return Rates(flops=1.0, bytes=1e12, seconds_per_call=0.0)

    monkeypatch.setattr("trainkit.strategies.pipeline.run.staged_model.rates_of", rates_of)
    model, task = PipelineStrategy(stages=2, trace="fake").staged_model, _WideAndDeep()
    model.dtype = torch.bfloat16

    planned = model.make_plan(task, {"": TrainingStep(task.training_step)}, torch.ones(8, 256), cuda)

    assert asked == [(cuda, torch.bfloat16)]
    seconds = {node.name: node.cost.forward_seconds for node in planned.whole.nodes}
    assert seconds["wide.0"] == pytest.approx(2 * 8 * 256 * 256, rel=0.01)


def _dtype_of_run():
    strategy = PipelineStrategy(stages=1, device="cpu")
    strategy.setup(Precision("bf16-mixed"))
    strategy.teardown()
    return strategy.staged_model.dtype


def test_a_run_has_the_dtype_of_its_precision():
    assert run_ranks(_dtype_of_run, 1, timeout=120) == [torch.bfloat16]


class _Planned(Exception):
    """Ends a preview where it plans."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_preview_has_the_costs_of_the_requested_device(monkeypatch, device):
    def planned(strategy, *_):
        raise _Planned(strategy.device.type, strategy.staged_model.dtype)

    monkeypatch.setattr(PipelineStrategy, "_plan_alone", planned)
    monkeypatch.setattr("trainkit.strategies.pipeline.strategy.pick", torch.device)
    strategy = PipelineStrategy(stages=2, device=device)

    with pytest.raises(_Planned) as found:
        strategy.preview(_Host(), Data(train=[1.0]).stage_data("train"), precision=Precision("bf16-mixed"))

    assert found.value.args == (device, torch.bfloat16)


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


@on_gpu
def test_a_step_is_measured_on_the_cuda_device_that_trains_and_the_task_is_as_before():
    task = Gpt()
    before = {name: (id(tensor), tensor.detach().clone()) for name, tensor in task.state_dict(keep_vars=True).items()}

    planned = _planned(task, Gpt.batch(4, torch.Generator()), torch.device("cuda", 0))

    assert planned.whole.measured
    assert all(node.cost.forward_seconds > 0 for node in planned.whole.nodes if node.cost.flops)
    for name, tensor in task.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0] and tensor.is_cpu and torch.equal(tensor, before[name][1])


@on_gpu
def test_a_step_that_cannot_be_run_on_the_cuda_device_alone_is_estimated():
    planned = _planned(_Host(), torch.ones(2, 4), torch.device("cuda", 0))

    assert not planned.whole.measured
    assert all(node.cost.forward_seconds > 0 for node in planned.whole.nodes if node.cost.flops)
