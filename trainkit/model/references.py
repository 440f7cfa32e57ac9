"""References of a task to its parameters, in attributes and containers beside the modules that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import UserError

_MAX_ITEMS, _MAX_DEPTH = 1000, 4
"""Of containers that are searched; longer ones are data."""
# named_modules() and named_parameters() reach these; a reference is what they do not reach.
_OF_MODULES = ("_parameters", "_modules")


@dataclass(frozen=True)
class Reference:
    """A place that has a tensor, a tuple or set of tensors, or a dictionary whose keys are tensors."""

    name: str
    table: Any
    key: Any

    @property
    def value(self) -> Any:
        """What is there now."""
        return self.table[self.key]

    def tensors(self) -> list[Tensor]:
        """Return the tensors there."""
        return [item for item in _items(self.value) if isinstance(item, Tensor)]

    def replace(self, replacements: Mapping[int, Tensor]) -> None:
        """Put others in the place of the tensors with these ids."""
        value = self.value
        items = [replacements.get(id(item), item) for item in _items(value)]
        if isinstance(value, dict):
            # Cleared and filled, so that the keys keep their order.
            entries = list(zip(items, value.values(), strict=True))
            value.clear()
            value.update(entries)
        elif isinstance(value, Tensor):
            self.table[self.key] = items[0]
        else:
            # A named tuple takes its fields one by one, not as one iterable.
            self.table[self.key] = type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def references(task: nn.Module) -> Iterator[Reference]:
    """Yield the places of tensors in the buffers and attributes of a task's modules, and in what these contain."""
    # By id, which stay unique: the task holds the containers. It ends cycles and finds shared containers once.
    seen: set[int] = set()
    for prefix, module in task.named_modules():
        attributes = vars(module)
        for key in list(attributes):
            if key not in _OF_MODULES and not key.endswith("_hooks"):
                yield from _references(attributes, key, f"{prefix}.{key}".lstrip("."), _MAX_DEPTH, seen)


def references_to(task: nn.Module, parameters: Sequence[nn.Parameter], *, moved: str) -> list[Reference]:
    """Return the places that have these parameters; raises UserError for other tensors in the memory of one.

    `moved` tells why such a tensor would not follow its parameter.
    """
    ids = {id(parameter) for parameter in parameters}
    places = [(reference, reference.tensors()) for reference in references(task)]
    spans: dict[int, list[tuple[int, int, int, str]]] = defaultdict(list)  # by storage: first and last byte, id, name
    others = [(reference.name, tensor) for reference, tensors in places for tensor in tensors]
    # Parameters first: all their spans must be known before other tensors are compared with them.
    for name, tensor in (*task.named_parameters(), *others):
        # Subclasses such as DTensor may not have the memory that they describe; an empty tensor has none.
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel():
            continue
        # Tensors on the meta device have no memory, and cannot overlap.
        address = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first, last = (tensor.itemsize * int(tensor.storage_offset() + end) for end in (0, reach))
        for other_first, other_last, other, other_name in spans[address] if address else ():
            if other != id(tensor) and first <= other_last and other_first <= last:
                raise UserError(
                    f"{name} is in the memory of the parameter {other_name}, {moved}: it would keep the first values. "
                    "Let modules have one parameter (self.b.weight = self.a.weight), compute what derives from a "
                    "weight in the step, or set strategy=ddp."
                )
        if id(tensor) in ids:
            spans[address].append((first, last, id(tensor), name))
    return [reference for reference, tensors in places if any(id(tensor) in ids for tensor in tensors)]


def _references(table: Any, key: Any, name: str, depth: int, seen: set[int]) -> Iterator[Reference]:
    value = table[key]
    items = _items(value)
    if any(isinstance(item, Tensor) for item in items):
        yield Reference(name, table, key)
    for item in [value] if isinstance(value, dict) else items:
        inner = _table_of(item)
        if depth and inner is not None and id(inner) not in seen and len(inner) <= _MAX_ITEMS:
            seen.add(id(inner))
            for inner_key in list(inner if isinstance(inner, dict) else range(len(inner))):
                yield from _references(inner, inner_key, f"{name}.{inner_key}", depth - 1, seen)


def _items(value: Any) -> list[Any]:
    """Return the items of a tuple or set, or the keys of a dictionary, which have no places, or the value itself."""
    is_fixed = isinstance(value, (tuple, set, frozenset, dict)) and len(value) <= _MAX_ITEMS
    return list(value) if is_fixed else [value]


def _table_of(value: Any) -> Any:
    """Return the list or dictionary of a value's parts that can be changed; None if it has none."""
    if isinstance(value, (list, dict)):
        return value
    if isinstance(value, (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)):
        return None
    return getattr(value, "__dict__", None)
