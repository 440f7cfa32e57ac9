"""Profile of a traced step: time of each node, measured or estimated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from trainkit.devices import free_cached, has_streams, synchronize, timed_event
from trainkit.model.attribute_snapshot import preserve_task
from trainkit.strategy import named_state
from trainkit.tree import to_device

from ..trace.graph import NOMINAL, Call, Node, Rates, Step, TracedGraph, estimated_seconds, tensors
from ..trace.interceptor import ModuleInterceptor, TracingMode
from ..trace.step_state import copy_batch, preserve_state

BACKWARD_PER_FORWARD = 2.0
"""Seconds of a node's backward, relative to its forward: the operations of a product of matrices.

They are not measured: backward would call hooks and functions of the task, which a plan cannot undo. Only the ratio of
stages matters for a partition, and it is wrong only between nodes whose own factors differ.
"""
NUM_RUNS = 3  # the least of them is without the first one's allocations, and other processes' work
MATRIX_SIZE = 512
COPIED_BYTES = 1 << 24  # more than a processor's cache
HOST = torch.device("cpu")


def measure(
    graph: TracedGraph,
    task: nn.Module,
    step: Step,
    batch: Any,
    preceding: Sequence[Step] = (),
    *,
    device: torch.device = HOST,
) -> None:
    """Set the seconds of every node: the least of `NUM_RUNS` runs, equal calls pooled; the task is restored.

    On a GPU the whole task is moved there, and events measure what the device does. Raises `NotRepeatable` for
    a step that does not make the same calls again, or cannot be run on the device.
    """
    interceptor = ModuleInterceptor(task, graph.leaf_modules)
    mark = partial(timed_event, device) if has_streams(device) else perf_counter
    try:
        with _moved(task, device):
            for _ in range(NUM_RUNS):
                stopwatch = _Stopwatch(graph, interceptor, mark)
                run_batch = copy_batch(batch) if device.type == "cpu" else to_device(batch, device)
                with preserve_task(task), preserve_state(task, preceding, run_batch) as saved_state:
                    # No mode of this run sees writes in place, as that of a trace does.
                    saved_state.keep_named(graph.written)
                    with interceptor.installed(), interceptor.handled_by(stopwatch), stopwatch:
                        step(run_batch)
                stopwatch.finish()
    except RuntimeError as error:  # tensors in host memory that are no buffers, or too little memory
        if device.type == "cpu":  # where the step was traced: an error of the task
            raise
        raise NotRepeatable(f"the whole step cannot be run on {device}: {str(error).splitlines()[0]}") from None
    _pool(graph)
    _set_backward(graph)
    graph.measured = True


def estimate(graph: TracedGraph, rates: Rates = NOMINAL) -> None:
    """Set the seconds of every node from its operations and bytes."""
    for node in graph.nodes:
        node.cost.forward_seconds = estimated_seconds(node.cost, rates)
    _set_backward(graph)


@cache
def rates_of(device: torch.device, dtype: torch.dtype = torch.float32) -> Rates:
    """Return the rates of a device: of a CPU nominal ones, so that an estimated plan is the same each time.

    Those of other devices are measured once, by a product of matrices of `dtype`, a copy, and small calls.
    """
    return NOMINAL if device.type == "cpu" else measured_rates(device, dtype)


def measured_rates(device: torch.device, dtype: torch.dtype = torch.float32) -> Rates:
    """Return the rates of a device, rounded to one digit."""
    square = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=dtype)
    memory = torch.ones(COPIED_BYTES // 4, device=device)
    copied = torch.empty_like(memory)
    few = torch.ones(8, device=device)  # with so few elements a call takes what it takes to make any

    def seconds(call: Callable[[], object], repeats: int) -> float:
        run_seconds = []
        for _ in range(NUM_RUNS):
            # Calls only queue their work on a GPU, and earlier work must not be counted.
            synchronize(device)
            start = perf_counter()
            for _ in range(repeats):
                call()
            synchronize(device)
            run_seconds.append((perf_counter() - start) / repeats)
        return min(run_seconds)

    with torch.no_grad():
        flops = 2 * MATRIX_SIZE**3 / seconds(lambda: torch.mm(square, square), 4)
        num_bytes = COPIED_BYTES / seconds(lambda: copied.copy_(memory), 4)
        # One digit, so that a small difference between two measurements does not make another partition.
        return Rates(*(float(f"{rate:.0e}") for rate in (flops, num_bytes, seconds(lambda: few.add(1.0), 100))))


class NotRepeatable(Exception):
    """The step makes other calls when it is run again, for example by hooks that collect results."""


class _Stopwatch(TracingMode):
    """Measures the nodes of one run of a step, which must be those of the graph."""

    def __init__(self, graph: TracedGraph, interceptor: ModuleInterceptor, mark: Callable[[], Any]):
        super().__init__()
        self._mark = mark
        self._marks: list[tuple[Any, Any]] = []  # before and after each node
        self._nodes = graph.nodes
        self._interceptor = interceptor
        self._next = 0
        self._inside = False  # of a node, whose calls are not nodes

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a torch function between leaf modules."""
        # Calls without tensors are nodes only where they were traced as such; the last node, `return`, always follows.
        if self._inside or not (tensors((args, kwargs)) or self._nodes[self._next].name == name):
            return call(*args, **kwargs)
        return self.module_call(name, call, args, kwargs)

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a node."""
        node = self._nodes[self._next]
        if node.name != name:
            raise NotRepeatable(f"{name} was traced as {node}")
        self._inside = True
        try:
            with self._interceptor.handled_by(None):
                start = self._mark()
                result = call(*args, **kwargs)
                self._marks.append((start, self._mark()))
        finally:
            self._inside = False
        self._next += 1
        return result

    def finish(self) -> None:
        """Set the seconds of all nodes that were run, where they are less than before."""
        # Not strict: the last node, `return`, is not a call.
        for node, (start, end) in zip(self._nodes, self._marks, strict=False):
            if isinstance(start, float):
                seconds = end - start
            else:
                end.synchronize()  # only after the run, which would wait for the device at every node
                seconds = start.elapsed_time(end) / 1e3
            # 0 before the first run.
            node.cost.forward_seconds = min(seconds, node.cost.forward_seconds or seconds)


@contextmanager
def _moved(task: nn.Module, device: torch.device) -> Iterator[None]:
    """Have the parameters and buffers of a task on the device in the block; they stay the same objects."""
    if device.type == "cpu":
        yield
        return
    contents = [(tensor, tensor.data) for tensor in named_state(task).values()]
    try:
        for tensor, content in contents:
            tensor.data = content.to(device)
        yield
    finally:
        for tensor, content in contents:
            tensor.data = content
        # The memory of the whole task, of which training holds a part, and which other processes may need.
        free_cached(device)


def _pool(graph: TracedGraph) -> None:
    """Set calls with the same work to the same time, so that noise does not move the cuts."""
    groups: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        shapes = tuple(graph.values[value].shape for value in node.inputs)
        parameters = tuple(sorted(graph.parameter_bytes[name] for name in node.parameters))
        # Layers of one kind have other names; functions with the same name and work are the same call.
        kind = "" if node.is_leaf_module else node.name
        groups[kind, node.cost.flops, node.cost.num_calls, shapes, parameters].append(node)
    for nodes in groups.values():
        seconds = median(node.cost.forward_seconds for node in nodes)
        for node in nodes:
            node.cost.forward_seconds = seconds


def _set_backward(graph: TracedGraph) -> None:
    for node in graph.nodes:
        has_gradient = any(output.requires_grad for output in node.outputs)
        node.cost.backward_seconds = BACKWARD_PER_FORWARD * node.cost.forward_seconds * has_gradient
