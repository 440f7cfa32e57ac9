"""Fusion buffers sent through gloo: shard i of each chunk goes to server i, which sums it and sends the sum back.

    server 0   [p0 p1]  --- scatter --->  p0 + p0'  --- gather --->  [s0 s1]
    server 1   [p0'p1'] ---------------   p1 + p1'  -------------    [s0 s1]

Chunks are sent in the same order on every server, at most `max_in_flight` at a time; the others wait in their buffers,
so backward never waits for a chunk. Transfers advance only in calls to `progress`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore

from ..ddp.transport import WatchedWork
from .host_copy import Event, open_host_copier
from .partition import equal_shards, split_into_chunks
from .transport import FusionSettings, ServerGroups, ShardTransport, ShardWork, ordered_sum


class GlooExchange(ShardTransport):
    """Sums chunks of flat buffers on the servers in `groups`; device buffers are copied to host memory first."""

    name = "exchange"

    def __init__(
        self,
        groups: ServerGroups,
        *,
        failure_store: FailureStore,
        device: torch.device,
        timeout_seconds: float,
        settings: FusionSettings,
        num_gradients: Callable[[], list[int]],
    ) -> None:
        self.groups, self.failure_store, self.device = groups, failure_store, device
        self.timeout_seconds, self.settings, self.num_gradients = timeout_seconds, settings, num_gradients
        self.copier, self.rank, self.world_size = open_host_copier(device), groups.rank, groups.world_size
        self.flats: list[Tensor] = []
        self.flags: list[Tensor] = []
        self.weight_sets, self.copies_back = [], {}
        self._chunks: list[list[tuple[int, int]]] = []
        self._queued: deque[ChunkTransfer] = deque()
        self._in_flight: deque[ChunkTransfer] = deque()
        self._works: deque[TransferWork] = deque()

    # ---- Memory

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        flats = [torch.zeros(numel, dtype=dtype, device=self.device) for numel, dtype in sizes]
        gradients, sharded = self.num_gradients(), self.settings.sharded
        num_sets = (1 + self.settings.second_weights) * sharded
        self.bind(
            flats,
            summed=gradients if sharded else [numel for numel, _ in sizes],
            flags=[flat[numel:] for flat, numel in zip(flats, gradients, strict=True)],
            weight_sets=[[torch.zeros_like(flat) for flat in flats] for _ in range(num_sets)],
        )
        return flats

    def bind(
        self, flats: list[Tensor], *, summed: Sequence[int], flags: list[Tensor], weight_sets: list[list[Tensor]]
    ) -> None:
        """Use these flat tensors as buffers; the first `summed` elements of each are summed."""
        self.flats, self.flags, self.weight_sets, self.active_set = flats, flags, weight_sets, 0
        self._chunks = [
            split_into_chunks(numel, max(1, self.settings.chunk_bytes // flat.dtype.itemsize))
            for numel, flat in zip(summed, flats, strict=True)
        ]

    def close(self) -> None:
        self.flats, self.flags, self.weight_sets, self._chunks = [], [], [], []
        self.copies_back = {}
        self._queued.clear()
        self._in_flight.clear()
        self._works.clear()
        self.copier.close()

    def own_ranges(self, buffer: int) -> list[tuple[int, int]]:
        ranges = []
        for start, stop in self._chunks[buffer]:
            sizes = equal_shards(stop - start, self.world_size)
            begin = start + sum(sizes[: self.rank])
            ranges.append((begin, begin + sizes[self.rank]))
        return [(start, stop) for start, stop in ranges if start < stop]

    def used_flags(self, buffer: int) -> Tensor:
        return self.flags[buffer]

    @property
    def bytes_a_step(self) -> int:
        total = 0
        for flat, chunks in zip(self.flats, self._chunks, strict=True):
            sent = self.reduce_dtype_of(flat.dtype).itemsize
            returned = flat.dtype.itemsize if self.settings.sharded else sent  # weights in full, or sums
            for start, stop in chunks:
                own = equal_shards(stop - start, self.world_size)[self.rank]
                total += (stop - start - own) * sent + own * (self.world_size - 1) * returned
        return total

    # ---- Transfers

    def start(self, bucket: int, *, where: str, timed: bool = False, ready: Event = None) -> ShardWork:
        ready = ready or self.copier.mark()
        transfers: list[ChunkTransfer] = []
        flags = None
        if self.world_size > 1:
            flat, chunks = self.flats[bucket], self._chunks[bucket]
            transfers = [ChunkTransfer(self, bucket, flat[start:stop], ready, where) for start, stop in chunks]
            if self.settings.sharded and self.flags[bucket].numel():
                all_reduce = dist.all_reduce(self.flags[bucket], group=self.groups.flags, async_op=True)
                flags = self.with_timeout(all_reduce, where)
        self._queued.extend(transfers)
        work = TransferWork(self, bucket, where, transfers, flags)
        self._works.append(work)
        self.progress()
        return work

    def gather_weights(self, buffer: int, *, where: str) -> GatherWork:
        works = []
        for start, stop in self._chunks[buffer] if self.world_size > 1 else []:
            chunk = self.weight_sets[self.next_set][buffer][start:stop]
            sizes = equal_shards(len(chunk), self.world_size)
            works.append(self.gather(chunk.split(sizes)[self.rank].repeat(self.world_size), chunk, sizes, where))
        return GatherWork(self, works, where)

    def progress(self) -> None:
        """Advance every chunk and buffer as far as possible, in order, without waiting."""
        self._launch()
        for transfer in self._in_flight:
            if not transfer.try_sum():  # sums sent in another order would meet the wrong chunks
                break
        while self._in_flight and self._in_flight[0].try_complete():
            self._in_flight.popleft()
        self._launch()
        for work in list(self._works):
            work.advance()
            if not work.is_summed:  # weights are sent in the order of buffers
                break
        while self._works and self._works[0].is_done():
            self._works.popleft()

    def wait_for_oldest(self) -> None:
        """Wait for the current stage of the oldest transfer."""
        if self._in_flight:
            self._in_flight[0].wait_stage()
        elif self._works:
            self._works[0].wait_stage()

    def scatter(self, chunk: Tensor, arrived: Tensor, sizes: list[int], where: str) -> WatchedWork:
        """Start to send shard i of a chunk to server i; this server's shards of all ranks arrive in `arrived`."""
        own_sizes = [sizes[self.rank]] * self.world_size
        work = dist.all_to_all_single(arrived, chunk, own_sizes, sizes, self.groups.scatter, True)
        return self.with_timeout(work, where)

    def gather(self, shards: Tensor, chunk: Tensor, sizes: list[int], where: str) -> WatchedWork:
        """Start to send one of `shards`, copies of this server's shard, to each rank; all shards arrive in `chunk`."""
        own_sizes = [sizes[self.rank]] * self.world_size
        work = dist.all_to_all_single(chunk, shards, sizes, own_sizes, self.groups.gather, True)
        return self.with_timeout(work, where)

    def with_timeout(self, work: dist.Work | None, where: str) -> WatchedWork:
        """Return the collective as work whose `wait` raises if a rank fails or the timeout passes."""
        assert work is not None
        return WatchedWork(work, where=where, failure_store=self.failure_store, timeout_seconds=self.timeout_seconds)

    def _launch(self) -> None:
        while self._queued and len(self._in_flight) < self.settings.max_in_flight:
            self._in_flight.append(self._queued.popleft())
            self._in_flight[-1].launch()
        for transfer in self._in_flight:
            if not transfer.try_send():
                break


class ChunkTransfer:
    """The transfer of one chunk to the servers and back: copy to the host, scatter, sum, gather."""

    def __init__(self, exchange: GlooExchange, buffer: int, chunk: Tensor, ready: Event, where: str) -> None:
        self.exchange, self.buffer, self.chunk, self.ready, self.where = exchange, buffer, chunk, ready, where
        self.sizes = equal_shards(len(chunk), exchange.world_size)
        self.is_sent = self.is_summed = self.is_complete = False
        self.sent = chunk
        self._copy: Event = None  # to the host
        self._work: WatchedWork | None = None

    def launch(self) -> None:
        """Start to copy the chunk to host memory in the reduce dtype, if it is elsewhere or in another dtype."""
        copier, chunk = self.exchange.copier, self.chunk
        dtype = self.exchange.reduce_dtype_of(chunk.dtype)
        if chunk.device.type != "cpu" or dtype != chunk.dtype:
            self.sent = copier.empty(len(chunk), dtype)
            self._copy = copier.to_host(chunk, self.sent, after=self.ready)

    def try_send(self) -> bool:
        """Send the shards to their servers if they are on the host; return True if they are sent."""
        if not self.is_sent and (self._copy is None or self._copy.query()):
            exchange, self._copy, self.is_sent = self.exchange, None, True
            self.arrived = torch.empty(self.sizes[exchange.rank] * exchange.world_size, dtype=self.sent.dtype)
            self._work = exchange.scatter(self.sent, self.arrived, self.sizes, self.where)
        return self.is_sent

    def try_sum(self) -> bool:
        """Sum this server's shard if it has arrived from all ranks, and send the sum to all of them, or keep it.

        Returns True if it is summed.
        """
        if self.is_summed or self._work is None or not self._work.work.is_completed():
            return self.is_summed
        self._work.wait()
        self.is_summed = True
        exchange, own = self.exchange, self.sizes[self.exchange.rank]
        shards = list(self.arrived.split(own)) if own else [self.arrived]
        total = ordered_sum(shards)
        if exchange.settings.sharded:
            self.chunk.split(self.sizes)[exchange.rank].copy_(total)
            self._work = None
        else:
            for shard in shards:
                shard.copy_(total)
            self._work = exchange.gather(self.arrived, self.sent, self.sizes, self.where)
        return True

    def try_complete(self) -> bool:
        """Take the sums if they have come back; return True if the transfer is complete."""
        if self.is_summed and not self.is_complete and (self._work is None or self._work.work.is_completed()):
            if self._work is not None:
                self._work.wait()
                self._work = None
                if self.sent is not self.chunk:
                    self.exchange.copy_to_device(self.buffer, self.sent, self.chunk)
            self.is_complete = True
        return self.is_complete

    def wait_stage(self) -> None:
        """Wait for the copy or collective in progress."""
        if self._copy is not None:
            self._copy.synchronize()
        elif self._work is not None:
            self._work.wait()


class GatherWork:
    """The exchange of the next weights of one buffer."""

    def __init__(self, exchange: GlooExchange, works: list[WatchedWork], where: str) -> None:
        self.exchange, self.works, self.where = exchange, works, where
        self.finished_at: float | None = None

    def is_done(self) -> bool:
        return all(work.work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def check_peers(self, *, waited: float) -> None:
        exchange = self.exchange
        exchange.failure_store.check(where=self.where, waited=waited, timeout_seconds=exchange.timeout_seconds)


class TransferWork(GatherWork):
    """The reduction of one buffer: the transfers of its chunks and, with sharded settings, the gather of weights."""

    def __init__(
        self, exchange: GlooExchange, buffer: int, where: str, transfers: list[ChunkTransfer], flags: WatchedWork | None
    ) -> None:
        super().__init__(exchange, [], where)
        self.buffer, self.transfers, self.flags = buffer, transfers, flags
        self.is_summed = False

    def is_done(self) -> bool:
        return self.finished_at is not None

    def wait(self) -> None:
        exchange = self.exchange
        exchange.progress()
        while not self.is_done():
            exchange.wait_for_oldest()
            exchange.progress()
        exchange.order_current_stream(self.buffer)

    def wait_stage(self) -> None:
        """Wait for the collectives in progress."""
        if self.flags is not None and not self.is_summed:
            self.flags.wait()
        else:
            super().wait()

    def advance(self) -> None:
        """Advance as far as possible without waiting."""
        if not self.is_summed:
            self._try_sum()
        if self.is_summed and super().is_done():
            super().wait()
            self.finished_at = self.finished_at or time.perf_counter()

    def _try_sum(self) -> None:
        if not all(transfer.is_complete for transfer in self.transfers):
            return
        if self.flags is not None:
            if not self.flags.work.is_completed():
                return
            self.flags.wait()
        self.is_summed = True
        exchange = self.exchange
        if exchange.on_summed is not None:
            exchange.on_summed(self.buffer)
            self.works = exchange.gather_weights(self.buffer, where=self.where).works
