"""ShardedState: the state of a task and its optimizers, of which this rank holds shards."""

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
    """Consecutive elements of a tensor that this rank holds, in the order in which they lie in memory."""

    name: str  # of the tensor; the same on every rank
    elements: Tensor  # (elements,)
    start: int
    numel: int  # elements of the complete tensor

    @property
    def place(self) -> str:
        """A name that no other shard of this rank has."""
        return f"{self.name} from {self.start}"


@dataclass
class ShardedState:
    """The state of a task and its optimizers with placeholders for tensors, and this rank's shards of these."""

    task: dict[str, Any]
    optimizers: list[dict[str, Any]]
    shards: list[TensorShard] = field(default_factory=list)


def shard_placeholder(name: str, like: Tensor) -> dict[str, Any]:
    """Return the value that represents a sharded tensor in a payload."""
    return {_PLACE: name, "shape": tuple(like.shape), "stride": tuple(like.stride()), "dtype": like.dtype}


def empty_tensors(payload: dict[str, Any], *, at_most: int) -> dict[str, Tensor]:
    """Return an uninitialized flat tensor for each placeholder in the payload, by its name.

    Raises ValueError if one of them takes more than `at_most` bytes, the size of the shards.
    """
    empty: dict[str, Tensor] = {}

    def allocate(placeholder: Mapping[str, Any]) -> None:
        elements = torch.Size(placeholder["shape"]).numel()
        if elements * placeholder["dtype"].itemsize > at_most:
            raise ValueError(f"a tensor of {elements:,} elements is larger than its shards")
        empty[placeholder[_PLACE]] = torch.empty(elements, dtype=placeholder["dtype"])

    _replace(payload, allocate)
    return empty


def fill_placeholders(payload: dict[str, Any], elements: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the payload with tensors in place of placeholders; `elements` are flat tensors by name."""
    filled: dict[str, Any] = _replace(
        payload,
        lambda placeholder: elements[placeholder[_PLACE]].as_strided(placeholder["shape"], placeholder["stride"]),
    )
    return filled


def _replace(payload: Any, by: Callable[[dict[str, Any]], Any]) -> Any:
    return tree_map(lambda leaf: by(leaf) if _is_placeholder(leaf) else leaf, payload, is_leaf=_is_placeholder)


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, dict) and _PLACE in value
