"""A step run once under observation, and written down as a list of events."""

from __future__ import annotations

import random
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainkit.errors import UserError

from .event_mode import SIDE_EFFECTS, EventMode
from .events import RETURN, Bond, Cost, Event, Held, Opaque, Product, Recording, Slot, Value
from .interception import Call, Interception
from .structures import leaves, rebuild, tensors

Step = Callable[[Any], Any]

CHEAP_SHARE = 0.01
"""What follows from the batch alone is computed by every stage if it takes less than this share of the step,"""
CHEAP_SECONDS = 1e-4
"""or less than this."""
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice)
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_CHECKPOINT = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")


@dataclass(slots=True)
class ModuleCall:
    """What the calls of one module take together, and which modules its code calls."""

    cost: Cost = field(default_factory=Cost)
    num_calls: int = 0
    callees: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Observation:
    """A recording, with what is needed to choose other units: the module calls and what opening them would meet."""

    recording: Recording
    module_calls: dict[str, ModuleCall]
    opaque_units: set[str]
    """Units whose result holds objects that a later stage could not be given."""
    reading_modules: set[str]
    """Opened modules whose own code looks at elements of values that only one stage has."""
    reentrant: list[Event]
    """Calls inside a checkpoint with `use_reentrant=True`, which hides their gradients from the other stages."""


def observe(task: nn.Module, step: Step, batch: Any, *, units: frozenset[str]) -> Observation:
    """Return what one run of `step` on a copy of `batch` showed; the task and all generators are as they were.

    Calls of the modules named in `units` are one event each; every torch call outside of them is one too.
    """
    modules = {name: module for name, module in task.named_modules() if name}
    interception = Interception(modules)
    batch = rebuild(batch, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
    recorder = _Recorder(task, batch, units)
    with ExitStack() as stack:
        stack.enter_context(unchanged(task))
        stack.enter_context(interception.installed())
        stack.enter_context(interception.session(recorder))
        stack.enter_context(recorder.counter)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.count_saved, _same))
        stack.enter_context(recorder)
        result = step(batch)
    return recorder.finish(result)


@contextmanager
def unchanged(task: nn.Module) -> Iterator[None]:
    """Put back the task's buffers and the random generators when the block has ended."""
    places = [
        (module, name, buffer)
        for module in task.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    contents = [buffer.detach().clone() for _, _, buffer in places]
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        with torch.no_grad():
            for (module, name, buffer), content in zip(places, contents, strict=True):
                module._buffers[name] = buffer
                buffer.copy_(content)


def _same(value: Any) -> Any:
    return value


class _Counter(TorchDispatchMode):
    """Adds up floating-point operations, bytes written and calls."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)  # mypy takes `super().__init__` for an untyped call of ours
        self.total = Cost()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        if not func.is_view:
            self.total.num_calls += 1
            self.total.moved_bytes += sum(_num_bytes(tensor) for tensor in tensors(result))
        return result


@dataclass(slots=True)
class _Mark:
    """The counters when a call began."""

    flops: float
    moved_bytes: float
    num_calls: int
    activation_bytes: float


class _Recorder(EventMode):
    """Observes one run of a step."""

    def __init__(self, task: nn.Module, batch: Any, units: frozenset[str]):
        super().__init__()
        self.counter = _Counter()
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
        self._candidate_bonds: list[tuple[list[int], int]] = []
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
                f"the step calls `backward` itself (at {_place()}), but in a pipeline backward goes from stage to "
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
        event = Event(len(self._events), name, is_unit, self._path[-2 if is_unit else -1], _place())
        parameters, buffers = self._unit_tensors[name] if is_unit else ([], [])
        self._locate_in_checkpoint(event)
        event.parameters = tuple(self._parameters[key] for key in parameters)
        event.buffers = tuple(self._buffers[id(buffer)] for buffer in buffers if id(buffer) in self._buffers)
        watched = [*given, *buffers]
        versions = [_version(tensor) for tensor in watched]
        state = self._random_state()
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
        written = [tensor for tensor, version in zip(watched, versions, strict=True) if _version(tensor) != version]
        self._complete(event, result, written)
        event.reads = not made and not written and not is_unit and name not in SIDE_EFFECTS and not name.endswith("=")
        return iter(result) if name == "__iter__" else result

    def _locate_in_checkpoint(self, event: Event) -> None:
        frames = _checkpoint_frames()
        calls = [frame for frame in frames if frame.f_code.co_name == "checkpoint"]
        if calls:
            event.checkpoint = self._checkpoints.setdefault(calls[-1], len(self._checkpoints))
        if any(frame.f_code.co_name == "forward" for frame in frames):
            self._reentrant.append(event)

    def _random_state(self) -> bytes:
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
                self._bonds.append(Bond(first, event.index, reason))

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
                self._candidate_bonds.append((list(family), event.index))
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
        key = id(_base(tensor)) if tensor.is_meta else tensor.untyped_storage().data_ptr()
        if key not in self._saved_storages and id(_base(tensor)) not in self._parameters:
            self._saved_storages.add(key)
            self._activation_bytes += _num_bytes(tensor)
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
        """Return the observation, now that the step has returned `result`."""
        self._module_calls[""].cost = self.counter.total
        last = Event(len(self._events), RETURN, False, "", "the end of the step")
        for tensor in tensors(result):
            self._use(last, tensor)
        self._complete(last, None, [])
        self._bind_replaced_buffers()
        self._settle_locality()
        self._bind_written_buffers()
        self._bind_families()
        self._bind_gradient_calls()
        self._bind_checkpoints()
        recording = Recording(
            self._events,
            self._values,
            self._bonds,
            {name: _num_bytes(parameter) for name, parameter in self._task.named_parameters()},
            frozenset(name for name, parameter in self._task.named_parameters() if parameter.requires_grad),
        )
        reading = {
            event.path
            for event in self._events
            if event.path and not event.is_local and (event.reads or _has_data_dependent_shape(event))
        }
        reading |= {event.path for event in self._reentrant if event.path}
        return Observation(recording, self._module_calls, self._opaque_units, reading, self._reentrant)

    def _bind_replaced_buffers(self) -> None:
        """Count a buffer that was assigned a new tensor as written by the event that made it."""
        for name, buffer in self._task.named_buffers():
            if id(buffer) in self._value_of and id(buffer) not in self._buffers:
                value = self._value_of[id(buffer)]
                for event in self._events:
                    if any(product.value == value for product in event.products):
                        event.written_buffers += (name,)

    def _settle_locality(self) -> None:
        """Mark the events that follow from the batch and constants alone, dear ones excepted."""
        seconds = sum(estimated_seconds(event.cost) for event in self._events)
        tainted: set[int] = set()
        while True:
            before = len(tainted)
            for event in self._events:
                touched = {*event.inputs, *(product.value for product in event.products)}
                event.is_local = not (
                    event.parameters
                    or event.written_buffers
                    or event.name == RETURN
                    or (event.is_random and event.checkpoint is not None)  # draws after others of its stage
                    or touched & tainted
                    or estimated_seconds(event.cost) > max(CHEAP_SHARE * seconds, CHEAP_SECONDS)
                )
                if not event.is_local:
                    tainted.update(product.value for product in event.products)
            if len(tainted) == before:
                break
        for index, value in enumerate(self._values):
            value.local = index not in tainted

    def _bind_written_buffers(self) -> None:
        for name in {name for event in self._events for name in event.written_buffers}:
            users = [event for event in self._events if name in event.buffers + event.written_buffers]
            if users[0] is not users[-1]:
                reason = f"buffer '{name}' is written in place and used by {users[0]} and {users[-1]}"
                self._bonds.append(Bond(users[0].index, users[-1].index, reason))

    def _bind_families(self) -> None:
        """Keep views of one memory together, from the first of them to a write through one of them."""
        makers: dict[int, int] = {}
        for event in self._events:
            for product in event.products:
                makers.setdefault(product.value, event.index)
        for family, writer in self._candidate_bonds:
            if not self._events[writer].is_local:
                first = min(makers.get(value, -1) for value in family)
                reason = f"{self._events[writer]} writes in place to memory that several tensors share"
                self._bonds.append(Bond(first, writer, reason))

    def _bind_gradient_calls(self) -> None:
        for event in self._events:
            if event.name == "grad" and not event.is_unit:
                self._bonds.append(Bond(0, event.index, f"{event} asks for gradients of all that is before it"))

    def _bind_checkpoints(self) -> None:
        """Keep together what a checkpoint runs again: it can do so only where everything in it was run."""
        self._checkpoints.clear()
        calls: dict[int, list[Event]] = {}
        for event in self._events:
            if event.checkpoint is not None and not event.is_local:
                calls.setdefault(event.checkpoint, []).append(event)
        for first, *rest in calls.values():
            if rest:
                reason = f"one checkpoint runs {first} and {rest[-1]} again in backward"
                self._bonds.append(Bond(first.index, rest[-1].index, reason))


def estimated_seconds(cost: Cost) -> float:
    """Return about how long a forward takes: operations, memory traffic, and a price for each call."""
    return cost.flops / 3e10 + cost.moved_bytes / 5e9 + cost.num_calls * 5e-6


def _has_data_dependent_shape(event: Event) -> bool:
    return event.name in {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere"}


def _place() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH)) and Path(name).name != "contextlib.py":
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def _checkpoint_frames() -> list[FrameType]:
    """Return the frames of torch's activation checkpoints that the present call is made in, innermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            frames.append(frame)
        frame = frame.f_back
    return frames


def _base(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
