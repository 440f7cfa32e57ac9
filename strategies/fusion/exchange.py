"""Fusion buffers that travel through gloo: each window's part i goes to server i, which sums it and sends the sum back.

    server 0   [p0 p1]  --- scatter --->  p0 + p0'  --- back --->  [s0 s1]
    server 1   [p0'p1'] ---------------   p1 + p1'  -----------    [s0 s1]

Windows travel in the same order on every server, at most `in_flight` at a time; the others wait in their buffers, so
that backward waits for none. Nothing moves by itself: `progress` takes every window as far as it can go.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore, RankError, timed_out

from ..ddp.transport import WatchedWork
from .host_copy import HostCopier, HostCopy
from .partition import equal_shards, split_into_chunks
from .transport import FusionSettings, ServerGroups, ShardTransport, ShardWork, ordered_sum


class BufferTransfer:
    """One window on its way to the servers and back."""

    def __init__(self, exchange: GlooExchange, buffer: int, chunk: Tensor, ready: Any, where: str) -> None:
        self.exchange, self.buffer, self.chunk, self.ready, self.where = exchange, buffer, chunk, ready, where
        self.sizes = equal_shards(len(chunk), exchange.world_size)
        self.own = self.sizes[exchange.rank]
        self.is_summed = self.is_landed = False
        self.wire = chunk
        self._copy: HostCopy | None = None  # to the host
        self._work: WatchedWork | None = None

    def launch(self) -> None:
        """Start to copy the window to where it can be sent from."""
        exchange, chunk = self.exchange, self.chunk
        wire_type = exchange.wire_type_of(chunk.dtype)
        if chunk.device.type != "cpu" or wire_type != chunk.dtype:
            self.wire = exchange.staging.empty(len(chunk), wire_type)
            self._copy = exchange.staging.to_host(chunk, self.wire, after=self.ready)

    def is_sent_now(self) -> bool:
        """Send the parts to their servers if they are on the host, and return whether they are sent."""
        if self._copy is None and self._work is None and not self.is_summed:
            self._scatter()
        elif self._copy is not None and self._copy.is_done():
            self._copy = None
            self._scatter()
        return self._copy is None

    def is_summed_now(self) -> bool:
        """Sum this server's part if it has arrived from all, and return whether it is summed."""
        if not self.is_summed and self._work is not None and self._work.work.is_completed():
            self._sum_and_return()
        return self.is_summed

    def is_landed_now(self) -> bool:
        """Take what has come back, and return whether nothing is left to do."""
        if self.is_summed and not self.is_landed and (self._work is None or self._work.work.is_completed()):
            self._land()
        return self.is_landed

    def wait_a_stage(self) -> None:
        """Return once the present stage has ended."""
        if self._copy is not None:
            self._copy.wait()
        elif self._work is not None:
            self._work.wait()

    def _scatter(self) -> None:
        world_size = self.exchange.world_size
        self.arrived = torch.empty(world_size * self.own, dtype=self.wire.dtype)
        own = [self.own] * world_size
        work = dist.all_to_all_single(self.arrived, self.wire, own, self.sizes, self.exchange.channels.scatter, True)
        self._work = self.exchange.patient(work, self.where)

    def _sum_and_return(self) -> None:
        """Add up what has arrived and send the sum to all, or keep it."""
        assert self._work is not None
        self._work.wait()
        self.is_summed = True
        exchange = self.exchange
        parts = list(self.arrived.split(self.own)) if self.own else [self.arrived]
        total = ordered_sum(parts)
        if exchange.settings.sharded:
            self.chunk.split(self.sizes)[exchange.rank].copy_(total)
            self._work = None
            return
        for part in parts:
            part.copy_(total)
        own = [self.own] * exchange.world_size
        work = dist.all_to_all_single(self.wire, self.arrived, self.sizes, own, exchange.channels.back, True)
        self._work = exchange.patient(work, self.where)

    def _land(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self.wire is not self.chunk:
                self.exchange.mark_done(self.buffer, self.exchange.staging.to_device(self.wire, self.chunk))
        self.is_landed = True


class TransferWork:
    """The reduction of one buffer: all its windows, and with sharded settings what follows from their sums."""

    def __init__(
        self,
        exchange: GlooExchange,
        buffer: int,
        where: str,
        *,
        flights: list[BufferTransfer],
        flags: WatchedWork | None,
    ) -> None:
        self.exchange, self.buffer, self.where = exchange, buffer, where
        self.flights, self.flags = flights, flags
        self.shares: list[WatchedWork] = []
        self.is_summed = False
        self.finished_at: float | None = None

    def is_done(self) -> bool:
        """Whether the buffer holds the sum, or the next weights are here."""
        return self.finished_at is not None

    def advance(self) -> bool:
        """Go on as far as is possible without waiting, and return whether all is done."""
        if not self.is_summed and not self._becomes_summed():
            return False
        if not all(share.work.is_completed() for share in self.shares):
            return False
        for share in self.shares:
            share.wait()
        self.finished_at = self.finished_at or time.perf_counter()
        return True

    def _becomes_summed(self) -> bool:
        if not all(flight.is_landed for flight in self.flights):
            return False
        if self.flags is not None:
            if not self.flags.work.is_completed():
                return False
            self.flags.wait()
        self.is_summed = True
        exchange = self.exchange
        if exchange.on_summed is not None:
            exchange.on_summed(self.buffer)
            self.shares = exchange.send_weights(self.buffer, self.where)
        return True

    def wait_a_stage(self) -> None:
        """Return once the present stage has ended."""
        pending = [self.flags] if self.flags is not None and not self.is_summed else self.shares
        for work in pending:
            work.wait()

    def wait(self) -> None:
        """Return once the buffer holds the sum, or the next weights are here."""
        exchange = self.exchange
        exchange.progress()
        while not self.is_done():
            exchange.wait_for_first()
            exchange.progress()
        exchange.order_current_stream(self.buffer)

    def check_peers(self, *, waited: float) -> None:
        """Raise if a rank has failed, or has been waited for too long."""
        self.exchange.check_peers(self.where, waited=waited)


class GatherWork:
    """Weights under way."""

    def __init__(self, exchange: GlooExchange, works: list[WatchedWork], where: str) -> None:
        self.exchange, self.works, self.where = exchange, works, where
        self.finished_at: float | None = None

    def is_done(self) -> bool:
        """Whether all parts are here."""
        return all(work.work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Return once all parts are here."""
        for work in self.works:
            work.wait()

    def check_peers(self, *, waited: float) -> None:
        """Raise if a rank has failed, or has been waited for too long."""
        self.exchange.check_peers(self.where, waited=waited)


class GlooExchange(ShardTransport):
    """Sums windows of flat buffers at the servers that share `channels`; device buffers are staged in CPU memory."""

    name = "exchange"

    def __init__(
        self,
        channels: ServerGroups,
        *,
        failure_store: FailureStore,
        device: torch.device,
        staging: HostCopier,
        timeout_seconds: float,
        settings: FusionSettings,
        num_gradients: Callable[[], list[int]],
    ) -> None:
        self.channels, self.failure_store, self.device, self.staging = channels, failure_store, device, staging
        self.timeout_seconds, self.settings, self.num_gradients = timeout_seconds, settings, num_gradients
        self.rank, self.world_size = channels.rank, channels.world_size
        self.flats: list[Tensor] = []
        self.flags: list[Tensor] = []
        self.weight_sets = []
        self._windows: list[list[tuple[int, int]]] = []
        self._ready: dict[int, Any] = {}  # by buffer: the moment at which it was filled
        self._landed: dict[int, HostCopy] = {}  # by buffer: the last copy to the device
        self._queue: deque[BufferTransfer] = deque()  # windows in the order in which they travel, those under way first
        self._num_under_way = 0
        self._passages: deque[TransferWork] = deque()

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return one flat tensor of zeros for each (elements, dtype)."""
        flats = [torch.zeros(numel, dtype=dtype, device=self.device) for numel, dtype in sizes]
        sharded, settings = self.settings.sharded, self.settings
        summed = self.num_gradients() if sharded else [numel for numel, _ in sizes]
        flags = [flat[numel:] for flat, numel in zip(flats, self.num_gradients(), strict=True)]
        sets = (1 + settings.second_weights) * sharded
        self.adopt(
            flats,
            summed=summed,
            flags=flags,
            weight_sets=[[torch.zeros_like(flat) for flat in flats] for _ in range(sets)],
        )
        return flats

    def adopt(
        self,
        flats: list[Tensor],
        *,
        summed: Sequence[int],
        flags: list[Tensor],
        weight_sets: list[list[Tensor]],
    ) -> None:
        """Sum these flat tensors from now on, `summed` elements of each."""
        self.flats, self.flags, self.weight_sets, self.live = flats, flags, weight_sets, 0
        self._windows = [
            split_into_chunks(numel, max(1, self.settings.window_bytes // flat.dtype.itemsize))
            for numel, flat in zip(summed, flats, strict=True)
        ]

    def mark_ready(self, buffer: int) -> None:
        """Note that what is on the current stream fills the buffer."""
        self._ready[buffer] = self.staging.mark()

    def order_current_stream(self, buffer: int) -> None:
        """Let what comes on the current stream see a buffer that has landed."""
        if buffer in self._landed:
            self._landed[buffer].order_current_stream()

    def start(self, bucket: int, *, where: str, timed: bool = False) -> ShardWork:
        """Start to sum the buffer number `bucket`, window by window."""
        flat, ready = self.flats[bucket], self._ready.pop(bucket, None) or self.staging.mark()
        flags = None
        flights: list[BufferTransfer] = []
        if self.world_size > 1:
            flights = [BufferTransfer(self, bucket, flat[a:b], ready, where) for a, b in self._windows[bucket]]
            if self.settings.sharded and self.flags[bucket].numel():
                work = dist.all_reduce(self.flags[bucket], group=self.channels.flags, async_op=True)
                flags = self.patient(work, where)
        self._queue.extend(flights)
        passage = TransferWork(self, bucket, where, flights=flights, flags=flags)
        self._passages.append(passage)
        self.progress()
        return passage

    def progress(self) -> None:
        """Take every window as far as it can go, in their order, without waiting."""
        self._launch()
        for flight in self._under_way():
            if not flight.is_summed_now():  # sent back in another order, sums would meet the wrong windows
                break
        while self._queue and self._queue[0].is_landed_now():
            self._queue.popleft()
            self._num_under_way -= 1
        self._launch()
        for passage in list(self._passages):
            passage.advance()
            if not passage.is_summed:  # in the order of buffers, as weights are sent
                break
        while self._passages and self._passages[0].is_done():
            self._passages.popleft()

    def own_parts(self, buffer: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the gradient elements of a buffer that this rank sums."""
        parts = []
        for start, stop in self._windows[buffer]:
            sizes = equal_shards(stop - start, self.world_size)
            begin = start + sum(sizes[: self.rank])
            parts.append((begin, begin + sizes[self.rank]))
        return [(start, stop) for start, stop in parts if start < stop]

    def used(self, buffer: int) -> Tensor:
        """Return for each parameter of a summed buffer how many ranks had a gradient."""
        return self.flags[buffer]

    def share(self, buffer: int, *, where: str) -> ShardWork:
        """Start to send this rank's parts of the next weights to all."""
        return GatherWork(self, self.send_weights(buffer, where), where)

    def send_weights(self, buffer: int, where: str) -> list[WatchedWork]:
        """Start to send this rank's parts of the next weights, and to receive the others'."""
        works = []
        for start, stop in self._windows[buffer] if self.world_size > 1 else []:
            whole = self.weight_sets[self.next][buffer][start:stop]
            sizes = equal_shards(len(whole), self.world_size)
            own = whole.split(sizes)[self.rank]
            work = dist.all_to_all_single(
                whole, own.repeat(self.world_size), sizes, [len(own)] * self.world_size, self.channels.back, True
            )
            works.append(self.patient(work, where))
        return works

    @property
    def bytes_a_step(self) -> int:
        """Bytes that this rank sends in one step."""
        total = 0
        for flat, chunks in zip(self.flats, self._windows, strict=True):
            wire = self.wire_type_of(flat.dtype).itemsize
            for start, stop in chunks:
                own = equal_shards(stop - start, self.world_size)[self.rank]
                back = flat.dtype.itemsize if self.settings.sharded else wire  # weights in full, or sums
                total += (stop - start - own) * wire + own * (self.world_size - 1) * back
        return total

    def patient(self, work: dist.Work | None, where: str) -> WatchedWork:
        """Return a collective whose wait looks at the failure board."""
        assert work is not None
        return WatchedWork(work, where=where, failure_store=self.failure_store, timeout_seconds=self.timeout_seconds)

    def check_peers(self, where: str, *, waited: float) -> None:
        """Raise if a rank has failed, or has been waited for too long."""
        cause = self.failure_store.root_cause()
        if cause is not None:
            raise RankError(f"stopped while waiting in {where}, because {cause}")
        self.failure_store.note_waiting(where)
        if waited > self.timeout_seconds:
            raise timed_out(self.failure_store, where=where, seconds=waited)

    def wait_for_first(self) -> None:
        """Return once what is under way longest has gone one stage further."""
        if self._num_under_way:
            self._queue[0].wait_a_stage()
        elif self._passages:
            self._passages[0].wait_a_stage()

    def mark_done(self, buffer: int, copy: HostCopy) -> None:
        """Remember the last copy to the device."""
        self._landed[buffer] = copy

    def close(self) -> None:
        """Release the tensors; may be called twice."""
        self.flats, self.flags, self.weight_sets, self._windows = [], [], [], []
        self._queue.clear()
        self._passages.clear()
        self._ready, self._landed = {}, {}
        self._num_under_way = 0
        self.staging.close()

    def _under_way(self) -> list[BufferTransfer]:
        return list(islice(self._queue, self._num_under_way))

    def _launch(self) -> None:
        while self._num_under_way < min(self.settings.in_flight, len(self._queue)):
            self._queue[self._num_under_way].launch()
            self._num_under_way += 1
        for flight in self._under_way():
            if not flight.is_sent_now():
                break
