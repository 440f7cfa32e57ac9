"""How long each event of a recording takes, forward and backward, measured where the task is."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from .costs import estimated_seconds
from .event_mode import GRADIENT, EventMode
from .events import Event, Recording
from .interception import Call, Interception
from .recorder import CONSTANTS
from .recording import Step
from .structures import leaves, rebuild, tensors
from .untouched import copied, unchanged

WORTH_SECONDS = 50e-6
"""Calls that take less than this are not repeated."""
BACKWARD_PER_FORWARD = 2.0
UNREPEATED = frozenset({"__iter__", GRADIENT})
"""Calls that are timed once: what they are given is used up, or is nothing without the graph behind it."""


def measure(recording: Recording, task: nn.Module, step: Step, batch: Any, *, repeats: int = 3) -> None:
    """Set the seconds of every event: the least of `repeats` runs, equal calls pooled; the task is left as it was.

    Raises `Unrepeatable` for a step that does not make the same calls again.
    """
    units = {event.name for event in recording.events if event.is_unit}
    interception = Interception({name: task.get_submodule(name) for name in units})
    passes = 1
    while passes:
        stopwatch = _Stopwatch(recording, interception, repeats if passes == 1 else 0)
        own = copied(batch)
        with ExitStack() as stack:
            stack.enter_context(unchanged(task))
            stack.enter_context(interception.installed())
            stack.enter_context(interception.session(stopwatch))
            stack.enter_context(stopwatch)
            step(own)
        passes = passes + 1 if stopwatch.has_stateful and passes < repeats else 0
    _pool(recording)
    recording.measured = True


def estimate(recording: Recording) -> None:
    """Set the seconds of every event from its operations and bytes."""
    for event in recording.events:
        event.cost.forward_seconds = estimated_seconds(event.cost)
        event.cost.backward_seconds = BACKWARD_PER_FORWARD * event.cost.forward_seconds * _has_gradient(event)


class Unrepeatable(Exception):
    """Units that run several times change what the step does, for example by hooks that collect results."""


class _Stopwatch(EventMode):
    """Measures the events of one run of a step, which must be those of the recording."""

    def __init__(self, recording: Recording, interception: Interception, repeats: int):
        super().__init__()
        self._events = recording.events
        self._interception = interception
        self._repeats = repeats
        self.has_stateful = False
        """Whether a unit was given an object with a state, such as a cache: such calls cannot be repeated."""
        self._next = 0
        self._inside = False

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a unit."""
        return self._measure(name, call, args, kwargs)

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure a torch function between units."""
        if self._inside or not (tensors((args, kwargs)) or self._events[self._next].name == name):
            return call(*args, **kwargs)
        return self._measure(name, call, args, kwargs)

    def _measure(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        event = self._events[self._next]
        if event.name != name:
            raise Unrepeatable(f"{name} was recorded as {event}")
        self._inside = True
        try:
            with self._interception.session(None):
                start = perf_counter()
                result = call(*args, **kwargs)
                seconds = perf_counter() - start
                self._note(event, seconds)
                worth = (event.is_unit or seconds > WORTH_SECONDS) and not event.is_local
                if self._repeats and worth and not event.written and name not in UNREPEATED:
                    if all(isinstance(leaf, (Tensor, *CONSTANTS)) for leaf in leaves((args, kwargs))):
                        # A checkpoint around the unit must not see what the repetitions save.
                        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                            self._repeat(event, call, args, kwargs)
                    else:
                        self.has_stateful = True
        finally:
            self._inside = False
        self._next += 1
        return result

    def _note(self, event: Event, seconds: float) -> None:
        known = event.cost.forward_seconds
        if not known or seconds < known:
            event.cost.forward_seconds = seconds
            if self._repeats or not known:
                event.cost.backward_seconds = seconds * BACKWARD_PER_FORWARD * _has_gradient(event)

    def _repeat(self, event: Event, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward, backward = [event.cost.forward_seconds], []
        for _ in range(self._repeats):
            inputs, settings = rebuild((args, kwargs), _detached)
            start = perf_counter()
            outputs = [tensor for tensor in tensors(call(*inputs, **settings)) if tensor.requires_grad]
            middle = perf_counter()
            forward.append(middle - start)
            if outputs:
                sources = [tensor for tensor in tensors((inputs, settings)) if tensor.requires_grad]
                sources += _reached_parameters(outputs, call)
                gradients = [torch.ones_like(tensor) for tensor in outputs]
                if sources:
                    middle = perf_counter()
                    torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
                backward.append(perf_counter() - middle)
        event.cost.forward_seconds = min(forward)
        if backward:
            event.cost.backward_seconds = min(backward)


def _reached_parameters(outputs: list[Tensor], call: Call) -> list[Tensor]:
    del outputs
    module = getattr(call, "__self__", None)
    if not isinstance(module, nn.Module):
        return []
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _same(value: Tensor) -> Tensor:
    return value


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, nn.Parameter) or not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _has_gradient(event: Event) -> bool:
    return any(product.requires_grad for product in event.products)


def _pool(recording: Recording) -> None:
    """Give calls that do the same work the same time, so that noise does not move the cuts."""
    groups: dict[Any, list[Event]] = defaultdict(list)
    for event in recording.events:
        shapes = tuple(recording.values[value].shape for value in event.inputs)
        parameters = tuple(sorted(recording.parameter_bytes[name] for name in event.parameters))
        kind = "" if event.is_unit else event.name
        groups[kind, event.cost.flops, event.cost.num_calls, shapes, parameters].append(event)
    for events in groups.values():
        forward = median(event.cost.forward_seconds for event in events)
        backward = median(event.cost.backward_seconds for event in events)
        for event in events:
            event.cost.forward_seconds, event.cost.backward_seconds = forward, backward
