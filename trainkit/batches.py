"""What can be asked of a batch without knowing its kind: its rows, its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import UserError


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `batch` with `function` applied to each tensor in its mappings, sequences and dataclasses."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in batch.items()}
        return mapped if type(batch) is dict else _like_mapping(batch, mapped)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, function) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: map_tensors(getattr(batch, f.name), function) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return batch


def _like_mapping(batch: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    try:
        return type(batch)(mapped)  # type: ignore[call-arg] # most mappings are made from one
    except TypeError:
        return mapped


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_in(getattr(batch, field.name))


def num_rows(batch: Any) -> int:
    """Return the length of the first dimension of a ready-made batch's tensors; raises UserError if there is none."""
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch  # most batches, told without a search
    for tensor in (first,) if isinstance(first, Tensor) and first.dim() else tensors_in(batch):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise UserError(
        f"cannot tell how many samples a ready-made batch of type {type(batch).__name__} has: it holds no tensor "
        "with a first dimension. Give a dataset of samples and a batch_size instead."
    )


def rows(batch: Any, selection: slice, *, of: int) -> Any:
    """Return the `selection` of a batch's rows; tensors whose first dimension is not `of` are kept whole."""
    return map_tensors(batch, lambda tensor: tensor[selection] if tensor.dim() and tensor.shape[0] == of else tensor)


def to_device(batch: Any, device: torch.device, *, dtype: torch.dtype | None = None) -> Any:
    """Return `batch` with its tensors on `device` and its floating-point ones as `dtype`; copies do not block."""

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else None
        return tensor.to(device=device, dtype=wanted, non_blocking=True)

    if hasattr(batch, "to") and not isinstance(batch, Tensor):
        return batch.to(device)  # a batch that knows how to move itself
    return map_tensors(batch, move)


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
