"""Profile of a traced step: time of each node, measured or estimated."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.tree import tree_leaves, tree_map

from .graph import GRADIENT, Call, Node, Step, TracedGraph, estimated_seconds, tensors
from .stage_executor import ModuleInterceptor, TracingMode
from .tracer import CONSTANTS, copy_batch, preserve_state

WORTH_SECONDS = 50e-6
"""Calls that take less than this are not repeated."""
BACKWARD_PER_FORWARD = 2.0
UNREPEATED = frozenset({"__iter__", GRADIENT})
"""Calls that are timed once: their arguments are used up, or need the autograd graph behind them."""


def measure(graph: TracedGraph, task: nn.Module, step: Step, batch: Any, *, repeats: int = 3) -> None:
    """Set the seconds of every node: the least of `repeats` runs, equal calls pooled; the task is restored.

    Raises `NotRepeatable` for a step that does not make the same calls again.
    """
    leaf_modules = {node.name for node in graph.nodes if node.is_leaf_module}
    interceptor = ModuleInterceptor({name: task.get_submodule(name) for name in leaf_modules})
    for number in range(repeats):
        stopwatch = _Stopwatch(graph, interceptor, 0 if number else repeats)
        own = copy_batch(batch)
        with ExitStack() as stack:
            stack.enter_context(preserve_state(task))
            stack.enter_context(interceptor.installed())
            stack.enter_context(interceptor.handled_by(stopwatch))
            stack.enter_context(stopwatch)
            step(own)
        if not stopwatch.has_stateful:
            break
    _pool(graph)
    graph.measured = True


def estimate(graph: TracedGraph) -> None:
    """Set the seconds of every node from its operations and bytes."""
    for node in graph.nodes:
        node.cost.forward_seconds = estimated_seconds(node.cost)
        node.cost.backward_seconds = BACKWARD_PER_FORWARD * node.cost.forward_seconds * _has_gradient(node)


class NotRepeatable(Exception):
    """The step changes if its leaf modules run several times, for example by hooks that collect results."""


class _Stopwatch(TracingMode):
    """Measures the nodes of one run of a step, which must be those of the graph."""

    def __init__(self, graph: TracedGraph, interceptor: ModuleInterceptor, repeats: int):
        super().__init__()
        self._nodes = graph.nodes
        self._interceptor = interceptor
        self._repeats = repeats
        self.has_stateful = False
        """True if a leaf module was given an object with state, such as a cache; such calls are not repeated."""
        self._next = 0
        self._inside = False

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a leaf module."""
        return self._measure(name, call, args, kwargs)

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a torch function between leaf modules."""
        if self._inside or not (tensors((args, kwargs)) or self._nodes[self._next].name == name):
            return call(*args, **kwargs)
        return self._measure(name, call, args, kwargs)

    def _measure(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = self._nodes[self._next]
        if node.name != name:
            raise NotRepeatable(f"{name} was traced as {node}")
        self._inside = True
        try:
            with self._interceptor.handled_by(None):
                start = perf_counter()
                result = call(*args, **kwargs)
                seconds = perf_counter() - start
                self._note(node, seconds)
                worth = (node.is_leaf_module or seconds > WORTH_SECONDS) and not node.is_batch_only
                if self._repeats and worth and not node.written and name not in UNREPEATED:
                    if all(isinstance(leaf, (Tensor, *CONSTANTS)) for leaf in tree_leaves((args, kwargs))):
                        # A checkpoint around the leaf module must not see the tensors saved by repetitions.
                        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                            self._repeat(node, call, args, kwargs)
                    else:
                        self.has_stateful = True
        finally:
            self._inside = False
        self._next += 1
        return result

    def _note(self, node: Node, seconds: float) -> None:
        known = node.cost.forward_seconds
        if not known or seconds < known:
            node.cost.forward_seconds = seconds
            if self._repeats or not known:
                node.cost.backward_seconds = seconds * BACKWARD_PER_FORWARD * _has_gradient(node)

    def _repeat(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward, backward = [node.cost.forward_seconds], []
        for _ in range(self._repeats):
            inputs, settings = tree_map(_detached, (args, kwargs))
            start = perf_counter()
            outputs = [tensor for tensor in tensors(call(*inputs, **settings)) if tensor.requires_grad]
            middle = perf_counter()
            forward.append(middle - start)
            if outputs:
                sources = [tensor for tensor in tensors((inputs, settings)) if tensor.requires_grad]
                module = getattr(call, "__self__", None)
                if isinstance(module, nn.Module):
                    sources += [parameter for parameter in module.parameters() if parameter.requires_grad]
                gradients = [torch.ones_like(tensor) for tensor in outputs]
                if sources:
                    middle = perf_counter()
                    torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
                backward.append(perf_counter() - middle)
        node.cost.forward_seconds = min(forward)
        if backward:
            node.cost.backward_seconds = min(backward)


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, nn.Parameter) or not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _has_gradient(node: Node) -> bool:
    return any(output.requires_grad for output in node.outputs)


def _pool(graph: TracedGraph) -> None:
    """Set calls with the same work to the same time, so that noise does not move the cuts."""
    groups: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        shapes = tuple(graph.values[value].shape for value in node.inputs)
        parameters = tuple(sorted(graph.parameter_bytes[name] for name in node.parameters))
        kind = "" if node.is_leaf_module else node.name
        groups[kind, node.cost.flops, node.cost.num_calls, shapes, parameters].append(node)
    for nodes in groups.values():
        forward = median(node.cost.forward_seconds for node in nodes)
        backward = median(node.cost.backward_seconds for node in nodes)
        for node in nodes:
            node.cost.forward_seconds, node.cost.backward_seconds = forward, backward
