"""Graph of a traced step: nodes, values, costs and cut constraints."""

from __future__ import annotations

import copy
import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

RETURN = "return"
GRADIENT = "autograd.grad"
"""Name of the node of `torch.autograd.grad`; the attribute `grad` has its own."""

Call = Callable[..., Any]
Step = Callable[[Any], Any]


class ValueRef:
    """Stands in a traced structure for the tensor of a value."""

    __slots__ = ("value",)

    def __init__(self, value: int):
        self.value = value


class ParameterRef:
    """Stands in a traced structure for a parameter or buffer of the task itself."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name


class ScalarValue:
    """Stands in a traced structure for a Python number, truth value or shape, which another batch may change."""

    __slots__ = ("count", "kind", "start")

    def __init__(self, kind: type[Any], start: int, count: int):
        self.kind = kind
        self.start = start  # its place among all numbers of the step, each of 64 bits
        self.count = count

    def __str__(self) -> str:
        return f"a shape of {self.count} dimensions" if self.kind is torch.Size else f"one of type {self.kind.__name__}"


class Constant:
    """Stands in a traced structure for an object that is neither tensor nor constant."""

    __slots__ = ("kind",)

    def __init__(self, kind: str):
        self.kind = kind


@dataclass(slots=True)
class Value:
    """A tensor of the traced step that is not a parameter or buffer; written in place it stays the same value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    local: bool
    """Follows from the batch and constants alone, so that every stage can compute it for itself."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """A value that a node makes or writes, and whether gradients flow back to it from then on."""

    value: int
    requires_grad: bool


@dataclass(slots=True)
class NodeCost:
    """Cost of a node for one micro-batch."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    num_calls: int = 0
    activation_bytes: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(slots=True)
class Node:
    """One call of a leaf module, or of a torch function between leaf modules."""

    index: int
    name: str
    """The leaf module's name in the task, or the function's."""
    is_leaf_module: bool
    path: str
    """The module whose code makes the call."""
    location: str
    """`file:line` of that code."""
    inputs: tuple[int, ...] = ()
    num_given: int = 0
    """Number of inputs, the first ones, that were arguments of the call; a leaf module found the others by itself."""
    result: Any = None
    """The result's structure, with a `ValueRef` for each tensor."""
    has_plain: bool = False
    """A module whose result holds more than tensors: numbers, or constants that must stay the same."""
    outputs: tuple[NodeOutput, ...] = ()
    written: tuple[int, ...] = ()
    """Inputs that the call writes in place."""
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    written_buffers: tuple[str, ...] = ()
    is_batch_only: bool = False
    reads: bool = False
    """True if the call returns a number or a truth value taken from its inputs' elements."""
    is_random: bool = False
    draws_in_python: bool = False
    """A module that draws from the generators of Python or numpy."""
    checkpoint: int | None = None
    """Index of the activation checkpoint around root-level code that makes the call, and makes it again in backward."""
    key: int = 0
    """Stable identity of the call, from its name and how often that was met before."""
    cost: NodeCost = field(default_factory=NodeCost)

    @property
    def has_numbers(self) -> bool:
        """True for a module whose result holds numbers."""
        return self.has_plain and any(isinstance(leaf, ScalarValue) for leaf in leaves(self.result))

    def __str__(self) -> str:
        what = f"module '{self.name}'" if self.is_leaf_module else f"`{self.name}`"
        return f"{what} (node {self.index}, at {self.location})"


@dataclass(frozen=True, slots=True)
class CutConstraint:
    """Events that must be in one stage, from `first` to `last`, and why."""

    first: int
    last: int
    reason: str
    advice: str = ""
    """Remedy, where one is known."""

    def forbids(self, cut: int) -> bool:
        """Check whether a stage that begins at node `cut` would violate the constraint."""
        return self.first < cut <= self.last


@dataclass(slots=True)
class TracedGraph:
    """A step as a list of nodes; the last one, `return`, uses what the step returns."""

    nodes: list[Node]
    values: list[Value]
    constraints: list[CutConstraint]
    parameter_bytes: dict[str, int]
    """Of every parameter of the task, under its first name."""
    trainable: frozenset[str]
    numbers: int | None = None
    """The value that holds all numbers that modules return; none where they return tensors only."""
    measured: bool = False
    """True if seconds were measured, not estimated from FLOPs and bytes."""

    @property
    def parameter_users(self) -> dict[str, list[int]]:
        """The nodes that use each parameter."""
        users: dict[str, list[int]] = {}
        for node in self.nodes:
            for name in node.parameters:
                users.setdefault(name, []).append(node.index)
        return users


_PROBABILITIES = ("p", "dropout_p", "dropout")
"""Names of arguments with which a random call draws nothing where they are 0."""


class FlopCounter(TorchDispatchMode):
    """Adds up floating-point operations, bytes written and calls; `num_draws` counts calls that may draw numbers."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)  # mypy takes `super().__init__` for an untyped call of ours
        self.total = NodeCost()
        self.num_draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        if not func.is_view and func.namespace != "prim":  # which asks fake tensors for their devices
            self.total.num_calls += 1
            self.total.moved_bytes += sum(num_bytes(tensor) for tensor in tensors(result))
        if torch.Tag.nondeterministic_seeded in func.tags and _may_draw(func, args, kwargs or {}):
            self.num_draws += 1
        return result


def _may_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    asked = [given.get(name, defaults[name]) for name in _PROBABILITIES if name in defaults]
    return not asked or any(asked)


def estimated_seconds(cost: NodeCost) -> float:
    """Return about how long a forward takes: operations, memory traffic, and a price for each call."""
    return cost.flops / 3e10 + cost.moved_bytes / 5e9 + cost.num_calls * 5e-6


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


LARGEST = 1 << 63


def is_number(value: Any) -> bool:
    """Check whether a value can be sent as whole numbers of 64 bits: a number or truth value, or a shape."""
    if isinstance(value, (torch.Size, float)):
        return True
    return isinstance(value, int) and -LARGEST <= value < LARGEST


def encoded(value: Any) -> list[int]:
    """Return a number, truth value or shape as whole numbers of 64 bits."""
    if isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, float):
        return list(struct.unpack("<q", struct.pack("<d", value)))
    return [int(value)]


def decoded(number: ScalarValue, codes: Sequence[int]) -> Any:
    """Return the value of `number` among all numbers of the step."""
    own = codes[number.start : number.start + number.count]
    if number.kind is torch.Size:
        return torch.Size(own)
    if issubclass(number.kind, float):
        return number.kind(*struct.unpack("<d", struct.pack("<q", own[0])))
    return number.kind(own[0])


def changed(node: Node, result: Any) -> Iterator[tuple[ScalarValue, list[int]]]:
    """Yield the numbers in the result of a node, encoded; raises ValueError for another structure."""
    traced, found = list(leaves(node.result)), list(leaves(result))
    if len(traced) != len(found):
        raise ValueError(f"{len(found)} values in its result in place of {len(traced)}")
    for expected, value in zip(traced, found, strict=True):
        if isinstance(expected, ScalarValue):
            codes = encoded(value) if is_number(value) and type(value) is expected.kind else []
            if len(codes) != expected.count:
                raise ValueError(f"{value!r:.80} in its result where {expected} was")
            yield expected, codes
        elif isinstance(expected, (ValueRef, ParameterRef)) != isinstance(value, torch.Tensor):
            raise ValueError(f"{type(value).__name__} in its result where {_described(expected)} was")
        elif isinstance(expected, (ValueRef, ParameterRef, Constant)):
            continue
        elif type(value) is not type(expected) or value != expected:
            raise ValueError(f"{value!r:.80} in its result where {expected!r:.80} was")


def _described(traced: Any) -> str:
    return "a tensor" if isinstance(traced, (ValueRef, ParameterRef)) else f"{type(traced).__name__}"


Signature = tuple[tuple[tuple[int, ...], str], ...]


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is in `value` and is not itself a container, in the order in which `rebuild` meets it.

    A shape (`torch.Size`) is one leaf, as nothing but whole numbers can be in it.
    """
    if isinstance(value, (Tensor, torch.Size)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    else:
        yield value


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in `value`."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def rebuild(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return `value` in new containers of the same types, each leaf replaced by `replace(leaf)`."""
    if isinstance(value, (Tensor, torch.Size)):
        return replace(value)
    if isinstance(value, Mapping):
        return _with_items(value, {key: rebuild(item, replace) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [rebuild(item, replace) for item in value]
        # A named tuple takes its items one by one; results such as `torch.return_types.max` do not.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_dataclass(value):
        clone = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(clone, field.name, rebuild(getattr(value, field.name), replace))
        return clone
    return replace(value)


def signature(value: Any) -> Signature:
    """Return the shapes and types of the tensors in `value`: equal signatures give equal shapes in a step."""
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors(value))


def _with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    clone: Any = copy.copy(value)
    for key, item in items.items():
        clone[key] = item
    return clone


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
