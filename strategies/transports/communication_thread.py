"""A thread that moves buffers while backward runs.

    backward   |--- w3 --- b3 --- w2 --- b2 --- w1 --- b1 --| wait
                        v              v              v
    thread         [buffer 0: start, sum, complete]  [buffer 1 ...]

The transport does all its work on this thread and needs no locks. The thread sleeps while there is nothing to move. It
ends with `close`, with its first error, or with the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from trainkit.devices import enter, has_streams, on
from trainkit.distributed.failure_store import FailureStore, RankError

from .process_group import Transport, Work
from .sharded import ShardTransport, ShardWork
from .shared_memory import LONGEST_NAP_SECONDS, nap_after

MESSAGE_SECONDS = 1e-3  # between polls of messages, whose end is told
CHECK_SECONDS = 0.25  # between checks for failed ranks
JOIN_SECONDS = 10.0  # that `close` waits for the thread


class CommunicationThread(Transport):
    """Runs a transport on a separate thread."""

    def __init__(self, inner: ShardTransport, *, failure_store: FailureStore, rank: int, device: torch.device) -> None:
        self.inner, self.failure_store, self.rank, self.device = inner, failure_store, rank, device
        self.name = inner.name
        self._changed = threading.Condition()
        self._message = inner.changed if device.type == "cpu" else None  # copies from and to a device end untold
        self._queued: deque[_QueuedTransfer] = deque()
        self._started: deque[_QueuedTransfer] = deque()  # used by the thread alone
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    # ---- Called by the training thread

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        return self.inner.allocate(sizes)

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        ready = self.inner.copier.mark()  # on this thread's stream
        return self._enqueue(bucket, partial(self.inner.start, bucket, where=where, timed=timed, ready=ready), where)

    def gather_weights(self, buffer: int, *, where: str) -> Work:
        """Start to exchange all ranks' shards of the buffer's next weights. Collective."""
        return self._enqueue(buffer, partial(self.inner.gather_weights, buffer, where=where), where)

    def fail(self, message: str) -> None:
        self.inner.fail(message)

    def close(self) -> None:
        """End the thread, even if it waits, and release the transport; may be called twice."""
        thread, self._thread = self._thread, None
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)
        self.inner.close()

    def wait_for(self, transfer: _QueuedTransfer) -> None:
        """Return once a transfer is complete; raises the thread's error."""
        with self._changed:
            while not transfer.is_complete:
                self._raise_error()
                if self._is_closing:
                    raise RankError(f"the communication of rank {self.rank} was closed in {transfer.where}")
                self._changed.wait()
        self.inner.order_current_stream(transfer.buffer)

    def _enqueue(self, buffer: int, start: Callable[[], ShardWork], where: str) -> Work:
        transfer = _QueuedTransfer(self, buffer, start, where)
        with self._changed:
            self._raise_error()
            self._queued.append(transfer)
            self._changed.notify_all()
        if self._thread is None and not self._is_closing:
            self._thread = threading.Thread(target=self._run, name="fusion communication", daemon=True)
            self._thread.start()
        return transfer

    def _raise_error(self) -> None:
        """Raise the error that ended the thread, with the operation in which it occurred."""
        error = self._error
        if error is None:
            return
        operation = f", {self._started[0].where}" if self._started else ""
        raise RankError(
            f"the communication thread of rank {self.rank} ended{operation}: {type(error).__name__}: {error}"
        ) from error

    # ---- On the thread

    def _run(self) -> None:
        try:
            enter(self.device)
            # A stream of its own: a thread begins with the one on which backward runs, which would wait for copies too.
            with on(self.device, torch.Stream(self.device) if has_streams(self.device) else None):
                while self._start_queued():
                    self.inner.progress()
                    self._complete_done()
        except BaseException as error:  # any error must reach the training thread, which otherwise waits forever
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _start_queued(self) -> bool:
        """Sleep until there is work, start the queued transfers, and return False if the thread should end."""
        with self._changed:
            while not (self._queued or self._started or self._is_closing):
                self._changed.wait()
            is_waiting = not self._queued and not self._is_closing
            if is_waiting and self._message is None:
                nap = nap_after(time.monotonic() - self._started[0].started_at, longest=LONGEST_NAP_SECONDS)
                self._changed.wait(nap)  # also gives the interpreter to the training thread
        if is_waiting and self._message is not None:
            self._message.wait(MESSAGE_SECONDS)
        with self._changed:
            if self._is_closing:
                return False
            queued = list(self._queued)
            self._queued.clear()
        for transfer in queued:
            self._started.append(transfer)
            transfer.start()
        return True

    def _complete_done(self) -> None:
        done = []
        while self._started and self._started[0].is_done():
            self._started[0].complete()
            done.append(self._started.popleft())
        if done:
            with self._changed:
                for transfer in done:
                    transfer.is_complete = True
                self._changed.notify_all()
        elif self._started:
            self._started[0].check_if_due()


class _QueuedTransfer:
    """A transfer as both threads see it."""

    def __init__(self, thread: CommunicationThread, buffer: int, start: Callable[[], ShardWork], where: str) -> None:
        self.thread, self.buffer, self.where = thread, buffer, where
        self.is_complete = self._has_checked = False
        self.finished_at: float | None = None
        self._start = start
        self._work: ShardWork | None = None
        self.started_at = self._next_check = 0.0

    def wait(self) -> None:
        self.thread.wait_for(self)

    def is_done(self) -> bool:
        return self.is_complete or (self._work is not None and self._work.is_done())

    # ---- On the thread

    def start(self) -> None:
        self._work = self._start()
        self.started_at = time.monotonic()
        self._next_check = self.started_at + CHECK_SECONDS

    def complete(self) -> None:
        """Leave the result of the finished transfer in the gradients."""
        assert self._work is not None
        self._work.wait()
        self.finished_at = self._work.finished_at or time.perf_counter()
        if self._has_checked:
            self.thread.failure_store.note_waiting("")

    def check_if_due(self) -> None:
        """Check for failed ranks if the last check was `CHECK_SECONDS` ago."""
        assert self._work is not None
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            self._has_checked = True
            self._work.check_peers(waited=now - self.started_at)
