"""Profile of a traced step: time of each node, measured or estimated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

from torch import nn

from .graph import Call, Node, Step, TracedGraph, estimated_seconds, tensors
from .snapshot import preserve_task
from .stage_executor import ModuleInterceptor, TracingMode
from .tracer import copy_batch, preserve_state

BACKWARD_PER_FORWARD = 2.0
NUM_RUNS = 3


def measure(graph: TracedGraph, task: nn.Module, step: Step, batch: Any, preceding: Sequence[Step] = ()) -> None:
    """Set the seconds of every node: the least of `NUM_RUNS` runs, equal calls pooled; the task is restored.

    Raises `NotRepeatable` for a step that does not make the same calls again.
    """
    interceptor = ModuleInterceptor(task, graph.leaf_modules)
    for _ in range(NUM_RUNS):
        stopwatch = _Stopwatch(graph, interceptor)
        own = copy_batch(batch)
        with preserve_task(task), preserve_state(task, preceding, batch) as before:
            before.keep_named(graph.written)
            with interceptor.installed(), interceptor.handled_by(stopwatch), stopwatch:
                step(own)
    _pool(graph)
    _set_backward(graph)
    graph.measured = True


def estimate(graph: TracedGraph) -> None:
    """Set the seconds of every node from its operations and bytes."""
    for node in graph.nodes:
        node.cost.forward_seconds = estimated_seconds(node.cost)
    _set_backward(graph)


class NotRepeatable(Exception):
    """The step makes other calls when it is run again, for example by hooks that collect results."""


class _Stopwatch(TracingMode):
    """Measures the nodes of one run of a step, which must be those of the graph."""

    def __init__(self, graph: TracedGraph, interceptor: ModuleInterceptor):
        super().__init__()
        self._nodes = graph.nodes
        self._interceptor = interceptor
        self._next = 0
        self._inside = False

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a torch function between leaf modules."""
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
                start = perf_counter()
                result = call(*args, **kwargs)
                seconds = perf_counter() - start
        finally:
            self._inside = False
        node.cost.forward_seconds = min(seconds, node.cost.forward_seconds or seconds)
        self._next += 1
        return result


def _pool(graph: TracedGraph) -> None:
    """Set calls with the same work to the same time, so that noise does not move the cuts."""
    groups: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        shapes = tuple(graph.values[value].shape for value in node.inputs)
        parameters = tuple(sorted(graph.parameter_bytes[name] for name in node.parameters))
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
