"""Planning leaves no trace, and what changes the calls of a step from run to run is named."""

import functools
import random
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from torch import nn

from tests.strategies.pipeline.training import plan
from trainkit.errors import UserError

BATCH = torch.ones(2, 3)


class _Log:
    def __init__(self):
        self.lines = ["first"]
        self.count = 0


class _Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class _Warm(nn.Linear):
    """Counts its calls, and scales its result for the first ones."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 8)


class _Stateful(nn.Module):
    """Changes in every step all that a snapshot restores."""

    def __init__(self):
        super().__init__()
        self.first, self.second = _Warm(3, 3), nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.tensor, self.array = torch.zeros(3), numpy.zeros(3)
        self.history, self.recent, self.seen = [], deque(maxlen=2), {"a"}
        self.counts, self.log, self.slotted = Counter(), _Log(), _Slotted()
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generator, self.old_generator = numpy.random.default_rng(1), numpy.random.RandomState(1)
        self.python_generator = random.Random(1)
        calls = 0

        def count(module, args, output):
            nonlocal calls
            calls += 1

        self.num_hook_calls = lambda: calls
        self.second.register_forward_hook(count)

    scale = functools.lru_cache(lambda self, size: 1.0 / size)

    def training_step(self, batch):
        hidden = self.first(batch)
        with torch.no_grad():
            self.mean += 1
            self.tensor += 1
        self.array += 1
        self.history.append(len(self.history))
        self.recent.append(1)
        self.seen.add("b")
        self.counts["steps"] += 1
        self.log.lines.append("a step")
        self.log.count += 1
        self.slotted.count += 1
        self.new_attribute = True
        noise = torch.rand(3, generator=self.torch_generator)
        noise = noise + self.numpy_generator.random() + self.old_generator.rand() + self.python_generator.random()
        return (self.second(hidden + noise) * self.scale(3)).sum()

    def facts(self):
        generators = [
            self.torch_generator.get_state().tolist(),
            self.numpy_generator.bit_generator.state,
            self.old_generator.get_state()[1].tolist(),
            self.python_generator.getstate(),
        ]
        containers = [list(self.history), list(self.recent), set(self.seen), dict(self.counts), list(self.log.lines)]
        numbers = [self.first.calls, self.log.count, self.slotted.count, self.num_hook_calls()]
        arrays = [self.mean.tolist(), self.tensor.tolist(), self.array.tolist()]
        cache = type(self).scale.cache_info().currsize
        return {
            "generators": generators,
            "containers": containers,
            "numbers": numbers,
            "arrays": arrays,
            "cache": cache,
        }


@pytest.mark.parametrize("costs", ["measured", "estimated"])
def test_a_task_is_after_planning_as_it_was_before(costs):
    task = _Stateful()
    names, before = set(vars(task)), task.facts()

    plan(task, task.training_step, BATCH, num_stages=2, costs=costs)

    assert task.facts() == before
    assert set(vars(task)) == names


class _Rotary(nn.Module):
    """Fills a cache in its first call."""

    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(3, 3), None

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.arange(3.0).cos()
        return self.linear(x) * self.cache


class _Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = _Rotary(), _Rotary()

    def training_step(self, batch):
        return self.second(self.first(batch)).sum()


def test_a_module_that_fills_a_cache_in_its_first_call_is_a_leaf_module():
    task = _Cached()

    graph, partition = plan(task, task.training_step, BATCH, num_stages=2)

    assert graph.leaf_modules == {"first", "second"}
    assert partition.cuts == (1,)
    assert task.first.cache is None


class _CachedInTheStep(_Cached):
    cache = None

    def training_step(self, batch):
        if self.cache is None:
            self.cache = torch.arange(3.0).cos()
        return (super().training_step(batch) * self.cache).sum()


def test_a_cache_in_the_step_itself_is_an_error_with_its_reason():
    task = _CachedInTheStep()

    message = r"`arange`.*when it runs for the first time, and module 'first'.* when it runs again.*cache"
    with pytest.raises(UserError, match=message):
        plan(task, task.training_step, BATCH, num_stages=2)


class _Threaded(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.constant, self.compute = torch.full((3,), 2.0), compute

    def training_step(self, batch):
        hidden = self.first(batch)
        with ThreadPoolExecutor(1) as pool:
            computed = pool.submit(self.compute, self, hidden).result()
        return self.second(computed * self.constant).sum()


@pytest.mark.parametrize("compute", [lambda task, x: x * 2, lambda task, x: task.first(x)])
def test_a_tensor_of_another_thread_is_an_error_with_its_reason(compute):
    task = _Threaded(compute)

    with pytest.raises(UserError, match=r"`mul` .*uses a tensor that none of the calls.*another thread"):
        plan(task, task.training_step, BATCH, num_stages=2)


def test_a_transform_that_cannot_be_one_call_is_an_error_with_its_reason():
    task = _Threaded(None)

    def step(batch):
        return task.second(torch.func.jacrev(torch.sin)(task.first(batch)).sum((0, 1))).sum()

    with pytest.raises(UserError, match=r"inside a transform of torch\.func other than vmap"):
        plan(task, step, BATCH, num_stages=2)


def test_an_operation_that_no_call_of_torch_makes_is_an_error_with_its_reason():
    task = _Threaded(None)

    def step(batch):
        hidden = task.first(batch)
        with torch._C.DisableTorchFunction():  # as a C++ extension runs
            hidden = hidden.sin()
        return task.second(hidden).sum()

    with pytest.raises(UserError, match=r"uses what aten\.sin.*made at test_snapshot\.py:\d+"):
        plan(task, step, BATCH, num_stages=2)
