"""What a recorded step consists of: events, values that pass between them, bonds that hold them together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .structures import leaves

RETURN = "return"


class Slot:
    """Stands in a recorded structure for the tensor of a value."""

    __slots__ = ("value",)

    def __init__(self, value: int):
        self.value = value


class Held:
    """Stands in a recorded structure for a parameter or buffer of the task itself."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name


class Number:
    """Stands in a recorded structure for a Python number, truth value or shape, which another batch may change."""

    __slots__ = ("count", "kind", "start")

    def __init__(self, kind: type[Any], start: int, count: int):
        self.kind = kind
        self.start = start  # its place among all numbers of the step, each of 64 bits
        self.count = count

    def __str__(self) -> str:
        return f"a shape of {self.count} dimensions" if self.kind is torch.Size else f"one of type {self.kind.__name__}"


class Opaque:
    """Stands in a recorded structure for an object that is neither tensor nor constant."""

    __slots__ = ("kind",)

    def __init__(self, kind: str):
        self.kind = kind


@dataclass(slots=True)
class Value:
    """A tensor of the recorded step, no parameter or buffer; written in place it stays the same value."""

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
class Product:
    """A value that an event makes or writes, and whether gradients flow back to it from then on."""

    value: int
    requires_grad: bool


@dataclass(slots=True)
class Cost:
    """What an event takes for one micro-batch."""

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
class Event:
    """One call of a unit module, or of a torch function between units."""

    index: int
    name: str
    """The unit's name in the task, or the function's."""
    is_unit: bool
    path: str
    """The module whose code makes the call."""
    place: str
    """`file:line` of that code."""
    inputs: tuple[int, ...] = ()
    num_given: int = 0
    """How many of the inputs, the first ones, were arguments of the call; others a unit found by itself."""
    outputs: Any = None
    """The result's structure, with a `Slot` for each tensor."""
    has_plain: bool = False
    """A module whose result holds more than tensors: numbers, or constants that must stay the same."""
    products: tuple[Product, ...] = ()
    written: tuple[int, ...] = ()
    """Inputs that the call writes in place."""
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    written_buffers: tuple[str, ...] = ()
    is_local: bool = False
    reads: bool = False
    """Gives Python a number or a truth value taken from its inputs' elements."""
    is_random: bool = False
    draws_in_python: bool = False
    """A module that draws from the generators of Python or numpy."""
    checkpoint: int | None = None
    """Which of the step's checkpoints around root-level code makes the call, and makes it again in backward."""
    key: int = 0
    """Stable identity of the call, from its name and how often that was met before."""
    cost: Cost = field(default_factory=Cost)

    @property
    def has_numbers(self) -> bool:
        """Whether it is a module whose result holds numbers."""
        return self.has_plain and any(isinstance(leaf, Number) for leaf in leaves(self.outputs))

    def __str__(self) -> str:
        what = f"module '{self.name}'" if self.is_unit else f"`{self.name}`"
        return f"{what} (event {self.index}, at {self.place})"


@dataclass(frozen=True, slots=True)
class Bond:
    """Events that must be in one stage, from `first` to `last`, and why."""

    first: int
    last: int
    reason: str
    advice: str = ""
    """What to do about it, where that is known."""

    def forbids(self, cut: int) -> bool:
        """Return whether a stage that begins at event `cut` would tear the bond."""
        return self.first < cut <= self.last


@dataclass(slots=True)
class Recording:
    """A step as a list of events; the last one, `return`, uses what the step returns."""

    events: list[Event]
    values: list[Value]
    bonds: list[Bond]
    parameter_bytes: dict[str, int]
    """Of every parameter of the task, under its first name."""
    trainable: frozenset[str]
    numbers: int | None = None
    """The value that holds all numbers that modules return; none where they return tensors only."""
    measured: bool = False
    """Whether seconds were measured; else they are estimated from FLOPs and bytes."""

    @property
    def parameter_users(self) -> dict[str, list[int]]:
        """The events that use each parameter."""
        users: dict[str, list[int]] = {}
        for event in self.events:
            for name in event.parameters:
                users.setdefault(name, []).append(event.index)
        return users
