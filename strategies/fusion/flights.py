"""Windows and buffers on their way between the servers of an exchange, and how far each has come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ddp.collective import PatientWork
from .part_transport import sum_in_order
from .parts import equal_parts
from .staging import Copy

if TYPE_CHECKING:
    from .exchange import Exchange


class Flight:
    """One window on its way to the servers and back."""

    def __init__(self, exchange: Exchange, buffer: int, window: Tensor, ready: Any, where: str) -> None:
        self.exchange, self.buffer, self.window, self.ready, self.where = exchange, buffer, window, ready, where
        self.sizes = equal_parts(len(window), exchange.world_size)
        self.own = self.sizes[exchange.rank]
        self.is_summed = self.is_landed = False
        self.wire = window
        self._copy: Copy | None = None  # to the host
        self._work: PatientWork | None = None

    def launch(self) -> None:
        """Start to copy the window to where it can be sent from."""
        exchange, window = self.exchange, self.window
        wire_type = exchange.wire_type_of(window.dtype)
        if window.device.type != "cpu" or wire_type != window.dtype:
            self.wire = exchange.staging.empty(len(window), wire_type)
            self._copy = exchange.staging.to_host(window, self.wire, after=self.ready)

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
        total = sum_in_order(parts)
        if exchange.settings.sharded:
            self.window.split(self.sizes)[exchange.rank].copy_(total)
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
            if self.wire is not self.window:
                self.exchange.note_landed(self.buffer, self.exchange.staging.to_device(self.wire, self.window))
        self.is_landed = True


class Passage:
    """The reduction of one buffer: all its windows, and with sharded settings what follows from their sums."""

    def __init__(
        self, exchange: Exchange, buffer: int, where: str, *, flights: list[Flight], flags: PatientWork | None
    ) -> None:
        self.exchange, self.buffer, self.where = exchange, buffer, where
        self.flights, self.flags = flights, flags
        self.shares: list[PatientWork] = []
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

    def look_around(self, *, waited: float) -> None:
        """Raise if a rank has failed, or has been waited for too long."""
        self.exchange.look_around(self.where, waited=waited)


class Shares:
    """Weights under way."""

    def __init__(self, exchange: Exchange, works: list[PatientWork], where: str) -> None:
        self.exchange, self.works, self.where = exchange, works, where
        self.finished_at: float | None = None

    def is_done(self) -> bool:
        """Whether all parts are here."""
        return all(work.work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Return once all parts are here."""
        for work in self.works:
            work.wait()

    def look_around(self, *, waited: float) -> None:
        """Raise if a rank has failed, or has been waited for too long."""
        self.exchange.look_around(self.where, waited=waited)
