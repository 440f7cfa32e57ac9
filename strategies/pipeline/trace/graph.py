"""Graph of a traced step: nodes, values, costs and cut constraints."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainkit.tree import tensors_in, tree_leaves

RETURN = "return"
GRADIENT = "autograd.grad"
"""Name of the node of `torch.autograd.grad`; the attribute `grad` has its own."""

Call = Callable[..., Any]
Step = Callable[[Any], Any]


class ValueRef:
    """Placeholder of a value's tensor in a traced structure."""

    def __init__(self, value: int):
        self.value = value


class ParameterRef:
    """Placeholder of a parameter or buffer of the task in a traced structure."""

    def __init__(self, name: str):
        self.name = name


class ScalarValue:
    """Placeholder of a Python number, truth value or shape, which another batch may change, in a traced structure."""

    def __init__(self, kind: type[Any], start: int, count: int):
        self.kind = kind
        self.start = start  # first index among all numbers of the step, each of 64 bits
        self.count = count

    def __str__(self) -> str:
        return f"a shape of {self.count} dimensions" if self.kind is torch.Size else f"one of type {self.kind.__name__}"


class Constant:
    """Placeholder of an object that is neither tensor nor constant in a traced structure."""


@dataclass(slots=True)
class Value:
    """A tensor of the traced step that is not a parameter or buffer; written in place it stays the same value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    local: bool
    """True if it depends on the batch and constants alone, so that every stage computes it."""
    memory: int = -1
    """Index of its memory, which views of it share, in `TracedGraph.memory_bytes`."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """A value that a node makes or writes; `requires_grad` if gradients flow back to it from then on."""

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
    is_opaque: bool = False
    """True for a leaf module, an autograd Function and the like: calls inside of it are not nodes."""
    inputs: tuple[int, ...] = ()
    num_given: int = 0
    """Number of inputs, the first ones, that are arguments of the call; an opaque call uses the others without that."""
    result: Any = None
    """The result's structure, with a `ValueRef` for each tensor."""
    has_plain: bool = False
    """True for an opaque call whose result has more than tensors: numbers, or constants that must stay the same."""
    outputs: tuple[NodeOutput, ...] = ()
    written: tuple[int, ...] = ()
    """Inputs that the call writes in place."""
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    """The buffers that it uses, and the attributes that hold the tensors it uses or that are read there."""
    written_buffers: tuple[str, ...] = ()
    """The buffers, parameters and attributes that it writes, or that are assigned before it."""
    saved: tuple[str, ...] = ()
    """The parameters, buffers and attributes that autograd saves for its backward."""
    saved_memories: tuple[int, ...] = ()
    """Indices of the other memories that autograd saves for its backward, in `TracedGraph.memory_bytes`."""
    is_batch_only: bool = False
    reads: bool = False
    """True if the call returns a number or a truth value from its inputs' elements."""
    is_random: bool = False
    draws_in_python: bool = False
    """True for an opaque call that draws from the generators of Python or numpy."""
    checkpoint: int | None = None
    """Index of the activation checkpoint around the call, which makes it again in backward."""
    key: int = 0
    """Stable identity of the call, from its name and the number of earlier calls of that name."""
    cost: NodeCost = field(default_factory=NodeCost)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The parameters and buffers that it uses."""
        return (*self.parameters, *self.buffers, *self.written_buffers)

    @property
    def sends_numbers(self) -> bool:
        """True for a module whose result has numbers that one stage alone knows."""
        if self.is_batch_only or not self.has_plain:
            return False
        return any(isinstance(leaf, ScalarValue) for leaf in tree_leaves(self.result))

    def __str__(self) -> str:
        named = f"module '{self.name}'" if self.is_leaf_module else f"`{self.name}`"
        return f"{named} (node {self.index}, at {self.location})"


@dataclass(frozen=True, slots=True)
class CutConstraint:
    """Nodes that must be in one stage, from `first` to `last`, and the reason."""

    first: int
    last: int
    reason: str
    advice: str = ""
    """Remedy, if one is known."""

    def forbids(self, cut: int) -> bool:
        """Return True if a stage that begins at node `cut` would violate the constraint."""
        return self.first < cut <= self.last


@dataclass(slots=True)
class TracedGraph:
    """A step as a list of nodes; the last one, `return`, has the step's return values as inputs."""

    nodes: list[Node]
    values: list[Value]
    constraints: list[CutConstraint]
    parameter_bytes: dict[str, int]
    """Bytes of every parameter of the task, under its first name."""
    numbers: int | None = None
    """The value with all numbers that modules return; `None` if they return tensors only."""
    measured: bool = False
    """True if seconds were measured, not estimated from FLOPs and bytes."""
    calls_compiled: bool = False
    """True if the step itself calls functions of torch.compile."""
    hooks_capture: bool = False
    """True if the step uses what forward hooks of leaf modules keep, so that every stage needs them to be called."""
    temporary_hooks: frozenset[str] = frozenset()
    """Modules on which the step registers hooks and removes them again."""
    replaced: frozenset[str] = frozenset()
    """Attributes that the step changes, and buffers that it replaces by other tensors."""
    handed_on: tuple[str, ...] = ()
    """The attributes with tensors that the step reads before it changes them, so that micro-batches share them."""
    reset: frozenset[str] = frozenset()
    """Attributes that the step writes and leaves as they were."""
    left_in: Mapping[str, tuple[int, torch.Size, torch.dtype]] = field(default_factory=dict)
    """Attributes in which a leaf module leaves a tensor for later calls: its node, and the tensor's shape and dtype."""
    memory_bytes: Sequence[int] = ()
    """Bytes of each memory that has a value or is saved for backward; 0 for that of the batch."""

    @property
    def parameter_users(self) -> dict[str, list[int]]:
        """The nodes that use each parameter."""
        users: dict[str, list[int]] = defaultdict(list)
        for node in self.nodes:
            for name in node.parameters:
                users[name].append(node.index)
        return users

    @property
    def written(self) -> frozenset[str]:
        """The parameters, buffers and attributes that the step writes."""
        return frozenset(name for node in self.nodes for name in node.written_buffers)

    @property
    def leaf_modules(self) -> frozenset[str]:
        """Names of the modules whose calls are one node each."""
        return frozenset(node.name for node in self.nodes if node.is_leaf_module)


_PROBABILITIES = ("p", "dropout_p", "dropout")
"""Names of arguments that switch a random call off if they are 0."""


class FlopCounter(TorchDispatchMode):
    """Adds up floating-point operations, bytes written and calls; `num_draws` counts calls that may draw numbers."""

    def __init__(self) -> None:
        # Not `super().__init__`, which mypy takes for an untyped call of ours.
        TorchDispatchMode.__init__(self)
        self.total = NodeCost()
        self.num_draws = 0
        self.num_shaped = 0
        """The number of calls whose results have a shape that depends on elements, as that of `nonzero`."""
        self.after_operation: Callable[[Any, Any, Any], None] | None = None
        """Called with every operation, its arguments and its result."""
        self.before_write: Callable[[Tensor], object] | None = None
        """Called with every tensor that is about to be written in place."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.before_write is not None:
            for tensor in _written(func, args, kwargs or {}):
                self.before_write(tensor)
        # Private: torch has no public name for it. Function modes would see the operations below torch's functions.
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        if self.after_operation is not None:
            self.after_operation(func, (args, kwargs), result)
        # The registry has one formula for all overloads of an operation.
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        # Views move nothing, and `prim` only asks fake tensors for their devices.
        if not func.is_view and func.namespace != "prim":
            self.total.num_calls += 1
            self.total.moved_bytes += sum(num_bytes(tensor) for tensor in tensors(result))
        if torch.Tag.nondeterministic_seeded in func.tags and _may_draw(func, args, kwargs or {}):
            self.num_draws += 1
        self.num_shaped += _is_shaped_by_elements(func, args)
        return result


_STATISTICS = ("running_mean", "running_var")
"""Arguments that batch normalization writes in training, of which its schemas say nothing."""


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    # Private: torch shows the schema of an operation nowhere else.
    arguments = [argument.name for argument in func._schema.arguments]
    # First, as this runs at every operation, and few of them write.
    if not func._schema.is_mutable and not set(_STATISTICS).issubset(arguments):
        return
    # Not strict, here and below: arguments with defaults are left out at the end.
    bound = dict(zip(arguments, args, strict=False)) | kwargs
    is_training = any(bound.get(name) is True for name in ("train", "training"))
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or (is_training and argument.name in _STATISTICS):
            yield from tensors(bound.get(argument.name))


def _is_shaped_by_elements(func: Any, args: tuple[Any, ...]) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    # `index` has the tag for all indices, but a mask alone selects as many elements as it has ones.
    masks = (torch.bool, torch.uint8)
    return func is not torch.ops.aten.index.Tensor or any(index.dtype in masks for index in tensors(args[1]))


def _may_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    bound = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    probabilities = [bound[name] for name in _PROBABILITIES if name in bound]
    # A random call without such an argument always draws.
    return not probabilities or any(probabilities)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second, and what each call takes."""

    flops: float
    bytes: float
    seconds_per_call: float


# Fixed, not measured, so that an estimated partition is the same on every machine.
NOMINAL = Rates(3e10, 5e9, 5e-6)
"""Rates of a CPU, the same each time."""


def estimated_seconds(cost: NodeCost, rates: Rates = NOMINAL) -> float:
    """Return the estimated seconds of a forward, from operations, memory traffic and calls."""
    return cost.flops / rates.flops + cost.moved_bytes / rates.bytes + cost.num_calls * rates.seconds_per_call


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def is_number(value: Any) -> bool:
    """Return True if a value can be sent as integers of 64 bits: a number, truth value or shape."""
    # Larger integers do not fit into a message.
    return isinstance(value, (torch.Size, float)) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)


def encoded(value: Any) -> list[int]:
    """Return a number, truth value or shape as integers of 64 bits."""
    if isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, float):
        # Its bits, as a message of integers is exact: NaN and infinity come back as they were.
        return list(struct.unpack("<q", struct.pack("<d", value)))
    return [int(value)]


def decoded(number: ScalarValue, codes: Sequence[int]) -> Any:
    """Return the value of `number` among all numbers of the step."""
    number_codes = codes[number.start : number.start + number.count]
    if number.kind is torch.Size:
        return torch.Size(number_codes)
    # By the type of the traced value: a subclass of float or int must come back as one.
    if issubclass(number.kind, float):
        return number.kind(*struct.unpack("<d", struct.pack("<q", number_codes[0])))
    return number.kind(number_codes[0])


def changed(node: Node, result: Any) -> Iterator[tuple[ScalarValue, list[int]]]:
    """Yield the numbers in the result of a node, encoded; raises ValueError for another structure."""
    traced_leaves, leaves = list(tree_leaves(node.result)), list(tree_leaves(result))
    if len(traced_leaves) != len(leaves):
        raise ValueError(f"{len(leaves)} values in its result in place of {len(traced_leaves)}")
    for expected, value in zip(traced_leaves, leaves, strict=True):
        if isinstance(expected, ScalarValue):
            # The exact type: `True` in place of 1 would be decoded as 1 in the other stages.
            codes = encoded(value) if is_number(value) and type(value) is expected.kind else []
            if len(codes) != expected.count:
                raise ValueError(f"{value!r:.80} in its result where {expected} was")
            yield expected, codes
        elif isinstance(expected, (ValueRef, ParameterRef)) != isinstance(value, Tensor):
            traced_type = type(expected).__name__ if isinstance(value, Tensor) else "a tensor"
            raise ValueError(f"{type(value).__name__} in its result where {traced_type} was")
        elif isinstance(expected, (ValueRef, ParameterRef, Constant)):
            continue
        elif type(value) is not type(expected) or value != expected:
            raise ValueError(f"{value!r:.80} in its result where {expected!r:.80} was")


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in `value`."""
    return list(tensors_in(value))


Signature = tuple[tuple[tuple[int, ...], str], ...]


def signature(tensors: Iterable[Tensor]) -> Signature:
    """Return the shapes and types of a batch's tensors: batches with equal ones have equal shapes in a step."""
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors)
