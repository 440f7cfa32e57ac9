"""What all ways of moving fusion buffers offer: sums in parts, and parts of the weights for all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..ddp.transport import Transport, Work


@dataclass(frozen=True)
class FusionSettings:
    """How buffers are summed."""

    window_bytes: int
    """Largest piece of a buffer that travels at once."""
    in_flight: int
    """Windows of an exchange under way at once, which bounds the memory that they take."""
    wire_type: torch.dtype | None
    """Number format in which gradients travel; sums are made in at least float32. `None`: their own."""
    sharded: bool
    """Whether a part's sum stays with its server, which then updates that part of the weights."""
    second_weights: bool = False
    """With `sharded`: whether new weights are gathered beside those that backward still reads."""


class ShardWork(Work, Protocol):
    """A reduction that can be looked at without waiting."""

    def is_done(self) -> bool:
        """Whether there is nothing to wait for any more."""

    def check_peers(self, *, waited: float) -> None:
        """Raise if a rank has failed or gone, or has been waited for too long; `waited` in seconds."""


class ShardTransport(Transport):
    """A transport in which every server sums its part of every buffer."""

    settings: FusionSettings
    weight_sets: list[list[Tensor]]
    """With sharded settings: the flat weights of each buffer's parameters, once or (`second_weights`) twice."""
    live: int = 0
    """Which of the sets the parameters are in; the others receive what is shared."""
    num_gradients: Callable[[], list[int]]
    """Gradient elements of each buffer; behind them are flags, which every rank must know."""
    on_summed: Callable[[int], None] | None = None
    """With sharded settings: called with a buffer's number once this rank's parts of it are summed and the flags are
    known; afterwards its parts of the weights are shared before the reduction ends. The same on every rank."""

    @abstractmethod
    def start(self, bucket: int, *, where: str, timed: bool = False) -> ShardWork:
        """Start to sum the allocated tensor number `bucket`; `where` names the place in messages."""

    @abstractmethod
    def own_parts(self, buffer: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the gradient elements of a buffer that this rank sums."""

    @abstractmethod
    def used(self, buffer: int) -> Tensor:
        """Return for each parameter of a summed buffer a number above 0 if any rank had a gradient."""

    @abstractmethod
    def share(self, buffer: int, *, where: str) -> ShardWork:
        """Start to give all ranks this rank's parts of the buffer's next weights, and it theirs. Collective."""

    @property
    def next(self) -> int:
        """Which set of weights receives what is shared."""
        return (self.live + 1) % max(1, len(self.weight_sets))

    def mark_ready(self, buffer: int) -> None:
        """Note that what is on the current stream fills the buffer; called on the thread that runs backward."""

    def order_current_stream(self, buffer: int) -> None:
        """Let what comes on the current stream see a buffer that has landed."""

    @property
    @abstractmethod
    def bytes_a_step(self) -> int:
        """Bytes that this rank moves to or from other ranks for the gradients and weights of one step."""

    def wire_type_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the format in which gradients of a type travel."""
        wire = self.settings.wire_type
        return dtype if wire is None or dtype.itemsize <= wire.itemsize else wire


def ordered_sum(parts: list[Tensor]) -> Tensor:
    """Return the sum of all ranks' parts, added in the order of ranks, in at least float32."""
    first, *others = parts
    total = first.to(torch.float32, copy=True) if first.dtype.itemsize < 4 else first.clone()
    for other in others:
        total.add_(other)
    return total


@dataclass(frozen=True)
class ServerGroups:
    """Groups of the same ranks, one for each purpose: in one group the order of collectives would depend on timing."""

    rank: int
    """This rank's place among them."""
    world_size: int
    scatter: dist.ProcessGroup | None
    """Takes gradients to the servers."""
    back: dist.ProcessGroup | None
    """Takes sums, or weights, from them."""
    flags: dist.ProcessGroup | None


def open_server_groups(sets: Sequence[Sequence[int]], group: dist.ProcessGroup) -> ServerGroups | None:
    """Return the channels of the set that this rank is in, if any. Collective: every rank names the same sets."""
    found = None
    for members in sets:
        ranks = [dist.get_global_rank(group, member) for member in members]
        scatter, back, flags = (dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None for _ in range(3))
        if group.rank() in members:
            found = ServerGroups(list(members).index(group.rank()), len(ranks), scatter, back, flags)
    return found
