"""Shards of a payload's tensors in memory, and placeholders for those tensors; torch.distributed is not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.tree import tree_map

_PLACE = "trainkit_shard"


@dataclass(frozen=True)
class TensorShard:
    """A run of a tensor's elements that this rank holds, in the order in which they lie in memory."""

    name: str  # of the tensor; the same on every rank
    elements: Tensor  # (elements,)
    start: int
    whole: int  # elements of the whole tensor


@dataclass
class ShardedState:
    """The state of a task and its optimizers with placeholders for tensors, and this rank's shards of these."""

    task: dict[str, Any]
    optimizers: list[dict[str, Any]]
    pieces: list[TensorShard] = field(default_factory=list)


def shard_placeholder(name: str, like: Tensor) -> dict[str, Any]:
    """Return what stands in a payload for a tensor that is written in pieces."""
    return {_PLACE: name, "shape": tuple(like.shape), "stride": tuple(like.stride()), "dtype": like.dtype}


def is_shard_placeholder(value: Any) -> bool:
    """Whether a value stands for a tensor that is written in pieces."""
    return isinstance(value, dict) and _PLACE in value


def wanted_tensors(payload: dict[str, Any]) -> dict[str, tuple[int, torch.dtype]]:
    """Return the elements and the type of every tensor that the payload only names."""
    wanted: dict[str, tuple[int, torch.dtype]] = {}

    def note(place: Mapping[str, Any]) -> None:
        wanted[place[_PLACE]] = (torch.Size(place["shape"]).numel(), place["dtype"])

    _replace(payload, note)
    return wanted


def with_tensors(payload: dict[str, Any], elements: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the payload with tensors where it names them."""
    whole: dict[str, Any] = _replace(
        payload, lambda place: elements[place[_PLACE]].as_strided(place["shape"], place["stride"])
    )
    return whole


def _replace(payload: Any, by: Callable[[dict[str, Any]], Any]) -> Any:
    return tree_map(
        lambda leaf: by(leaf) if is_shard_placeholder(leaf) else leaf, payload, is_leaf=is_shard_placeholder
    )
