"""An optimizer of which every rank keeps the state of its parts only, and updates only these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from trainkit.errors import UserError

from ..ddp.gradient_bucket import Bucket, shaped_like
from .part_transport import PartTransport

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop)
"""Optimizers that update each element by its own history, so that a part is updated as in the whole."""
ALIGNMENT_BYTES = 64  # of memory from torch's allocator
_WHOLE = ("step", "mu_product")  # of a whole parameter, also where that is a single number
AllReduce = Callable[[Tensor], Tensor]
AllGather = Callable[[Any], list[Any]]


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise UserError for an optimizer that must see whole parameters."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UserError(
            f"shard_optimizer=true updates parts of parameters, and {type(optimizer).__name__} may need them whole; "
            f"use one of {names}, or set strategy.shard_optimizer=false."
        )


@dataclass(eq=False)
class _Piece:
    """A part of one parameter that this rank updates."""

    owner: nn.Parameter
    group: int
    start: int  # in the owner's elements, in the order in which they lie in memory
    stop: int
    gradient: Tensor
    parameter: nn.Parameter


class ShardedOptimizer:
    """Drives an optimizer over this rank's pieces of the parameters.

    The pieces are views of the transport's flat weights. Parameters are moved there where they lie as memory from an
    allocator does; others are copied back, since matrix products round differently at odd addresses, and a resumed run
    would not be bit-equal.
    """

    def __init__(
        self, optimizer: Optimizer, buckets: Sequence[Bucket], transport: PartTransport, saved: dict[int, Any]
    ) -> None:
        self.optimizer = optimizer
        self._pieces: list[_Piece] = []
        self._moved: list[nn.Parameter] = []
        self._copied: list[tuple[nn.Parameter, Tensor]] = []  # and where in the flat weights
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._home = {id(p): number for number, params in enumerate(self._groups) for p in params}
        self._indices = {id(p): i for i, p in enumerate(p for params in self._groups for p in params)}
        for bucket in buckets:
            self._take(bucket, transport)
        for piece in self._pieces:
            state = saved.get(self._indices[id(piece.owner)]) or optimizer.state.get(piece.owner)
            if state is not None:
                optimizer.state[piece.parameter] = {name: _cut(name, value, piece) for name, value in state.items()}
        for bucket in buckets:
            for slot in bucket.slots:
                optimizer.state.pop(slot.parameter, None)

    def _take(self, bucket: Bucket, transport: PartTransport) -> None:
        if bucket.contents is None:
            raise UserError(
                f"{bucket.slots[0].name} has sparse gradients, which cannot be cut into parts; set "
                "strategy.shard_optimizer=false."
            )
        weights, own = transport.weights[bucket.index], transport.own_parts(bucket.index)
        for slot, offset in zip(bucket.slots, bucket.layout.offsets, strict=True):
            owner = slot.parameter
            end = offset + owner.numel()
            part = weights[offset:end]
            with torch.no_grad():
                moved = shaped_like(part, owner)
                moved.copy_(owner)
            if moved.data_ptr() % ALIGNMENT_BYTES == 0:
                owner.data = moved
                self._moved.append(owner)
            else:
                self._copied.append((owner, moved))
            for start, stop in own:
                first, last = max(start, offset), min(stop, end)
                if first < last and id(owner) in self._home:
                    piece = nn.Parameter(weights[first:last])
                    gradient = bucket.contents[first:last]
                    home = self._home[id(owner)]
                    self._pieces.append(_Piece(owner, home, first - offset, last - offset, gradient, piece))

    @contextmanager
    def on_pieces(self) -> Iterator[None]:
        """Let the optimizer see this rank's pieces, with their gradients, in place of the parameters."""
        groups = self.optimizer.param_groups
        for piece in self._pieces:
            # A parameter that no rank used has no gradient, and is not updated.
            piece.parameter.grad = None if piece.owner.grad is None else piece.gradient
        try:
            for number, group in enumerate(groups):
                group["params"] = [piece.parameter for piece in self._pieces if piece.group == number]
            yield
        finally:
            for group, params in zip(groups, self._groups, strict=True):
                group["params"] = params
            for piece in self._pieces:
                piece.parameter.grad = None

    def copy_back(self) -> None:
        """Leave in every parameter what the flat weights hold, once all ranks' parts are there."""
        if self._copied:
            owners, views = zip(*self._copied, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(owners, views)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's pieces."""
        return [piece.gradient for piece in self._pieces if piece.owner.grad is not None]

    def state_bytes(self) -> int:
        """Return the size of this rank's optimizer state."""
        states = self.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    def whole_state(self, all_reduce: AllReduce, all_gather: AllGather) -> dict[int, dict[str, Any]]:
        """Return the state of every whole parameter, by its index in the optimizer. Collective."""
        mine: dict[int, dict[str, Any]] = {}
        for piece in self._pieces:
            state = self.optimizer.state.get(piece.parameter, {})
            told = {n: value.dtype if _is_cut(n, value, piece) else value for n, value in state.items()}
            mine.setdefault(self._indices[id(piece.owner)], {}).update(told)
        known: dict[int, dict[str, Any]] = {}
        for told_by_rank in all_gather(mine):
            for index, told in told_by_rank.items():
                known.setdefault(index, {}).update(told)
        parameters = [p for params in self._groups for p in params]
        return {
            index: {
                name: self._whole(parameters[index], name, value, all_reduce)
                if isinstance(value, torch.dtype)
                else value
                for name, value in known[index].items()
            }
            for index in sorted(known)
        }

    def _whole(self, owner: nn.Parameter, name: str, dtype: torch.dtype, all_reduce: AllReduce) -> Tensor:
        flat = torch.zeros(owner.numel(), dtype=dtype, device=owner.device)
        for piece in self._pieces:
            if piece.owner is owner and name in self.optimizer.state.get(piece.parameter, {}):
                flat[piece.start : piece.stop] = self.optimizer.state[piece.parameter][name]
        return shaped_like(all_reduce(flat), owner).clone()

    def release(self) -> None:
        """Give the parameters memory of their own again."""
        for parameter in self._moved:
            parameter.data = parameter.data.clone()
        self._moved, self._copied, self._pieces = [], [], []


def state_dict_without_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of the parameter groups: state that belongs to pieces has no place in them."""
    state, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = state


def _is_cut(name: str, value: Any, piece: _Piece) -> bool:
    """Whether a value of a piece's state has an element for each of the piece."""
    return isinstance(value, Tensor) and name not in _WHOLE and value.shape == piece.parameter.shape


def _cut(name: str, value: Any, piece: _Piece) -> Any:
    """Return the piece's part of a value of its parameter's state."""
    owner = piece.owner
    if not isinstance(value, Tensor) or name in _WHOLE or value.shape != owner.shape:
        return value.clone() if isinstance(value, Tensor) else value
    flat = torch.empty(owner.numel(), dtype=value.dtype, device=owner.device)
    shaped_like(flat, owner).copy_(value)
    return flat[piece.start : piece.stop].clone()
