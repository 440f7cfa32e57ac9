"""A thread that moves buffers while backward goes on, whatever the thread of backward is busy with.

    backward   |--- w3 --- b3 --- w2 --- b2 --- w1 --- b1 --| wait
                        v              v              v
    thread         [buffer 0: start, sum, land]  [buffer 1 ...]

All that the transport does happens on the thread, so that it needs no locks. It sleeps while there is nothing to move,
and ends with `close`, with its first error, or with the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore, RankError

from .transport import ShardTransport, ShardWork

NAP_SECONDS = 100e-6  # between two looks at what is under way
LOOK_SECONDS = 0.25  # between two looks whether the others live
END_SECONDS = 10.0  # that closing waits for the thread


class CommunicationThread(ShardTransport):
    """A transport that lets another one work on a thread of its own."""

    def __init__(self, inner: ShardTransport, *, failure_store: FailureStore, rank: int, device: torch.device) -> None:
        self.inner, self.failure_store, self.rank, self.device = inner, failure_store, rank, device
        self.name = inner.name
        self.settings, self.num_gradients = inner.settings, inner.num_gradients
        self._changed = threading.Condition()
        self._new: deque[_QueuedTransfer] = deque()
        self._under_way: deque[_QueuedTransfer] = deque()  # of the thread alone
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    # ---- Called by the thread that trains

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return one flat tensor of zeros for each (elements, dtype). Collective."""
        flats = self.inner.allocate(sizes)
        self.weight_sets = self.inner.weight_sets
        return flats

    def start(self, bucket: int, *, where: str, timed: bool = False) -> ShardWork:
        """Hand a buffer over to the thread."""
        self.inner.mark_ready(bucket)
        self.inner.on_summed, self.inner.live = self.on_summed, self.live
        return self._enqueue(bucket, partial(self.inner.start, bucket, where=where, timed=timed), where)

    def share(self, buffer: int, *, where: str) -> ShardWork:
        """Let the thread share weights."""
        self.inner.live = self.live
        return self._enqueue(buffer, partial(self.inner.share, buffer, where=where), where)

    def own_parts(self, buffer: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the gradient elements of a buffer that this rank sums."""
        return self.inner.own_parts(buffer)

    def used(self, buffer: int) -> Tensor:
        """Return for each parameter of a summed buffer a number above 0 if any rank had a gradient."""
        return self.inner.used(buffer)

    @property
    def bytes_a_step(self) -> int:
        """Bytes that this rank moves in one step."""
        return self.inner.bytes_a_step

    def fail(self, message: str) -> None:
        """Let ranks that wait in this transport know at once why this one stops."""
        self.inner.fail(message)

    def close(self) -> None:
        """End the thread, whatever it waits for, and release what the transport holds; may be called twice."""
        thread, self._thread = self._thread, None
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(END_SECONDS)
        self.inner.close()
        self.weight_sets = []

    def _enqueue(self, buffer: int, begin: Callable[[], ShardWork], where: str) -> ShardWork:
        handed = _QueuedTransfer(self, buffer, begin, where)
        with self._changed:
            self.raise_error()
            self._new.append(handed)
            self._changed.notify_all()
        if self._thread is None and not self._is_closing:
            self._thread = threading.Thread(target=self._run, name="fusion communication", daemon=True)
            self._thread.start()
        return handed

    def wait_for(self, handed: _QueuedTransfer) -> None:
        """Return once a buffer has landed; raises the thread's error."""
        with self._changed:
            while not handed.has_landed:
                self.raise_error()
                if self._is_closing:
                    raise RankError(f"the communication of rank {self.rank} was closed in {handed.where}")
                self._changed.wait()
        self.inner.order_current_stream(handed.buffer)

    def raise_error(self) -> None:
        """Raise what has ended the thread, with the place at which it did."""
        error = self._error
        if error is None:
            return
        busy_with = f", {self._under_way[0].where}" if self._under_way else ""
        raise RankError(
            f"the communication thread of rank {self.rank} ended{busy_with}: {type(error).__name__}: {error}"
        ) from error

    # ---- On the thread

    def _run(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            while self._start_queued():
                self.inner.progress()
                self._land()
        except BaseException as error:  # whatever it is, the thread that trains must hear of it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _start_queued(self) -> bool:
        """Sleep until there is something to do, start what is new, and return whether to go on."""
        with self._changed:
            while not (self._new or self._under_way or self._is_closing):
                self._changed.wait()
            if not self._new and not self._is_closing:
                self._changed.wait(NAP_SECONDS)  # also lets the thread that trains have the interpreter
            if self._is_closing:
                return False
            new = list(self._new)
            self._new.clear()
        for handed in new:
            self._under_way.append(handed)
            handed.begin()
        return True

    def _land(self) -> None:
        landed = []
        while self._under_way and self._under_way[0].is_done():
            self._under_way[0].land()
            landed.append(self._under_way.popleft())
        if landed:
            with self._changed:
                for handed in landed:
                    handed.has_landed = True
                self._changed.notify_all()
        elif self._under_way:
            self._under_way[0].check_peers()


class _QueuedTransfer:
    """A buffer on the thread, as both threads see it."""

    def __init__(self, thread: CommunicationThread, buffer: int, start: Callable[[], ShardWork], where: str) -> None:
        self.thread, self.buffer, self.where = thread, buffer, where
        self.has_landed = False
        self.finished_at: float | None = None
        self._start = start
        self._landing: ShardWork | None = None
        self._began = self._next_look = 0.0
        self._has_looked = False

    # ---- Called by the thread that trains

    def wait(self) -> None:
        """Return once the buffer has landed."""
        self.thread.wait_for(self)

    def is_done(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.has_landed or (self._landing is not None and self._landing.is_done())

    # ---- On the thread

    def begin(self) -> None:
        """Start."""
        self._landing = self._start()
        self._began = time.monotonic()
        self._next_look = self._began + LOOK_SECONDS

    def land(self) -> None:
        """Leave the result in the gradients, now that it is there."""
        assert self._landing is not None
        self._landing.wait()
        self.finished_at = self._landing.finished_at or time.perf_counter()
        if self._has_looked:
            self.thread.failure_store.note_waiting("")

    def check_peers(self, *, waited: float | None = None) -> None:
        """Raise if a rank has failed or gone, or has been waited for too long; from time to time."""
        now = time.monotonic()
        if self._landing is not None and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._has_looked = True
            self._landing.check_peers(waited=now - self._began if waited is None else waited)
