"""Fusion buffers in memory that the ranks of a host share; servers of different hosts exchange their sums.

A server is a rank that sums a shard: every rank of a host, or its first one, whose shard is then the whole buffer.
Counters, waiting, errors and the phases of a round are those of `shared_memory`. With a sharded optimizer sums stay on
their server, which writes the new weights of its shard into every rank's weights instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore
from trainkit.errors import UserError

from .gloo_ring import GlooExchange
from .host_copy import Event, open_host_copier
from .hosts import HostLayout, OwnGroups
from .process_group import ProcessGroupTransport
from .selection import open_host_group
from .sharded import FusionSettings, ShardTransport, ShardWork, open_server_groups, ordered_sum
from .shared_memory import (
    BucketWork,
    HostBucket,
    HostTransport,
    SharedBucket,
    chunks_of,
    span_of,
    write_to_all,
)

logger = logging.getLogger(__name__)

Servers = Literal["rank", "host"]
ShardTransportName = Literal["auto", "shared_memory", "exchange"]


class SharedBuffers(HostTransport, ShardTransport):
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
        super().__init__(group, failure_store=failure_store, timeout_seconds=timeout_seconds, names=names)
        self.between, self.num_servers = between, num_servers
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
        if self.device.type != "cpu":  # in one piece: neighbouring buffers share pages
            self.copier.pin(torch.frombuffer(self.peers[self.rank].region, dtype=torch.uint8))
        self.weight_sets = [[weights.flat for weights in of_set] for of_set in self._weights]
        if self.between is not None:  # whose buffers are this rank's shards
            self.between.bind(
                [gradients.sums for gradients in self._gradients],
                summed=[len(gradients.sums) for gradients in self._gradients],
                flags=[torch.zeros_like(gradients.flag_views[0]) for gradients in self._gradients],
                weight_sets=[[weights.sums for weights in of_set] for of_set in self._weights],
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
            span = span_of(limit, self.rank, self.num_servers, element_bytes=flats[0].element_size())
            gradients = GradientBuffer(self, number, flats, result, span=span)
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

    def flags_on_host(self, bucket: int) -> Tensor:
        # Those of this rank alone: another one may be in the next step, and have written its flags of that.
        return self._gradients[bucket].flag_views[self.rank]

    @property
    def bytes_a_step(self) -> int:
        total = 0 if self.between is None else self.between.bytes_a_step
        for buffer, gradients in enumerate(self._gradients):
            start, stop = gradients.span
            read = gradients.flat.element_size()
            written = self._weights[0][buffer].flat.element_size() if self._weights else read
            total += (stop - start) * (self.world_size - 1) * (read + written)
        return total

    # ---- Transfers

    def start(self, bucket: int, *, where: str, timed: bool = False, ready: Event = None) -> ShardWork:
        gradients = self._gradients[bucket]
        if gradients.flat is not gradients.result:
            ready = ready or self.copier.mark()
            gradients.copy = self.copier.to_host(gradients.result, gradients.flat, after=ready)
        return self._begin(gradients, where)

    def gather_weights(self, buffer: int, *, where: str) -> ShardWork:
        return self._begin(self._weights[self.next_set][buffer], where)

    def _begin(self, bucket: HostBucket, where: str) -> ShardWork:
        self.begin(bucket, where)
        return SharedBufferWork(self, bucket, where)

    def progress(self) -> None:
        if self.between is not None:
            self.between.progress()
        super().progress()

    def copy_to_result(self, gradients: GradientBuffer) -> None:
        """Start to copy a buffer's sums to the gradients, if they are in other memory."""
        if gradients.flat is not gradients.result:
            begin = len(gradients.flat) - len(gradients.flag_views[0]) if self.settings.sharded else 0
            self.copy_to_device(gradients.number, gradients.flat[begin:], gradients.result[begin:])
            self.order_current_stream(gradients.number)

    def exchange(self, bucket: HostBucket) -> ShardWork | None:
        between = self.between
        if between is None:
            return None
        # The exchange steps the optimizer, since sums are complete only after it.
        between.on_summed, between.active_set = self.on_summed, self.active_set
        if not isinstance(bucket, GradientBuffer):
            return between.gather_weights(bucket.number % len(self._sizes), where=bucket.where)
        between.flags[bucket.number].copy_(bucket.used_flags())
        return between.start(bucket.number, where=bucket.where)

    def finish(self, bucket: HostBucket) -> None:
        if isinstance(bucket, GradientBuffer) and self.settings.sharded:
            self._finish_sharded(bucket)
        elif isinstance(bucket, WeightBuffer) or self.between is not None:  # else it is written while it is summed
            bucket.write()

    def _finish_sharded(self, gradients: GradientBuffer) -> None:
        # Before the counter is raised: a rank that sees the buffer summed reads its flags.
        if self.rank < self.num_servers:
            gradients.write_flags(self.used_flags(gradients.number), leader=self.rank == 0)
        if self.on_summed is not None:
            if self.between is None:
                self.on_summed(gradients.number)
            self._weights[self.next_set][gradients.number].write()


class GradientBuffer(HostBucket):
    """Gradients of which each server sums its shard."""

    __slots__ = ("copy", "flag_views", "owner", "result", "span")

    def __init__(
        self, owner: SharedBuffers, number: int, flats: list[Tensor], result: Tensor, *, span: tuple[int, int]
    ) -> None:
        self.owner, self.result, self.span = owner, result, span
        flat = flats[owner.rank]
        super().__init__(number, flat, chunks_of(flats, span), self._memory_of_sums(flat))
        self.flag_views = [flat[owner.num_gradients()[number] :] for flat in flats]
        self.copy: Event = None  # to the host

    def is_on_host(self) -> bool:
        if self.copy is not None and self.copy.query():
            self.copy = None
        return self.copy is None

    def add_shard(self) -> None:
        """Leave the sum of this rank's shard in `sums`; on a single host also in all buffers, while it is in cache."""
        writes = not self.owner.settings.sharded and self.owner.between is None
        with torch.no_grad():
            for chunk, total in zip(self.chunks, self.totals, strict=True):
                _add_up(chunk, total)
                if writes:
                    write_to_all(total, chunk)

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

    def _memory_of_sums(self, flat: Tensor) -> Tensor:
        """Return host memory for the sum of this rank's shard, in at least float32."""
        shard = slice(*self.span)
        # Where the buffer is precise enough, the sum replaces this rank's gradients: no further memory is needed.
        if flat.element_size() >= 4:
            return flat[shard]
        if self.owner.settings.sharded and self.result.device.type == "cpu":
            return self.result[shard]
        return torch.zeros(self.span[1] - self.span[0], dtype=torch.float32)


class WeightBuffer(HostBucket):
    """Weights of which each server writes its shard to all other ranks."""

    __slots__ = ()

    def __init__(self, number: int, flats: list[Tensor], *, rank: int, span: tuple[int, int]) -> None:
        shards = [flat[slice(*span)] for flat in flats]
        super().__init__(number, flats[rank], [shards], shards[rank])

    def add_shard(self) -> None:
        """Weights are not summed."""


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
        inside, reason = group, "there is only one rank"
        if group.size() > 1:
            # In host memory on any device. With one server on each host these may have unequal numbers of ranks.
            inside, reason = open_host_group(
                hosts, group, device=torch.device("cpu"), even=servers == "rank", own_groups=own_groups
            )
        if reason is None:
            num_servers = 1 if servers == "host" else hosts.fewest_ranks
            groups = open_server_groups(hosts.columns(num_servers), group, own_groups=own_groups)
            between = None
            if groups is not None and len(hosts.ranks) > 1:
                between = exchange(groups, device=torch.device("cpu"))  # whose buffers are in shared memory
            return SharedBuffers(
                inside,
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
