"""ShardedState: the state of a task and its optimizers, of which this rank holds shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

PLACE = "trainkit_shard"
"""The key of a placeholder under which the name of its tensor stands."""


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
    return {PLACE: name, "shape": tuple(like.shape), "stride": tuple(like.stride()), "dtype": like.dtype}


def replace_placeholders(payload: Any, by: Callable[[dict[str, Any]], Any]) -> None:
    """Replace each placeholder in a payload that was read from a file by what `by` returns for it."""
    items = payload.items() if isinstance(payload, dict) else enumerate(payload)
    for key, value in list(items):
        if isinstance(value, dict) and PLACE in value:
            payload[key] = by(value)
        elif isinstance(value, (dict, list)):
            replace_placeholders(value, by)
