"""Nested batches: traversal, rows, moving to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.devices import has_streams
from trainkit.errors import UserError


def tree_map(function: Callable[[Any], Any], tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return `tree` with `function` applied to each leaf.

    Mappings, lists, tuples, named tuples and dataclasses are nodes and keep their type. Everything else is a leaf, and
    so is a node for which `is_leaf` returns True. (torch.utils._pytree supports only registered mappings and
    dataclasses.)
    """
    if isinstance(tree, Tensor) or (is_leaf is not None and is_leaf(tree)):
        return function(tree)
    kind = type(tree)
    # Most batches, without the slow checks below: this runs in every step.
    if kind is tuple or kind is list:
        return kind([tree_map(function, part, is_leaf=is_leaf) for part in tree])
    if kind is dict:
        return {key: tree_map(function, part, is_leaf=is_leaf) for key, part in tree.items()}
    parts = _parts(tree)
    if parts is None:
        return function(tree)
    return _with_parts(tree, [tree_map(function, part, is_leaf=is_leaf) for part in parts])


def tree_leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree, as `tree_map` visits them."""
    parts = _parts(tree)
    if parts is None:
        yield tree
    else:
        for part in parts:
            yield from tree_leaves(part)


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `batch` with `function` applied to each tensor."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch."""
    return (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the strided tensors, sharing its memory, that hold the contents of a tensor of any layout."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # private: the public ones refuse what is not coalesced
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    return (*indices, tensor.values())


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors of any layout."""
    return sum(part.nbytes for tensor in tensors for part in dense_parts(tensor))


def num_rows(batch: Any) -> int:
    """Return the length of the first dimension of a batch's tensors; raises UserError if it has none."""
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch  # most batches, without a search
    for tensor in (first,) if isinstance(first, Tensor) and first.dim() else tensors_in(batch):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise UserError(
        f"unknown number of samples in a pre-batched batch of type {type(batch).__name__}: it holds no tensor "
        "with a first dimension. Pass a dataset of samples and a batch_size instead."
    )


def rows(batch: Any, selection: slice, *, of: int) -> Any:
    """Return the `selection` of a batch's rows; tensors whose first dimension is not `of` are kept whole."""
    return map_tensors(batch, lambda tensor: _rows(tensor, selection) if tensor.dim() and len(tensor) == of else tensor)


def _rows(tensor: Tensor, selection: slice) -> Tensor:
    if tensor.layout is torch.strided:
        return tensor[selection]
    indices = torch.arange(len(tensor), device=tensor.device)[selection]
    if tensor.layout is torch.sparse_coo:
        return tensor.index_select(0, indices)
    # Compressed layouts have no selection of several rows.
    selected: Tensor = tensor.to_sparse_coo().index_select(0, indices)
    return selected.to_sparse(layout=tensor.layout)


def to_device(batch: Any, device: torch.device, *, dtype: torch.dtype | None = None) -> Any:
    """Return `batch` with its tensors on `device` and its floating-point ones as `dtype`.

    Copies to a GPU do not block; what is copied to the CPU is there.
    """

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        wanted = dtype if dtype is not None and leaf.is_floating_point() else None
        # Python would read host memory before the bytes are there, and MPS host memory after it is used again.
        return leaf.to(device=device, dtype=wanted, non_blocking=has_streams(device))

    if hasattr(batch, "to") and not isinstance(batch, Tensor):
        return batch.to(device)  # a custom batch type
    return tree_map(move, batch)


def concatenate(outputs: Sequence[Any]) -> Any:
    """Join the predictions of consecutive batches along the first dimension; lists of other things are chained."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, Mapping):
        return {key: concatenate([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple):
        return tuple(concatenate(parts) for parts in zip(*outputs, strict=True))
    if isinstance(first, list):
        return [item for output in outputs for item in output]
    return list(outputs)


_LEAVES = (Tensor, torch.Size, str, int, float, type(None))  # most leaves, without the slow checks for nodes


def _parts(tree: Any) -> Collection[Any] | None:
    """Return the children of a node; `None` for a leaf, also for a shape."""
    if isinstance(tree, _LEAVES):
        return None
    if isinstance(tree, Mapping):
        return tree.values()
    if isinstance(tree, (list, tuple)):
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return None


def _with_parts(tree: Any, parts: list[Any]) -> Any:
    """Return a node of the same type with other children."""
    if isinstance(tree, Mapping):
        mapped = dict(zip(tree, parts, strict=True))
        try:
            return type(tree)(mapped)  # type: ignore[call-arg] # most mappings are made from one
        except TypeError:
            return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)._make(parts)  # type: ignore[attr-defined]  # not by its constructor, which may check values
    if isinstance(tree, (list, tuple)):
        return type(tree)(parts)
    clone = copy.copy(tree)  # not by its constructor, which may check or convert values
    for field, part in zip(dataclasses.fields(tree), parts, strict=True):
        object.__setattr__(clone, field.name, part)
    return clone
