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

from trainkit.checkpoint.shards import ShardedState, TensorShard, shard_placeholder
from trainkit.errors import UserError

from ..ddp.bucket import Bucket, shaped_like
from .transport import ShardTransport

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
class _BufferShard:
    """A part of one parameter that this rank updates."""

    owner: nn.Parameter
    buffer: int
    position: int  # of the owner in its buffer
    group: int
    start: int  # in the owner's elements, in the order in which they lie in memory
    stop: int
    gradient: Tensor
    places: list[Tensor]  # in each set of weights
    parameter: nn.Parameter
    is_copied: bool = False  # the owner is not in the flat weights


@dataclass(eq=False)
class _ShardOwner:
    """Where one parameter lies in each set of flat weights."""

    owner: nn.Parameter
    views: list[Tensor]


class ShardedOptimizer:
    """Drives an optimizer over this rank's pieces of the parameters.

    The pieces are views of the transport's flat weights. Parameters are moved there where they lie as memory from an
    allocator does; others are copied back, since matrix products round differently at odd addresses, and a resumed run
    would not be bit-equal.

    With two sets of weights a step reads the live one and writes the next, which takes its place after `adopt`: until
    then forwards and backwards, this rank's and others', go on with the weights that they began with.
    """

    def __init__(
        self, optimizer: Optimizer, buckets: Sequence[Bucket], transport: ShardTransport, saved: dict[int, Any]
    ) -> None:
        self.optimizer, self.transport = optimizer, transport
        self._pieces: list[_BufferShard] = []
        self._moved: list[_ShardOwner] = []
        self._copied: list[_ShardOwner] = []
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._home = {id(p): number for number, params in enumerate(self._groups) for p in params}
        self._indices = {id(p): i for i, p in enumerate(p for params in self._groups for p in params)}
        for bucket in buckets:
            self._take(bucket)
        self._of_buffer = {b.index: [piece for piece in self._pieces if piece.buffer == b.index] for b in buckets}
        for piece in self._pieces:
            state = saved.get(self._indices[id(piece.owner)]) or optimizer.state.get(piece.owner)
            if state is not None:
                optimizer.state[piece.parameter] = {name: _cut(name, value, piece) for name, value in state.items()}
        for bucket in buckets:
            for slot in bucket.slots:
                optimizer.state.pop(slot.parameter, None)

    def _take(self, bucket: Bucket) -> None:
        if bucket.contents is None:
            raise UserError(
                f"{bucket.slots[0].name} has sparse gradients, which cannot be cut into parts; set "
                "strategy.shard_optimizer=false."
            )
        transport = self.transport
        flats, own = [weights[bucket.index] for weights in transport.weight_sets], transport.own_parts(bucket.index)
        for position, (slot, offset) in enumerate(zip(bucket.slots, bucket.layout.offsets, strict=True)):
            owner = slot.parameter
            end = offset + owner.numel()
            home = _ShardOwner(owner, [shaped_like(flat[offset:end], owner) for flat in flats])
            with torch.no_grad():
                home.views[transport.live].copy_(owner)
            is_copied = any(view.data_ptr() % ALIGNMENT_BYTES for view in home.views)
            if is_copied:
                self._copied.append(home)
            else:
                owner.data = home.views[transport.live]
                self._moved.append(home)
            for start, stop in own:
                first, last = max(start, offset), min(stop, end)
                if first < last and id(owner) in self._home:
                    places = [flat[first:last] for flat in flats]
                    self._pieces.append(
                        _BufferShard(
                            owner,
                            bucket.index,
                            position,
                            self._home[id(owner)],
                            first - offset,
                            last - offset,
                            bucket.contents[first:last],
                            places,
                            nn.Parameter(places[transport.live]),
                            is_copied,
                        )
                    )

    # ---- A step

    @contextmanager
    def on_shards(self) -> Iterator[None]:
        """Let the optimizer see this rank's pieces, with their gradients, in place of the parameters."""
        for buffer in self._of_buffer:
            self._load_shard(buffer)
        # A parameter that no rank used has no gradient, and is not updated.
        with self._with_shard_params([piece for piece in self._pieces if piece.owner.grad is not None]):
            yield

    def unscale(self, unscale: Callable[[], None], *, overflow: Tensor) -> None:
        """Call a scaler's `unscale` on the pieces, and let it find an overflow that happened on any rank.

        It must also see a gradient on a rank that has no pieces.
        """
        witness, params = nn.Parameter(torch.zeros(1)), self.optimizer.param_groups[0]["params"]
        witness.grad = torch.where(overflow, torch.inf, 0.0).reshape(1).float()
        params.append(witness)
        try:
            unscale()
        finally:
            params.pop()

    def step_buffer(self, buffer: int, used: Sequence[bool], step: Callable[[], None]) -> None:
        """Call `step` with the optimizer seeing this rank's pieces of one buffer, of which all gradients are summed."""
        self._load_shard(buffer)
        pieces = [piece for piece in self._of_buffer[buffer] if not used or used[piece.position]]
        if pieces:
            with self._with_shard_params(pieces):
                step()

    def adopt(self) -> None:
        """Let the parameters be what the next set of weights holds, once all ranks' parts of it are there."""
        number = self.transport.next
        if number != self.transport.live:
            for home in self._moved:
                home.owner.data = home.views[number]
            self.transport.live = number
        if self._copied:
            with torch.no_grad():
                owners: list[Tensor] = [home.owner for home in self._copied]
                torch._foreach_copy_(owners, [home.views[number] for home in self._copied])

    def _load_shard(self, buffer: int) -> None:
        """Leave in this rank's parts of the next weights what the parameters are now, whoever has changed them."""
        sets, live, following = self.transport.weight_sets, self.transport.live, self.transport.next
        with torch.no_grad():
            if following != live:
                for start, stop in self.transport.own_parts(buffer):
                    sets[following][buffer][start:stop].copy_(sets[live][buffer][start:stop])
            for piece in self._of_buffer[buffer]:
                if piece.is_copied:
                    piece.places[following].copy_(_in_memory_order(piece.owner)[piece.start : piece.stop])
                if piece.parameter.data_ptr() != piece.places[following].data_ptr():
                    piece.parameter.data = piece.places[following]

    @contextmanager
    def _with_shard_params(self, pieces: Sequence[_BufferShard]) -> Iterator[None]:
        groups = self.optimizer.param_groups
        for piece in pieces:
            piece.parameter.grad = piece.gradient
        try:
            for number, group in enumerate(groups):
                group["params"] = [piece.parameter for piece in pieces if piece.group == number]
            yield
        finally:
            for group, params in zip(groups, self._groups, strict=True):
                group["params"] = params
            for piece in pieces:
                piece.parameter.grad = None

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

    def shards(self, task: nn.Module, all_gather: AllGather) -> ShardedState:
        """Return the state of the task and of this optimizer, with this rank's pieces of both. Collective."""
        names = {id(parameter): name for name, parameter in task.named_parameters()}
        shards = ShardedState(task.state_dict(), [{**state_dict_without_state(self.optimizer), "state": {}}])
        owners = {id(home.owner) for home in (*self._moved, *self._copied)} & set(self._home)
        for key, parameter in task.state_dict(keep_vars=True).items():
            if id(parameter) in owners:
                shards.task[key] = shard_placeholder(
                    f"task.{names[id(parameter)]}", _flat_layout(parameter, parameter.dtype)
                )
        state = shards.optimizers[0]["state"]
        for piece in self._pieces:
            index, name = self._indices[id(piece.owner)], names[id(piece.owner)]
            weights = _in_memory_order(piece.owner)[piece.start : piece.stop]
            shards.pieces.append(TensorShard(f"task.{name}", weights, piece.start, piece.owner.numel()))
            for key, value in self.optimizer.state.get(piece.parameter, {}).items():
                told = value
                if _is_cut(key, value, piece):
                    place = f"optimizer.{index}.{key}"
                    shards.pieces.append(TensorShard(place, value, piece.start, piece.owner.numel()))
                    told = shard_placeholder(place, _flat_layout(piece.owner, value.dtype))
                state.setdefault(index, {})[key] = told
        for told_by_rank in all_gather(state):
            for index, told in told_by_rank.items():
                state.setdefault(index, {}).update(told)
        shards.optimizers[0]["state"] = dict(sorted(state.items()))
        return shards

    def _whole(self, owner: nn.Parameter, name: str, dtype: torch.dtype, all_reduce: AllReduce) -> Tensor:
        flat = torch.zeros(owner.numel(), dtype=dtype, device=owner.device)
        for piece in self._pieces:
            if piece.owner is owner and name in self.optimizer.state.get(piece.parameter, {}):
                flat[piece.start : piece.stop] = self.optimizer.state[piece.parameter][name]
        return shaped_like(all_reduce(flat), owner).clone()

    def release(self) -> None:
        """Give the parameters memory of their own again."""
        for home in self._moved:
            home.owner.data = home.owner.data.clone()
        self._moved, self._copied, self._pieces, self._of_buffer = [], [], [], {}


def state_dict_without_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of the parameter groups: state that belongs to pieces has no place in them."""
    state, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = state


def _flat_layout(owner: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor as a parameter's elements in flat weights make one."""
    return shaped_like(torch.empty(owner.numel(), dtype=dtype, device="meta"), owner)


def _in_memory_order(parameter: Tensor) -> Tensor:
    """Return the elements of a parameter as they lie in flat weights."""
    shaped = shaped_like(parameter.new_empty(parameter.numel()), parameter)
    if shaped.stride() == parameter.stride():
        return parameter.as_strided((parameter.numel(),), (1,))
    return parameter.reshape(-1)


def _is_cut(name: str, value: Any, piece: _BufferShard) -> bool:
    """Whether a value of a piece's state has an element for each of the piece."""
    return isinstance(value, Tensor) and name not in _WHOLE and value.shape == piece.parameter.shape


def _cut(name: str, value: Any, piece: _BufferShard) -> Any:
    """Return the piece's part of a value of its parameter's state."""
    owner = piece.owner
    if not isinstance(value, Tensor) or name in _WHOLE or value.shape != owner.shape:
        return value.clone() if isinstance(value, Tensor) else value
    flat = torch.empty(owner.numel(), dtype=value.dtype, device=owner.device)
    shaped_like(flat, owner).copy_(value)
    return flat[piece.start : piece.stop].clone()
