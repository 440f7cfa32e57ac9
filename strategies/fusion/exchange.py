"""Fusion buffers sent through gloo: shard i of each chunk goes to server i, which sums it and sends the sum back.

    server 0   [p0 p1]  --- scatter --->  p0 + p0'  --- gather --->  [s0 s1]
    server 1   [p0'p1'] ---------------   p1 + p1'  -------------    [s0 s1]

Chunks are launched in the same order on every server, at most `max_in_flight` at a time; the others wait in their
buffers, so backward never waits for a chunk. A launch announces all that the chunk will receive, before anything of it
is sent. Transfers advance only in calls to `progress`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore

from ..ddp.transport import WaitableWork, WatchedWork
from .host_copy import Event, open_host_copier
from .partition import equal_shards, split_into_chunks
from .point_to_point import MessageThread, receive_shards, send_shards
from .transport import FusionSettings, ServerGroups, ShardTransport, ShardWork, add_loss, ordered_sum

_TO_SERVER, _SUM, _WEIGHTS = range(3)  # kinds of messages
_IN_FLIGHT_OF_TWO, _IN_FLIGHT_OF_MORE = 16, 4  # chunks by default; those of several senders meet at one link
_NUM_TAGS = 2**20  # of a kind; far more than are under way at once


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
        self.max_in_flight = settings.max_in_flight or (
            _IN_FLIGHT_OF_TWO if groups.world_size <= 2 else _IN_FLIGHT_OF_MORE
        )
        self.copier, self.rank, self.world_size = open_host_copier(device), groups.rank, groups.world_size
        self.flats: list[Tensor] = []
        self.flags: list[Tensor] = []
        self.weight_sets, self.copies_back = [], {}
        self._chunks: list[list[tuple[int, int]]] = []
        self._queued: deque[ChunkTransfer] = deque()
        self._in_flight: list[ChunkTransfer] = []
        self._works: deque[TransferWork] = deque()
        self.changed: threading.Event = threading.Event()
        self.arrivals, self.returns, self.known_flags = (MessageThread(self.changed) for _ in range(3))
        self._num_chunks = self._num_weights = 0  # sent so far, the same on every rank

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
        for thread in (self.arrivals, self.returns, self.known_flags):
            thread.close()
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
        flags, flat = None, self.flats[bucket]
        error = self.add_error(bucket, flat)
        if self.world_size > 1:
            for start, stop in self._chunks[bucket]:
                of_chunk = None if error is None else error[start:stop]
                transfers.append(ChunkTransfer(self, bucket, flat[start:stop], ready, where, error=of_chunk))
            for number, transfer in enumerate(transfers, self._num_chunks):
                transfer.number = number
            self._num_chunks += len(transfers)
            if self.settings.sharded and self.flags[bucket].numel():
                all_reduce = dist.all_reduce(self.flags[bucket], group=self.groups.flags, async_op=True)
                assert all_reduce is not None
                flags = self.with_timeout(self.known_flags.watch([all_reduce]), where)
        self._queued.extend(transfers)
        work = TransferWork(self, bucket, where, transfers, flags)
        self._works.append(work)
        self.progress()
        return work

    def gather_weights(self, buffer: int, *, where: str) -> GatherWork:
        works = []
        for start, stop in self._chunks[buffer] if self.world_size > 1 else []:
            chunk = self.weight_sets[self.next_set][buffer][start:stop]
            shards = chunk.split(equal_shards(len(chunk), self.world_size))
            tag, group = tag_of(_WEIGHTS, self._num_weights), self.groups.messages
            self._num_weights += 1
            received = receive_shards(shards, group, tag)
            sent = send_shards([shards[self.rank]] * self.world_size, group, tag)
            works.append(self.with_timeout(self.returns.watch([*received, *sent]), where))
        return GatherWork(self, works, where)

    def progress(self) -> None:
        """Advance every chunk and buffer as far as possible, without waiting."""
        self.changed.clear()
        self._advance_chunks()
        for work in list(self._works):
            work.advance()
            if not work.is_summed:  # weights are sent in the order of buffers
                break
        while self._works and self._works[0].is_done():
            self._works.popleft()

    def wait_for_change(self, where: str) -> None:
        """Wait until something has ended that `progress` found under way."""
        copy = next((transfer.copy for transfer in self._in_flight if transfer.copy is not None), None)
        if copy is not None:
            copy.synchronize()
        else:  # all else are messages
            self.with_timeout(_AnyMessage(self.changed), where).wait()

    def with_timeout(self, work: WaitableWork, where: str) -> WatchedWork:
        """Return the work as one whose `wait` raises if a rank fails or the timeout passes."""
        return WatchedWork(work, where=where, failure_store=self.failure_store, timeout_seconds=self.timeout_seconds)

    def _advance_chunks(self) -> None:
        """Advance the chunks in flight, and those that the complete ones make room for."""
        while True:
            while self._queued and len(self._in_flight) < self.max_in_flight:
                self._in_flight.append(self._queued.popleft())
                self._in_flight[-1].launch()
            self._in_flight = [transfer for transfer in self._in_flight if not transfer.advance()]
            if not self._queued or len(self._in_flight) == self.max_in_flight:
                return


class _AnyMessage:
    """The next end of any messages, as a work."""

    def __init__(self, changed: threading.Event) -> None:
        self.changed = changed

    def is_completed(self) -> bool:
        return self.changed.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self.changed.wait(timeout.total_seconds()):
            raise RuntimeError("no message has ended")


def tag_of(kind: int, number: int) -> int:
    """Return the tag of the messages of one chunk."""
    return 3 * (number % _NUM_TAGS) + kind


class ChunkTransfer:
    """The transfer of one chunk to the servers and back: copy to the host, send, sum, return."""

    number: int  # of the chunk, among all that were ever sent

    def __init__(
        self, exchange: GlooExchange, buffer: int, chunk: Tensor, ready: Event, where: str, *, error: Tensor | None
    ) -> None:
        self.exchange, self.buffer, self.chunk, self.ready, self.where = exchange, buffer, chunk, ready, where
        self.error = error  # what rounding loses of the chunk on this rank, None without error feedback
        self.sizes = equal_shards(len(chunk), exchange.world_size)
        self.is_sent = self.is_summed = self.is_complete = False
        self.sent = chunk
        self.copy: Event = None  # to the host
        self._returning: list[dist.Work] = []  # sends, and receives of sums
        self._work: WatchedWork | None = None  # of the stage

    def launch(self) -> None:
        """Announce what is received, and copy the chunk to host memory in the reduce dtype if it is elsewhere."""
        exchange, chunk = self.exchange, self.chunk
        dtype = exchange.reduce_dtype_of(chunk.dtype)
        if chunk.device.type != "cpu" or dtype != chunk.dtype:
            self.sent = exchange.copier.empty(len(chunk), dtype)
            self.copy = exchange.copier.to_host(chunk, self.sent, after=self.ready)
            add_loss(self.error, chunk, self.sent)
        self._shards = self.sent.split(self.sizes)
        self.arrived = [torch.empty_like(self._shards[exchange.rank]) for _ in range(exchange.world_size - 1)]
        self.arrived.insert(exchange.rank, self._shards[exchange.rank])
        group = exchange.groups.messages
        arriving = receive_shards(self.arrived, group, tag_of(_TO_SERVER, self.number))
        self._work = exchange.with_timeout(exchange.arrivals.watch(arriving), self.where)
        if not exchange.settings.sharded:  # a sum comes from its server after the shard has arrived there
            self._returning = receive_shards(self._shards, group, tag_of(_SUM, self.number))

    def advance(self) -> bool:
        """Advance as far as possible without waiting; return True if the transfer is complete."""
        if not self.is_sent and (self.copy is None or self.copy.query()):
            self.copy, self.is_sent = None, True
            tag = tag_of(_TO_SERVER, self.number)
            self._returning += send_shards(self._shards, self.exchange.groups.messages, tag)
        if self.is_sent and not self.is_summed and self._has_ended():
            self._sum()
        if self.is_summed and not self.is_complete and self._has_ended():
            if not self.exchange.settings.sharded and self.sent is not self.chunk:
                self.exchange.copy_to_device(self.buffer, self.sent, self.chunk)
            self.is_complete = True
        return self.is_complete

    def _has_ended(self) -> bool:
        """Return True if the messages of the stage have arrived; raise if one cannot."""
        assert self._work is not None
        if not self._work.is_done():
            return False
        self._work.wait()
        return True

    def _sum(self) -> None:
        """Sum this server's shard, and return the sum to all ranks or keep it."""
        exchange, own = self.exchange, self._shards[self.exchange.rank]
        total = ordered_sum(self.arrived)
        if exchange.settings.sharded:
            self.chunk.split(self.sizes)[exchange.rank].copy_(total)
        else:
            own.copy_(total)
            first = sum(self.sizes[: exchange.rank])
            add_loss(None if self.error is None else self.error[first : first + len(own)], total, own)
            tag = tag_of(_SUM, self.number)
            self._returning += send_shards([own] * exchange.world_size, exchange.groups.messages, tag)
        self.is_summed, self.arrived = True, []
        self._work = exchange.with_timeout(exchange.returns.watch(self._returning), self.where)


class GatherWork:
    """The exchange of the next weights of one buffer."""

    def __init__(self, exchange: GlooExchange, works: list[WatchedWork], where: str) -> None:
        self.exchange, self.works, self.where = exchange, works, where
        self.finished_at: float | None = None

    def is_done(self) -> bool:
        return all(work.is_done() for work in self.works)

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
            exchange.wait_for_change(self.where)
            exchange.progress()
        exchange.order_current_stream(self.buffer)

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
            if not self.flags.is_done():
                return
            self.flags.wait()
        self.is_summed = True
        exchange = self.exchange
        if exchange.on_summed is not None:
            exchange.on_summed(self.buffer)
            self.works = exchange.gather_weights(self.buffer, where=self.where).works
