"""Nested values (dicts, lists, tuples, dataclasses) taken apart into leaves and built again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

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
