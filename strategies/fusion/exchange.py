"""Fusion buffers that travel through gloo: each window's part i goes to rank i, which sums it and sends the sum back.

    rank 0   [p0 p1]  --- scatter --->  p0 + p0'  --- gather --->  [s0 s1]
    rank 1   [p0'p1'] ---------------   p1 + p1'  -------------    [s0 s1]

Windows are started in the same order on every rank. At most `in_flight` of them are under way; a rank that fills its
buffers faster waits. Scattering and gathering have a process group each: in one group the order of collectives would
depend on who is how far.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..ddp.collective import PatientWork
from ..ddp.failure import FailureBoard
from ..ddp.transport import Reduction
from .part_transport import BufferSettings, PartTransport, sum_in_order
from .parts import cut_windows, equal_parts


class Exchange(PartTransport):
    """Sums windows of flat buffers at servers that are the ranks; device buffers are staged in CPU memory."""

    name = "exchange"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        board: FailureBoard,
        device: torch.device,
        timeout_seconds: float,
        settings: BufferSettings,
        num_gradients: Callable[[], list[int]],
    ) -> None:
        """Make the groups for both directions. Collective."""
        self.board, self.device, self.timeout_seconds = board, device, timeout_seconds
        self.settings, self.num_gradients = settings, num_gradients
        self.rank, self.world_size = group.rank(), group.size()
        ranks = dist.get_process_group_ranks(group)
        self.scatter_group = _gloo_group(ranks)
        self.gather_group = _gloo_group(ranks)
        self.flats: list[Tensor] = []
        self.weights: list[Tensor] = []
        self._windows: list[list[tuple[int, int]]] = []
        self._under_way: deque[_Flight] = deque()

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return one flat tensor of zeros for each (elements, dtype)."""
        sharded = self.settings.sharded
        self.flats = [torch.zeros(numel, dtype=dtype, device=self.device) for numel, dtype in sizes]
        self.weights = [torch.zeros_like(flat) for flat in self.flats] if sharded else []
        summed = self.num_gradients() if sharded else [numel for numel, _ in sizes]
        self._windows = [
            cut_windows(numel, max(1, self.settings.window_bytes // dtype.itemsize))
            for numel, (_, dtype) in zip(summed, sizes, strict=True)
        ]
        return self.flats

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Reduction:
        """Start to sum the allocated tensor number `bucket`, window by window."""
        if self.world_size == 1:
            return _Landing(self, [], None)
        flags = None
        flat = self.flats[bucket]
        if self.settings.sharded:
            behind = flat[self.num_gradients()[bucket] :]
            if behind.numel():
                work = dist.all_reduce(behind, group=self.gather_group, async_op=True)
                flags = self._patient(work, where)
        flights = []
        for start, stop in self._windows[bucket]:
            while len(self._under_way) >= self.settings.in_flight:
                self._land_first()
            flight = _Flight(self, flat[start:stop], where)
            self._under_way.append(flight)
            flights.append(flight)
        self.progress()
        return _Landing(self, flights, flags)

    def progress(self) -> None:
        """Sum and send back, in the order of windows, what has arrived from all ranks."""
        for flight in self._under_way:
            if not flight.is_summed:
                if not flight.has_arrived():
                    break
                flight.sum_and_return()
        while self._under_way and self._under_way[0].has_come_back():
            self._land_first()

    def own_parts(self, buffer: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the gradient elements of a buffer that this rank sums."""
        parts = []
        for start, stop in self._windows[buffer]:
            sizes = equal_parts(stop - start, self.world_size)
            begin = start + sum(sizes[: self.rank])
            parts.append((begin, begin + sizes[self.rank]))
        return [(start, stop) for start, stop in parts if start < stop]

    def share(self, buffer: int, *, where: str) -> Reduction:
        """Start to send this rank's parts of the weights to all ranks."""
        works = []
        for start, stop in self._windows[buffer] if self.world_size > 1 else []:
            whole = self.weights[buffer][start:stop]
            sizes = equal_parts(len(whole), self.world_size)
            own = whole.split(sizes)[self.rank]
            work = dist.all_to_all_single(
                whole, own.repeat(self.world_size), sizes, [len(own)] * self.world_size, self.gather_group, True
            )
            works.append(self._patient(work, where))
        return _All(works)

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

    def close(self) -> None:
        """Release the tensors and groups; may be called twice."""
        self.flats, self.weights, self._windows = [], [], []
        self._under_way.clear()

    def _land_first(self) -> None:
        self._under_way[0].land()
        self._under_way.popleft()

    def _land(self, flight: _Flight) -> None:
        while flight in self._under_way:
            self._land_first()

    def _patient(self, work: dist.Work, where: str) -> PatientWork:
        return PatientWork(work, where=where, board=self.board, timeout_seconds=self.timeout_seconds)


class _Flight:
    """One window on its way to the servers and back."""

    def __init__(self, exchange: Exchange, window: Tensor, where: str) -> None:
        self.exchange, self.window, self.where = exchange, window, where
        world_size = exchange.world_size
        wire_type = exchange.wire_type_of(window.dtype)
        same = window.device.type == "cpu" and wire_type == window.dtype
        self.wire = window if same else window.to("cpu", wire_type)
        self.sizes = equal_parts(len(window), world_size)
        self.own = self.sizes[exchange.rank]
        self.arrived = torch.empty(world_size * self.own, dtype=wire_type)
        self.is_summed = False
        work = dist.all_to_all_single(
            self.arrived, self.wire, [self.own] * world_size, self.sizes, exchange.scatter_group, True
        )
        self.work: PatientWork | None = exchange._patient(work, where)

    def has_arrived(self) -> bool:
        """Whether the parts of all ranks are here."""
        return self.work is not None and bool(self.work.work.is_completed())

    def sum_and_return(self) -> None:
        """Add up what has arrived and send the sum to all, or keep it."""
        assert self.work is not None
        self.work.wait()
        self.is_summed = True
        exchange = self.exchange
        parts = list(self.arrived.split(self.own)) if self.own else [self.arrived]
        total = sum_in_order(parts)
        if exchange.settings.sharded:
            self.window.split(self.sizes)[exchange.rank].copy_(total)
            self.work = None
            return
        for part in parts:
            part.copy_(total)
        own = [self.own] * exchange.world_size
        work = dist.all_to_all_single(self.wire, self.arrived, self.sizes, own, exchange.gather_group, True)
        self.work = exchange._patient(work, self.where)

    def has_come_back(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.is_summed and (self.work is None or bool(self.work.work.is_completed()))

    def land(self) -> None:
        """Wait until the window holds the sum, or this rank's part of it."""
        if not self.is_summed:
            self.sum_and_return()
        if self.work is not None:
            self.work.wait()
            if self.wire is not self.window:
                self.window.copy_(self.wire)


class _Landing:
    """The reduction of one buffer: all its windows."""

    def __init__(self, exchange: Exchange, flights: list[_Flight], flags: PatientWork | None) -> None:
        self.exchange, self.flights, self.flags = exchange, flights, flags
        self.finished_at: float | None = None

    def wait(self) -> None:
        """Return once all windows have landed."""
        for flight in self.flights:
            self.exchange._land(flight)
        if self.flags is not None:
            self.flags.wait()
        self.finished_at = time.perf_counter()


class _All:
    """Several works as one."""

    def __init__(self, works: list[PatientWork]) -> None:
        self.works = works
        self.finished_at: float | None = None

    def wait(self) -> None:
        """Return once all are done."""
        for work in self.works:
            work.wait()


def _gloo_group(ranks: list[int]) -> dist.ProcessGroup | None:
    return dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
