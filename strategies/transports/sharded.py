"""ShardTransport: the interface for summing fusion buffers by shards and gathering sharded weights."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .host_copy import Event, HostCopier
from .hosts import OwnGroups
from .process_group import Transport, Work, dtype_sent


@dataclass(frozen=True)
class FusionSettings:
    """Settings of the reduction of fusion buffers."""

    message_bytes: int
    """Most bytes of a chunk for each server."""
    max_in_flight: int
    """Chunks of an exchange that are in flight at once; bounds the memory of their copies."""
    reduce_dtype: torch.dtype | None
    """Dtype in which gradients and sums are sent; they are added in float32. `None`: the gradients' own dtype."""
    sharded: bool
    """If true, a shard's sum stays on its server, which then updates that shard of the weights."""
    second_weights: bool = False
    """With `sharded`: gather new weights beside those that backward still reads."""


class ShardWork(Work, Protocol):
    """A reduction whose other ranks can be checked."""

    def check_peers(self, *, waited: float) -> None:
        """Raise if a rank has failed or exited, or if `waited` seconds exceed the timeout."""


class ShardTransport(Transport):
    """A transport in which every server sums its shard of every buffer."""

    settings: FusionSettings
    copier: HostCopier
    """Copies gradients to and from host memory."""
    copies_back: dict[int, torch.Event]
    """By buffer: the end of the copy of its result to the device, if that is asynchronous."""
    weight_sets: list[list[Tensor]]
    """With sharded settings: the flat weights of each buffer's parameters, once or (`second_weights`) twice."""
    changed: threading.Event | None = None
    """Set when messages have ended; `None` if changes are not only those of messages."""
    active_set: int = 0
    """Index of the weight set that the parameters are in; gathered weights arrive in `next_set`."""
    num_gradients: Callable[[], list[int]]
    """Gradient elements of each buffer; they are followed by flags, which every rank must know."""
    on_summed: Callable[[int], None] | None = None
    """With sharded settings: called with a buffer's index once its flags are known and this rank's shards of it are
    summed; afterwards its shards of the weights are gathered before the reduction ends. The same on every rank."""

    @abstractmethod
    def start(self, bucket: int, *, where: str, timed: bool = False, ready: Event = None) -> ShardWork:
        """Start to sum the allocated tensor with index `bucket`; `where` names the operation in messages.

        `ready` is the end of the work that fills it; `None`: of the work on the current stream.
        """

    @abstractmethod
    def own_ranges(self, buffer: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the gradient elements of a buffer that this rank sums."""

    @abstractmethod
    def used_flags(self, buffer: int) -> Tensor:
        """Return one number for each parameter of a summed buffer, above 0 if any rank had a gradient."""

    @abstractmethod
    def gather_weights(self, buffer: int, *, where: str) -> ShardWork:
        """Start to exchange all ranks' shards of the buffer's next weights. Collective."""

    @property
    @abstractmethod
    def bytes_a_step(self) -> int:
        """Bytes that this rank moves to or from other ranks for the gradients and weights of one step."""

    @property
    def next_set(self) -> int:
        """Index of the weight set that receives gathered weights."""
        # With one set this is the active one; `max`, as settings that are not sharded have none.
        return (self.active_set + 1) % max(1, len(self.weight_sets))

    def copy_to_device(self, buffer: int, source: Tensor, target: Tensor) -> None:
        """Start to copy the result of a buffer, or a part of it, to the device."""
        copied = self.copier.to_device(source, target)
        if copied is not None:
            self.copies_back[buffer] = copied

    def order_current_stream(self, buffer: int) -> None:
        """Order later work on the current stream after the result of a completed buffer."""
        if buffer in self.copies_back:
            # The stream waits, not the host. That of the calling thread: each thread has a current stream.
            self.copies_back[buffer].wait()

    def reduce_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` are sent."""
        return dtype_sent(dtype, self.settings.reduce_dtype)


@dataclass(frozen=True)
class ServerGroups:
    """Process groups of the same ranks, one for each purpose."""

    rank: int
    """This rank's index in the groups."""
    world_size: int
    messages: dist.ProcessGroup | None
    """Sends gradients, sums and weights round the ring of servers; tags tell them apart."""
    flags: dist.ProcessGroup | None


def open_server_groups(
    sets: Sequence[Sequence[int]], group: dist.ProcessGroup, *, own_groups: OwnGroups
) -> ServerGroups | None:
    """Return the groups of the set that this rank is in, if any. Collective: every rank passes the same sets."""
    # A set of one rank has nobody to send to. The condition is the same on all ranks, as making groups is collective.
    several = [members for members in sets if len(members) > 1]
    messages, flags = (own_groups.new_of_sets(several, group, backend="gloo") for _ in range(2))
    for members in sets:
        if group.rank() in members:
            return ServerGroups(list(members).index(group.rank()), len(members), messages, flags)
    return None


def ordered_sum(shards: list[Tensor]) -> Tensor:
    """Return the sum of all ranks' shards, added in rank order, in at least float32."""
    # A copy in any case: the first shard may be in the memory of another rank, which others read.
    first, *others = shards
    total = first.to(torch.float32, copy=True) if first.dtype.itemsize < 4 else first.clone()
    for other in others:
        total.add_(other)
    return total
