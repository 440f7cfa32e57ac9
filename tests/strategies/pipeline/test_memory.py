"""Memory that a plan predicts for a rank, against the bytes that a step allocates there."""

import collections
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from trainkit.strategies.pipeline.plan.memory import state_bytes
from trainkit.strategies.pipeline.plan.schedules import Schedule
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.marks import needs_muon, on_gpu
from tests.strategies.pipeline.training import Training, make, step_batches
from trainkit.optim.chained_optimizer import ChainedOptimizer
from trainkit.task import TaskModule
from trainkit.testing import run_ranks


class _Wide(TaskModule):
    """Layers between which an activation is as large as any other tensor."""

    def __init__(self, optimizer="adamw", width=128, depth=8, dropout=0.1):
        super().__init__()
        self.optimizer = optimizer
        dropouts = [nn.Dropout(dropout)] if dropout else []
        layers = [(nn.Linear(width, width), nn.Tanh(), *dropouts) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(8, width), *itertools.chain(*layers), nn.Linear(width, 3))

    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9 if self.optimizer == "momentum" else 0.0)

    @staticmethod
    def batch(size, generator):
        return torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def _live_bytes(tensors):
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _predicted_and_allocated(optimizer, size, settings, replicas=1):
    """Return the plan's memory of this rank, and the bytes of what it holds and of what one step allocates at once."""
    cuts = ["net.7", "net.13", "net.19"] if "stages_per_rank" in settings else ["net.13"]  # not where a busy CPU cuts
    layout = {"stages": 2, "replicas": replicas, "split_points": cuts}
    strategy = PipelineStrategy(device="cpu", verify="off", **layout, **settings)
    training = Training(make(_Wide, optimizer=optimizer), strategy, precision="fp32")
    batches = step_batches(
        _Wide,
        sizes=[size] * (6 if replicas == 1 else 3 * replicas),
        num_steps=3,
        dtype=torch.float32,
        replica=strategy.comm.rank,
        num_replicas=replicas,
    )
    training.run(batches[:2])
    held = _held_bytes(training)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        training.step(batches[2])
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    allocated = max(itertools.accumulate(change for _, change in changes))
    memory = strategy.plan_report.memory[strategy.mesh.stage]
    kept = _gradients_between_steps(strategy)
    strategy.teardown()
    return memory, held, kept, allocated


def _held_bytes(training):
    """Return the bytes of the parameters and the optimizer's state on this rank."""
    state = training.phase_optimizer.optimizer.state.values()
    held = _live_bytes([*training.strategy.local_state(training.task).values()])
    return held + _live_bytes([value for one in state for value in one.values() if isinstance(value, torch.Tensor)])


def _gradients_between_steps(strategy):
    """Return the bytes of the buckets that replicas sum, which are in shared memory and stay there."""
    reducer = strategy._gradients[""]._reducer
    return 0 if reducer is None else _live_bytes([bucket.contents for bucket in reducer.buckets])


CASES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
    "one in flight": {"schedule": "1f1b", "max_in_flight": 1},
    "ahead": {"schedule": "1f1b", "max_in_flight": 4},
    "gpipe, one in flight": {"schedule": "gpipe", "max_in_flight": 1},
}
OF_REPLICAS = {**{name: CASES[name] for name in ("gpipe", "1f1b", "ahead")}, "sharded": {"shard_optimizer": True}}


def _predictions(cases, replicas):
    return [_predicted_and_allocated(*case, replicas) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "kinds"), [(1, CASES), (2, OF_REPLICAS)], ids=["alone", "replicas"])
def test_the_predicted_memory_of_a_rank_is_what_a_step_takes(replicas, kinds):
    cases = list(itertools.product(("sgd", "momentum", "adamw"), (32, 512), kinds.values()))

    found = run_ranks(_predictions, 2 * replicas, cases, replicas, timeout=400)
    for (optimizer, size, settings), of_ranks in zip(cases, zip(*found, strict=True), strict=True):
        most = collections.defaultdict(int)  # shards of the optimizer differ: the largest is predicted
        for memory, held, *_ in of_ranks:
            most[memory.rank] = max(most[memory.rank], held)
        for memory, held, kept, allocated in of_ranks:
            where = f"{settings}, {optimizer}, {size} samples, rank {memory.rank} of {replicas} replicas"
            is_sharded = "shard_optimizer" in settings
            assert memory.parameters + memory.optimizer == pytest.approx(most[memory.rank], rel=0.01), where
            assert memory.parameters + memory.optimizer == pytest.approx(held, rel=0.1 if is_sharded else 0.01), where
            assert memory.peak == pytest.approx(held + kept + allocated, rel=0.15), where
            assert memory.peak - held - kept == pytest.approx(allocated, rel=0.15), where


def _allocated_on_cuda(settings):
    """Return the plan's memory of this rank, its bytes of parameters and state, and what one step adds on the GPU."""
    strategy = PipelineStrategy(stages=2, device="cuda", backend="gloo", verify="off", **settings)
    training = Training(make(_Wide, width=1024, depth=16, dropout=0.0), strategy, precision="fp32")
    batches = step_batches(_Wide, sizes=[512] * 6, num_steps=3, dtype=torch.float32)
    on_device = list(strategy.step_batches(iter(batches), pin_memory=False))
    training.run(on_device[:2])
    held = _held_bytes(training)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()  # also workspaces of kernels
    torch.cuda.reset_peak_memory_stats()
    training.step(on_device[2])
    allocated = torch.cuda.max_memory_allocated() - before
    memory = strategy.plan_report.memory[strategy.mesh.stage]
    strategy.teardown()
    return memory, held, allocated


@on_gpu
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "one in flight"])
def test_the_predicted_memory_of_a_rank_is_what_a_step_takes_on_a_gpu(schedule):
    for memory, held, allocated in run_ranks(_allocated_on_cuda, 2, CASES[schedule], timeout=400):
        assert memory.parameters + memory.optimizer == pytest.approx(held, rel=0.01)
        assert memory.peak - held == pytest.approx(allocated, rel=0.15)


def test_the_schedule_decides_how_many_micro_batches_a_stage_keeps():
    assert Schedule("gpipe", 2).in_flight(6) == [6, 6]
    assert Schedule("1f1b", 2).in_flight(6) == [2, 1]
    assert Schedule("1f1b", 2).in_flight(1) == [1, 1]
    assert sum(Schedule("interleaved_1f1b", 2, 2).in_flight(6)) > sum(Schedule("1f1b", 4).in_flight(6)[:2])


def _per_element(optimizer, parameter):
    return sum(state_bytes(optimizer).values()) / (4 * parameter.numel())


def test_the_state_of_an_optimizer_is_known_before_its_first_step():
    weight = nn.Parameter(torch.zeros(64, 32))
    other = nn.Parameter(torch.zeros(64, 32))
    known = torch.optim
    scheduled = known.AdamW([weight])
    known.lr_scheduler.StepLR(scheduled, 1)
    of = {
        "sgd": known.SGD([weight], lr=1.0),
        "momentum": known.SGD([weight], lr=1.0, momentum=0.9),
        "adamw": scheduled,
        "fused": known.AdamW([weight], fused=True, amsgrad=True),
        "adafactor": known.Adafactor([weight]),
        "chained": ChainedOptimizer(known.AdamW([weight]), known.SGD([other], lr=1.0, momentum=0.9)),
    }
    found = {name: _per_element(optimizer, weight) for name, optimizer in of.items()}

    expected = {"sgd": 0, "momentum": 1, "adamw": 2, "fused": 3, "adafactor": 96 / 2048, "chained": 3}
    assert found == pytest.approx(expected, abs=0.01)
    assert not any(optimizer.state for optimizer in of.values()) and not weight.any()
    weight.grad, other.grad = torch.ones_like(weight), torch.ones_like(other)
    of["chained"].step()
    assert len(of["chained"].state) == 2


@needs_muon
def test_the_state_of_muon_is_known_before_its_first_step():
    weight = nn.Parameter(torch.zeros(64, 32))
    assert _per_element(torch.optim.Muon([weight]), weight) == 1


class _Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        raise AssertionError("a plan does not call the step of an optimizer that it does not know")


def test_the_state_of_an_unknown_optimizer_is_assumed_until_it_has_some():
    weight = nn.Parameter(torch.zeros(64, 32))
    optimizer = _Own([weight])
    assert _per_element(optimizer, weight) == 2
    optimizer.state[weight]["mean"] = torch.zeros(64, 32)
    assert _per_element(optimizer, weight) == 1
