"""Fusion buffers in memory that the ranks of a host share; servers of different hosts exchange their sums.

    host 0   rank 0   [ shard 0 | shard 1 ]    1  server 0 sums shard 0 of its host's buffers, server 1 shard 1
             rank 1   [ shard 0 | shard 1 ]    2  servers 0 of all hosts exchange shard 0, servers 1 shard 1
    host 1   rank 2   [ shard 0 | shard 1 ]    3  and write the result into all buffers of their host
             rank 3   [ shard 0 | shard 1 ]

With one server per host its shard is the whole buffer; on a single host there is no second stage. Counters, waiting and
errors are those of `ddp`'s shared memory. With a sharded optimizer sums stay on their server, which writes the new
weights of its shard into every rank's weights instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.collectives import gather
from trainkit.distributed.failure_store import FailureStore
from trainkit.errors import UserError

from .gloo_ring import GlooExchange
from .host_copy import Event, open_host_copier
from .hosts import HostLayout, OwnGroups
from .process_group import ProcessGroupTransport
from .sharded import FusionSettings, ShardTransport, ShardWork, open_server_groups, ordered_sum
from .shared_memory import (
    CHUNK_ELEMENTS,
    LINE_BYTES,
    BucketWork,
    SharedBucket,
    SharedMemoryTransport,
    why_no_shared_memory,
)

logger = logging.getLogger(__name__)

Servers = Literal["rank", "host"]
ShardTransportName = Literal["auto", "shared_memory", "exchange"]


class SharedBuffers(SharedMemoryTransport, ShardTransport):
    """Sums buffers and gathers weights in the memory of the ranks of a host.

    Arguments that are not listed are those of GlooExchange.

    Args:
        group: The ranks of this host.
        names: Their global ranks, for messages.
        between: The exchange of this rank's shard with the same server of other hosts; `None` if there is only one
            host, or if this rank is not a server.
        num_servers: Number of servers on this host; they are its first ranks.
        device: Device of the gradients.

    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        names: Sequence[int],
        between: GlooExchange | None,
        num_servers: int,
        device: torch.device,
        failure_store: FailureStore,
        timeout_seconds: float,
        settings: FusionSettings,
        num_gradients: Callable[[], list[int]],
    ) -> None:
        super().__init__(group, failure_store=failure_store, timeout_seconds=timeout_seconds)
        self.names, self.between, self.num_servers = names, between, num_servers
        self.device, self.settings, self.num_gradients = device, settings, num_gradients
        self.copier = open_host_copier(device)
        self.weight_sets, self.copies_back = [], {}
        self._sizes: list[tuple[int, torch.dtype]] = []
        self._gradients: list[GradientBuffer] = []
        self._weights: list[list[WeightBuffer]] = []

    # ---- Memory

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        self._sizes = list(sizes)
        sent = [(numel, self.reduce_dtype_of(dtype)) for numel, dtype in sizes]
        num_sets = (1 + self.settings.second_weights) * self.settings.sharded
        self.active_set = 0
        # In one region: weights follow gradients, so the spans of a buffer are known when its weights are made.
        super().allocate([*sent, *(self._sizes * num_sets)])
        for peer, name in zip(self.peers, self.names, strict=True):
            peer.rank = name
        if self.device.type != "cpu":  # in one piece: neighbouring buffers share pages
            self.copier.pin(torch.frombuffer(self.peers[self.rank].region, dtype=torch.uint8))
        self.weight_sets = [[weights.flat for weights in of_set] for of_set in self._weights]
        if self.between is not None:  # whose buffers are this rank's shards
            self.between.bind(
                [gradients.sums for gradients in self._gradients],
                summed=[len(gradients.sums) for gradients in self._gradients],
                flags=[torch.zeros_like(gradients.flag_views[0]) for gradients in self._gradients],
                weight_sets=[[weights.own for weights in of_set] for of_set in self._weights],
            )
        return [gradients.result for gradients in self._gradients]

    def make_bucket(self, number: int, flats: list[Tensor]) -> SharedBucket:
        """Return a gradient buffer or, for numbers after all of them, a weight buffer."""
        count = len(self._sizes)
        if number < count:
            numel, dtype = self._sizes[number]
            # In place, backward writes where the others read, and nothing is copied.
            in_place = self.device.type == "cpu" and flats[self.rank].dtype == dtype
            result = flats[self.rank] if in_place else torch.zeros(numel, dtype=dtype, device=self.device)
            limit = self.num_gradients()[number] if self.settings.sharded else numel
            gradients = GradientBuffer(self, number, flats, result, span=self._span(limit, flats[0].element_size()))
            self._gradients.append(gradients)
            return gradients
        weight_set, buffer = divmod(number - count, count)
        if buffer == 0:
            self._weights.append([])
        weights = WeightBuffer(number, flats, rank=self.rank, span=self._gradients[buffer].span)
        self._weights[weight_set].append(weights)
        return weights

    def close(self) -> None:
        """Release the memory; tensors that still point to it keep it alive."""
        super().close()
        self.copier.close()
        if self.between is not None:
            self.between.close()
        self.weight_sets, self._gradients, self._weights, self.copies_back = [], [], [], {}

    def own_ranges(self, buffer: int) -> list[tuple[int, int]]:
        begin, end = self._gradients[buffer].span
        if self.between is None:
            return [(begin, end)] if begin < end else []
        return [(begin + start, begin + stop) for start, stop in self.between.own_ranges(buffer)]

    def used_flags(self, buffer: int) -> Tensor:
        return self._gradients[buffer].used_flags() if self.between is None else self.between.used_flags(buffer)

    @property
    def bytes_a_step(self) -> int:
        total = 0 if self.between is None else self.between.bytes_a_step
        for buffer, gradients in enumerate(self._gradients):
            start, stop = gradients.span
            read = gradients.flat.element_size()
            written = self._weights[0][buffer].flat.element_size() if self._weights else read
            total += (stop - start) * (self.world_size - 1) * (read + written)
        return total

    def _span(self, numel: int, element_bytes: int) -> tuple[int, int]:
        """Return (start, stop) of this rank's shard, which starts at a cache line; empty if it is not a server."""
        # Two servers that write to one cache line would take it from each other at every store.
        line = LINE_BYTES // element_bytes
        shard = -(-numel // self.num_servers // line) * line
        return min(self.rank * shard, numel), min((self.rank + 1) * shard, numel)

    # ---- Transfers

    def start(self, bucket: int, *, where: str, timed: bool = False, ready: Event = None) -> ShardWork:
        gradients = self._gradients[bucket]
        if gradients.flat is not gradients.result:
            ready = ready or self.copier.mark()
            gradients.copy = self.copier.to_host(gradients.result, gradients.flat, after=ready)
        return self._begin(gradients, where)

    def gather_weights(self, buffer: int, *, where: str) -> ShardWork:
        return self._begin(self._weights[self.next_set][buffer], where)

    def progress(self) -> None:
        """Sum, exchange and write all that can be, in the order of buffers, without waiting."""
        if self.between is not None:
            self.between.progress()
        if self.under_way:
            self._sum_filled()
            self.under_way = [bucket for bucket in self.under_way if not self._try_finish(bucket)]

    def copy_to_result(self, gradients: GradientBuffer) -> None:
        """Start to copy a buffer's sums to the gradients, if they are in other memory."""
        if gradients.flat is not gradients.result:
            begin = len(gradients.flat) - len(gradients.flag_views[0]) if self.settings.sharded else 0
            self.copy_to_device(gradients.number, gradients.flat[begin:], gradients.result[begin:])
            self.order_current_stream(gradients.number)

    def _begin(self, bucket: GradientBuffer | WeightBuffer, where: str) -> ShardWork:
        bucket.round += 1
        bucket.where, bucket.exchange, bucket.is_published, bucket.is_summed = where, None, False, False
        self.under_way.append(bucket)
        self.progress()
        return SharedBufferWork(self, bucket, where)

    def _sum_filled(self) -> None:
        """Sum the shards of buffers that the whole host has filled, in order: between hosts it must be the same."""
        for bucket in self.under_way:
            assert isinstance(bucket, (GradientBuffer, WeightBuffer))
            if not bucket.is_published and bucket.is_on_host():
                bucket.is_published = True
                self.raise_counter(2 * bucket.number, bucket.round)  # after the copy, as others read from here on
            if not bucket.is_published or not (bucket.is_summed or self.is_filled(bucket)):
                break
            if not bucket.is_summed:
                bucket.is_summed = True
                bucket.add_shard()
                bucket.exchange = self._start_exchange(bucket)

    def _start_exchange(self, bucket: GradientBuffer | WeightBuffer) -> ShardWork | None:
        """Start to exchange this rank's shard with other hosts, if there are any."""
        between = self.between
        if between is None:
            return None
        # The exchange steps the optimizer, since sums are complete only after it.
        between.on_summed, between.active_set = self.on_summed, self.active_set
        if isinstance(bucket, WeightBuffer):
            return between.gather_weights(bucket.number % len(self._sizes), where=bucket.where)
        between.flags[bucket.number].copy_(bucket.used_flags())
        return between.start(bucket.number, where=bucket.where)

    def _try_finish(self, bucket: SharedBucket) -> bool:
        """Write this rank's shard to the host's other ranks if it is ready; return True if it is written."""
        assert isinstance(bucket, (GradientBuffer, WeightBuffer))
        if not bucket.is_summed or not (bucket.exchange is None or bucket.exchange.is_done()):
            return False
        if bucket.exchange is not None:
            bucket.exchange.wait()
        if isinstance(bucket, WeightBuffer):
            bucket.write()
        elif self.settings.sharded:
            self._finish_sharded(bucket)
        elif self.between is not None:
            bucket.write()
        self.raise_summed(bucket)
        return True

    def _finish_sharded(self, gradients: GradientBuffer) -> None:
        # Before the counter is raised: a rank that sees the buffer summed reads its flags.
        if self.rank < self.num_servers:
            gradients.write_flags(self.used_flags(gradients.number), leader=self.rank == 0)
        if self.on_summed is not None:
            if self.between is None:
                self.on_summed(gradients.number)
            self._weights[self.next_set][gradients.number].write()


class InFlightBucket(SharedBucket):
    """A bucket and the state of its latest round."""

    __slots__ = ("exchange", "is_published", "is_summed", "where")

    where: str
    is_published: bool  # the other ranks know that it is filled
    is_summed: bool  # by this rank: its shard, over the ranks of this host
    exchange: ShardWork | None  # with other hosts

    def is_on_host(self) -> bool:
        """Return True if other ranks may read it."""
        return True


class GradientBuffer(InFlightBucket):
    """Gradients of which each server sums its shard."""

    __slots__ = ("copy", "flag_views", "owner", "result", "span", "sums")

    def __init__(
        self, owner: SharedBuffers, number: int, flats: list[Tensor], result: Tensor, *, span: tuple[int, int]
    ) -> None:
        self.owner, self.result, self.span = owner, result, span
        # In chunks, which stay in cache from the sum to the writes.
        shards = [flat[slice(*span)].split(CHUNK_ELEMENTS) for flat in flats]
        super().__init__(number, flats[owner.rank], [list(chunk) for chunk in zip(*shards, strict=True)])
        self.flag_views = [flat[owner.num_gradients()[number] :] for flat in flats]
        self.copy: Event = None  # to the host
        self.sums = self._memory_of_sums()

    def is_on_host(self) -> bool:
        if self.copy is not None and self.copy.query():
            self.copy = None
        return self.copy is None

    def add_shard(self) -> None:
        """Leave the sum of this rank's shard in `sums`; on a single host also in all buffers, while it is in cache."""
        writes = not self.owner.settings.sharded and self.owner.between is None
        with torch.no_grad():
            for chunk, total in zip(self.chunks, self.sums.split(CHUNK_ELEMENTS), strict=True):
                _add_up(chunk, total)
                if writes:
                    _write(total, chunk)

    def write(self) -> None:
        """Leave the sum of this rank's shard in all buffers of the host."""
        with torch.no_grad():
            for chunk, total in zip(self.chunks, self.sums.split(CHUNK_ELEMENTS), strict=True):
                _write(total, chunk)

    def used_flags(self) -> Tensor:
        """Return 1 for each parameter for which a rank of this host had a gradient, else 0.

        Correct even while another server writes its result here: that is computed from the same flags.
        """
        return torch.stack(self.flag_views).amax(0).clamp_(max=1)

    def write_flags(self, used: Tensor, *, leader: bool) -> None:
        """Overwrite this rank's flags with `used`; the leader also overwrites those of ranks that are not servers."""
        # One writer for each rank's flags, although all would write the same.
        servers = self.owner.num_servers
        for view in [self.flag_views[self.owner.rank], *(self.flag_views[servers:] if leader else [])]:
            view.copy_(used)

    def _memory_of_sums(self) -> Tensor:
        """Return host memory for the sum of this rank's shard, in at least float32."""
        shard = slice(*self.span)
        # Where the buffer is precise enough, the sum replaces this rank's gradients: no further memory is needed.
        if self.flat.element_size() >= 4:
            return self.flat[shard]
        if self.owner.settings.sharded and self.result.device.type == "cpu":
            return self.result[shard]
        return torch.zeros(self.span[1] - self.span[0], dtype=torch.float32)


class WeightBuffer(InFlightBucket):
    """Weights of which each server writes its shard to all other ranks."""

    __slots__ = ("others", "own")

    def __init__(self, number: int, flats: list[Tensor], *, rank: int, span: tuple[int, int]) -> None:
        super().__init__(number, flats[rank], [])
        self.own = flats[rank][slice(*span)]
        self.others = [flat[slice(*span)] for other, flat in enumerate(flats) if other != rank]

    def add_shard(self) -> None:
        """Weights are not summed."""

    def write(self) -> None:
        """Leave this rank's shard in the weights of all ranks of the host."""
        with torch.no_grad():
            for other in self.others:
                other.copy_(self.own)


class SharedBufferWork(BucketWork):
    """The reduction of one buffer, whose result is copied to the gradients."""

    __slots__ = ()

    def wait(self) -> None:
        super().wait()
        if isinstance(self.bucket, GradientBuffer):
            self.bucket.owner.copy_to_result(self.bucket)


def _add_up(chunk: list[Tensor], total: Tensor) -> None:
    """Leave the sum of a chunk's tensors, added in rank order, in `total`, which may be one of them."""
    first, *others = chunk
    if first.dtype.itemsize < 4:
        total.copy_(ordered_sum(chunk))
    elif others:
        for other in others[:-1]:
            first.add_(other)  # only this rank reads this shard of the first rank's buffer
        torch.add(first, others[-1], out=total)
    elif first.data_ptr() != total.data_ptr():
        total.copy_(first)


def _write(total: Tensor, chunk: list[Tensor]) -> None:
    for tensor in chunk:
        if tensor.data_ptr() != total.data_ptr():
            tensor.copy_(total)


def open_shard_transport(
    process_group: ProcessGroupTransport,
    *,
    name: ShardTransportName,
    servers: Servers,
    settings: FusionSettings,
    num_gradients: Callable[[], list[int]],
    hosts: HostLayout,
    own_groups: OwnGroups,
) -> ShardTransport:
    """Return the transport called `name` of the ranks of `process_group`; "auto": shared memory where it works.

    Collective. Raises UserError on every rank if that transport cannot work.
    """
    group, device = process_group.group, process_group.device
    exchange = partial(
        GlooExchange,
        failure_store=process_group.failure_store,
        timeout_seconds=process_group.timeout_seconds,
        settings=settings,
        num_gradients=num_gradients,
    )
    reason: str | None = "transport=exchange does not use it"
    if name != "exchange":
        local: dist.ProcessGroup | None = group
        if len(hosts.ranks) > 1:
            local = own_groups.new_of_sets(hosts.ranks, group, backend="gloo")
        assert local is not None
        reason = _why_no_shared_buffers(hosts, group, local, servers)
        if reason is None:
            num_servers = 1 if servers == "host" else hosts.fewest_ranks
            groups = open_server_groups(hosts.columns(num_servers), group, own_groups=own_groups)
            between = None
            if groups is not None and len(hosts.ranks) > 1:
                between = exchange(groups, device=torch.device("cpu"))  # whose buffers are in shared memory
            return SharedBuffers(
                local,
                names=hosts.ranks_on_host(group.rank()),
                between=between,
                num_servers=num_servers,
                device=device,
                failure_store=process_group.failure_store,
                timeout_seconds=process_group.timeout_seconds,
                settings=settings,
                num_gradients=num_gradients,
            )
        if name == "shared_memory":
            raise UserError(f"transport=shared_memory cannot work here: {reason}. Set strategy.transport=auto.")
    if servers == "host" and group.size() > 1:
        why = reason if name == "exchange" else f"it cannot work here: {reason}"
        raise UserError(f"servers=host needs shared memory on each host, but {why}. Set strategy.servers=rank.")
    # Ranks on hosts of their own have nothing to share, which is no news.
    if name == "auto" and group.rank() == 0 and group.size() > len(hosts.ranks):
        logger.info("buffers are sent through gloo instead of shared memory: %s", reason)
    groups = open_server_groups([range(group.size())], group, own_groups=own_groups)
    assert groups is not None
    return exchange(groups, device=device)


def _why_no_shared_buffers(
    hosts: HostLayout, group: dist.ProcessGroup, local: dist.ProcessGroup, servers: Servers
) -> str | None:
    """Return None if the ranks of every host can share memory, else the first reason. Collective."""
    if group.size() == 1:
        return "there is only one rank"
    if len(hosts.ranks) == group.size() and servers == "rank":
        return "every rank is on a different host"
    if servers == "rank" and not hosts.is_even:
        return "hosts have unequal numbers of ranks"
    # Over all hosts: if one host cannot share memory, all ranks use the other transport.
    reasons = gather(why_no_shared_memory(local, torch.device("cpu")), group)
    return next((reason for reason in reasons if reason is not None), None)
