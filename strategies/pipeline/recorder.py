"""The observer of one run of a step: it writes down what is called, what that uses and makes, and what it takes."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import UserError

from . import python_generators
from .bonds import (
    checkpoint_bonds,
    family_bonds,
    gradient_bonds,
    note_replaced_buffers,
    reading_modules,
    settle_locality,
    written_buffer_bonds,
)
from .costs import CallCounter, num_bytes
from .event_mode import SIDE_EFFECTS, EventMode
from .events import RETURN, Bond, Cost, Event, Held, Number, Opaque, Product, Recording, Slot, Value
from .frames import checkpoint_frames, place
from .interception import Call
from .numbers import encoded, is_number
from .observation import ModuleCall, Observation
from .structures import leaves, rebuild, tensors

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice)

CARRIED = (
    " Return that tensor from the module's forward and pass it on as an argument, so that it can be sent from stage to "
    "stage."
)


@dataclass(slots=True)
class _Mark:
    """The counters when a call began."""

    flops: float
    moved_bytes: float
    num_calls: int
    activation_bytes: float


class Recorder(EventMode):
    """Observes one run of a step."""

    def __init__(
        self,
        task: nn.Module,
        batch: Any,
        units: frozenset[str],
        *,
        draws_are_real: bool,
        earlier: Sequence[weakref.ref[Tensor]] = (),
    ):
        super().__init__()
        self._earlier = {id(tensor): tensor for made in earlier if (tensor := made()) is not None}
        self._draws_are_real = draws_are_real
        self.counter = CallCounter()
        self._units = units
        self._parameters = {id(parameter): name for name, parameter in task.named_parameters()}
        self._buffers = {id(buffer): name for name, buffer in task.named_buffers()}
        self._task = task
        self._unit_tensors = {
            name: (
                [id(parameter) for parameter in module.parameters()],
                list(module.buffers()),
            )
            for name, module in task.named_modules()
            if name in units
        }
        self._events: list[Event] = []
        self._values: list[Value] = []
        self._value_of: dict[int, int] = {}
        self._kept: list[Tensor] = []  # ids stay unique only while the tensors live
        self._made_inside: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._views: dict[int, list[int]] = {}
        self._written_families: list[tuple[list[int], int]] = []
        self._num_codes = 0  # of all numbers that units returned
        self._bonds: list[Bond] = []
        self._occurrences: dict[str, int] = {}
        self._event: Event | None = None
        self._checkpoints: dict[FrameType, int] = {}  # kept, so that no other frame has the same identity
        self._reentrant: list[Event] = []
        self._is_muted = False
        self._path: list[str] = [""]
        self._module_calls: dict[str, ModuleCall] = {"": ModuleCall(num_calls=1)}
        self._opaque_units: set[str] = set()
        self._saved_storages: set[int] = set()
        self._activation_bytes = 0.0
        for tensor in tensors(batch):
            self._new_value(tensor, local=True)

    # -- What is called

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module: as one event if it is a unit, else as code whose calls are events."""
        statistics = self._module_calls.setdefault(name, ModuleCall())
        self._module_calls[self._path[-1]].callees.add(name)
        statistics.num_calls += 1
        mark = self._mark()
        self._path.append(name)
        try:
            if self._event is None and name in self._units:
                return self._record(name, call, args, kwargs, is_unit=True)
            return call(*args, **kwargs)
        finally:
            self._path.pop()
            self._add_since(mark, statistics.cost)

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function: as an event outside of units, else watched for what it uses."""
        if self._is_muted:
            return call(*args, **kwargs)
        if self._event is not None:
            return self._watch(self._event, call, args, kwargs)
        if name == "backward":
            raise UserError(
                f"the step calls `backward` itself (at {place()}), but in a pipeline backward goes from stage to "
                "stage. Return the loss from training_step, and trainkit runs backward."
            )
        return self._record(name, call, args, kwargs, is_unit=False)

    def _watch(self, event: Event, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in tensors((args, kwargs)):
            self._use(event, tensor)
        result = call(*args, **kwargs)
        for tensor in tensors(result):
            self._made_inside[id(tensor)] = (weakref.ref(tensor), event.index)
        return result

    def _record(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_unit: bool) -> Any:
        given = tensors((args, kwargs))
        event = Event(len(self._events), name, is_unit, self._path[-2 if is_unit else -1], place())
        parameters, buffers = self._unit_tensors[name] if is_unit else ([], [])
        self._locate_in_checkpoint(event)
        event.parameters = tuple(self._parameters[key] for key in parameters)
        event.buffers = tuple(self._buffers[id(buffer)] for buffer in buffers if id(buffer) in self._buffers)
        watched = [*given, *buffers]
        versions = [_version(tensor) for tensor in watched]
        state, python_state = self._random_state(), python_generators.state() if is_unit else ()
        mark = self._mark()
        for tensor in given:
            self._use(event, tensor)
        event.num_given = len(event.inputs)
        if is_unit:
            self._event = event
        try:
            result = call(*args, **kwargs)
        finally:
            self._event = None
        if name == "__iter__":
            result = list(result)
        made = tensors(result)
        if not (given or made or is_unit):
            return result  # such as `torch.is_grad_enabled()`: nothing to do with the flow of values
        self._add_since(mark, event.cost)
        event.is_random = state != self._random_state()
        event.draws_in_python = is_unit and python_state != python_generators.state()
        written = [tensor for tensor, version in zip(watched, versions, strict=True) if _version(tensor) != version]
        self._complete(event, result, written)
        event.reads = not made and not written and not is_unit and name not in SIDE_EFFECTS and not name.endswith("=")
        return iter(result) if name == "__iter__" else result

    def _locate_in_checkpoint(self, event: Event) -> None:
        frames = checkpoint_frames()
        calls = [frame for frame in frames if frame.f_code.co_name == "checkpoint"]
        if calls:
            event.checkpoint = self._checkpoints.setdefault(calls[-1], len(self._checkpoints))
        if any(frame.f_code.co_name == "forward" for frame in frames):
            self._reentrant.append(event)

    def _random_state(self) -> bytes | int:
        """Return what is another after a call that drew random numbers."""
        if not self._draws_are_real:
            return self.counter.num_draws
        self._is_muted = True
        try:
            return torch.get_rng_state().numpy().tobytes()
        finally:
            self._is_muted = False

    # -- What a call uses and makes

    def _use(self, event: Event, tensor: Tensor) -> None:
        key = id(tensor)
        if key in self._parameters:
            if self._parameters[key] not in event.parameters:
                event.parameters += (self._parameters[key],)
        elif key in self._buffers:
            if self._buffers[key] not in event.buffers:
                event.buffers += (self._buffers[key],)
        elif key in self._value_of:
            if self._value_of[key] not in event.inputs:
                event.inputs += (self._value_of[key],)
        elif key in self._made_inside:
            reference, first = self._made_inside[key]
            if reference() is tensor and first != event.index:
                reason = f"{event} uses a tensor made inside {self._events[first]}"
                self._bonds.append(Bond(first, event.index, reason, CARRIED))
        elif key in self._earlier:
            raise UserError(
                f"{event} uses a tensor that the step of another phase has left behind. That is in one stage, and of "
                "one micro-batch. Compute it again in this step, or type strategy=ddp."
            )

    def _complete(self, event: Event, result: Any, written: list[Tensor]) -> None:
        products: dict[int, bool] = {}
        event.outputs = rebuild(result, lambda leaf: self._recorded_leaf(event, leaf, products))
        for tensor in written:
            if id(tensor) in self._buffers:
                event.written_buffers += (self._buffers[id(tensor)],)
            elif id(tensor) in self._value_of:
                products[self._value_of[id(tensor)]] = tensor.requires_grad
                event.written += (self._value_of[id(tensor)],)
            family = self._views.get(id(_base(tensor)), [])
            if len(family) > 1:
                self._written_families.append((list(family), event.index))
        event.has_plain = event.is_unit and not all(isinstance(leaf, (Slot, Held)) for leaf in leaves(event.outputs))
        event.products = tuple(Product(value, requires_grad) for value, requires_grad in products.items())
        held = {leaf.name for leaf in leaves(event.outputs) if isinstance(leaf, Held)}
        if held and not products:  # such as `weight.to(dtype)` that has nothing to do: no use of the weight
            event.parameters = tuple(name for name in event.parameters if name not in held)
            event.buffers = tuple(name for name in event.buffers if name not in held)
        occurrence = self._occurrences[event.name] = self._occurrences.get(event.name, -1) + 1
        event.key = zlib.crc32(f"{event.name}#{occurrence}".encode())
        self._events.append(event)

    def _recorded_leaf(self, event: Event, leaf: Any, products: dict[int, bool]) -> Any:
        if not isinstance(leaf, Tensor):
            if event.is_unit and is_number(leaf):
                return self._new_number(leaf)
            if isinstance(leaf, CONSTANTS):
                return leaf
            if event.is_unit:
                self._opaque_units.add(event.name)
            return Opaque(type(leaf).__name__)
        if id(leaf) in self._parameters:
            return Held(self._parameters[id(leaf)])
        if id(leaf) in self._buffers:
            return Held(self._buffers[id(leaf)])
        if id(leaf) not in self._value_of:
            products[self._new_value(leaf, local=False)] = leaf.requires_grad
        return Slot(self._value_of[id(leaf)])

    def _new_number(self, leaf: Any) -> Number:
        number = Number(type(leaf), self._num_codes, len(encoded(leaf)))
        self._num_codes += number.count
        return number

    def _new_value(self, tensor: Tensor, *, local: bool) -> int:
        index = len(self._values)
        self._values.append(Value(tuple(tensor.shape), tensor.dtype, local))
        self._value_of[id(tensor)] = index
        self._kept.append(tensor)
        self._views.setdefault(id(_base(tensor)), []).append(index)
        return index

    # -- What a call takes

    def count_saved(self, tensor: Tensor) -> Tensor:
        """Count what autograd keeps for backward, each storage once, parameters not at all."""
        key = tensor.untyped_storage()._cdata
        if key not in self._saved_storages and id(_base(tensor)) not in self._parameters:
            self._saved_storages.add(key)
            self._activation_bytes += num_bytes(tensor)
        return tensor.detach() if tensor.requires_grad and tensor.is_leaf else tensor

    def _mark(self) -> _Mark:
        total = self.counter.total
        return _Mark(total.flops, total.moved_bytes, total.num_calls, self._activation_bytes)

    def _add_since(self, mark: _Mark, cost: Cost) -> None:
        total = self.counter.total
        cost.flops += total.flops - mark.flops
        cost.moved_bytes += total.moved_bytes - mark.moved_bytes
        cost.num_calls += total.num_calls - mark.num_calls
        cost.activation_bytes += self._activation_bytes - mark.activation_bytes

    # -- What it comes to

    def finish(self, result: Any) -> Observation:
        """Return the observation, now that the step has returned `result`; the task must not have been restored yet."""
        self._module_calls[""].cost = self.counter.total
        last = Event(len(self._events), RETURN, False, "", "the end of the step")
        for tensor in tensors(result):
            self._use(last, tensor)
        self._complete(last, None, [])
        self._checkpoints.clear()
        note_replaced_buffers(self._events, self._replaced_buffers())
        settle_locality(self._events, self._values)
        numbers = None
        if any(event.has_numbers and not event.is_local for event in self._events):
            numbers = len(self._values)
            self._values.append(Value((self._num_codes,), torch.int64, local=False))
        self._bonds += written_buffer_bonds(self._events)
        self._bonds += family_bonds(self._events, self._written_families)
        self._bonds += gradient_bonds(self._events)
        self._bonds += checkpoint_bonds(self._events)
        recording = Recording(
            self._events,
            self._values,
            self._bonds,
            {name: num_bytes(parameter) for name, parameter in self._task.named_parameters()},
            frozenset(name for name, parameter in self._task.named_parameters() if parameter.requires_grad),
            numbers,
        )
        reading = reading_modules(self._events) | {event.path for event in self._reentrant if event.path}
        made = [
            weakref.ref(self._kept[index])
            for index, value in enumerate(self._values[: len(self._kept)])
            if not value.local
        ]
        return Observation(recording, self._module_calls, self._opaque_units, reading, self._reentrant, made)

    def _replaced_buffers(self) -> dict[int, str]:
        """Return the values that were assigned to buffers in place of the tensors there."""
        return {
            self._value_of[id(buffer)]: name
            for name, buffer in self._task.named_buffers()
            if id(buffer) in self._value_of and id(buffer) not in self._buffers
        }


def _base(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
