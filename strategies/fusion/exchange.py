"""Fusion buffers that travel through gloo: each window's part i goes to server i, which sums it and sends the sum back.

    server 0   [p0 p1]  --- scatter --->  p0 + p0'  --- back --->  [s0 s1]
    server 1   [p0'p1'] ---------------   p1 + p1'  -----------    [s0 s1]

Windows travel in the same order on every server, at most `in_flight` at a time; the others wait in their buffers, so
that backward waits for none. Nothing moves by itself: `progress` takes every window as far as it can go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore, RankError, timed_out

from ..ddp.collective import PatientWork
from .channels import Channels
from .flights import Flight, Passage, Shares
from .part_transport import BufferSettings, Landing, PartTransport
from .parts import cut_windows, equal_parts
from .staging import Copy, Staging


class Exchange(PartTransport):
    """Sums windows of flat buffers at the servers that share `channels`; device buffers are staged in CPU memory."""

    name = "exchange"

    def __init__(
        self,
        channels: Channels,
        *,
        board: FailureStore,
        device: torch.device,
        staging: Staging,
        timeout_seconds: float,
        settings: BufferSettings,
        num_gradients: Callable[[], list[int]],
    ) -> None:
        self.channels, self.board, self.device, self.staging = channels, board, device, staging
        self.timeout_seconds, self.settings, self.num_gradients = timeout_seconds, settings, num_gradients
        self.rank, self.world_size = channels.rank, channels.world_size
        self.flats: list[Tensor] = []
        self.flags: list[Tensor] = []
        self.weight_sets = []
        self._windows: list[list[tuple[int, int]]] = []
        self._ready: dict[int, Any] = {}  # by buffer: the moment at which it was filled
        self._landed: dict[int, Copy] = {}  # by buffer: the last copy to the device
        self._queue: deque[Flight] = deque()  # windows in the order in which they travel, those under way first
        self._num_under_way = 0
        self._passages: deque[Passage] = deque()

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
            cut_windows(numel, max(1, self.settings.window_bytes // flat.dtype.itemsize))
            for numel, flat in zip(summed, flats, strict=True)
        ]

    def mark_ready(self, buffer: int) -> None:
        """Note that what is on the current stream fills the buffer."""
        self._ready[buffer] = self.staging.mark()

    def order_current_stream(self, buffer: int) -> None:
        """Let what comes on the current stream see a buffer that has landed."""
        if buffer in self._landed:
            self._landed[buffer].order_current_stream()

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Landing:
        """Start to sum the buffer number `bucket`, window by window."""
        flat, ready = self.flats[bucket], self._ready.pop(bucket, None) or self.staging.mark()
        flags = None
        flights: list[Flight] = []
        if self.world_size > 1:
            flights = [Flight(self, bucket, flat[a:b], ready, where) for a, b in self._windows[bucket]]
            if self.settings.sharded and self.flags[bucket].numel():
                work = dist.all_reduce(self.flags[bucket], group=self.channels.flags, async_op=True)
                flags = self.patient(work, where)
        self._queue.extend(flights)
        passage = Passage(self, bucket, where, flights=flights, flags=flags)
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
            sizes = equal_parts(stop - start, self.world_size)
            begin = start + sum(sizes[: self.rank])
            parts.append((begin, begin + sizes[self.rank]))
        return [(start, stop) for start, stop in parts if start < stop]

    def used(self, buffer: int) -> Tensor:
        """Return for each parameter of a summed buffer how many ranks had a gradient."""
        return self.flags[buffer]

    def share(self, buffer: int, *, where: str) -> Landing:
        """Start to send this rank's parts of the next weights to all."""
        return Shares(self, self.send_weights(buffer, where), where)

    def send_weights(self, buffer: int, where: str) -> list[PatientWork]:
        """Start to send this rank's parts of the next weights, and to receive the others'."""
        works = []
        for start, stop in self._windows[buffer] if self.world_size > 1 else []:
            whole = self.weight_sets[self.next][buffer][start:stop]
            sizes = equal_parts(len(whole), self.world_size)
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
        for flat, windows in zip(self.flats, self._windows, strict=True):
            wire = self.wire_type_of(flat.dtype).itemsize
            for start, stop in windows:
                own = equal_parts(stop - start, self.world_size)[self.rank]
                back = flat.dtype.itemsize if self.settings.sharded else wire  # weights in full, or sums
                total += (stop - start - own) * wire + own * (self.world_size - 1) * back
        return total

    def patient(self, work: dist.Work | None, where: str) -> PatientWork:
        """Return a collective whose wait looks at the failure board."""
        assert work is not None
        return PatientWork(work, where=where, board=self.board, timeout_seconds=self.timeout_seconds)

    def look_around(self, where: str, *, waited: float) -> None:
        """Raise if a rank has failed, or has been waited for too long."""
        cause = self.board.root_cause()
        if cause is not None:
            raise RankError(f"stopped while waiting in {where}, because {cause}")
        self.board.note_waiting(where)
        if waited > self.timeout_seconds:
            raise timed_out(self.board, where=where, seconds=waited)

    def wait_for_first(self) -> None:
        """Return once what is under way longest has gone one stage further."""
        if self._num_under_way:
            self._queue[0].wait_a_stage()
        elif self._passages:
            self._passages[0].wait_a_stage()

    def note_landed(self, buffer: int, copy: Copy) -> None:
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

    def _under_way(self) -> list[Flight]:
        return list(islice(self._queue, self._num_under_way))

    def _launch(self) -> None:
        while self._num_under_way < min(self.settings.in_flight, len(self._queue)):
            self._queue[self._num_under_way].launch()
            self._num_under_way += 1
        for flight in self._under_way():
            if not flight.is_sent_now():
                break
