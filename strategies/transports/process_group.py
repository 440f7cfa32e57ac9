"""Transport: sums flat buckets over the ranks; its interface, the process group's, and pending hooks."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.devices import has_streams
from trainkit.distributed.failure_store import FailureStore, stopped

TransportName = Literal["auto", "process_group", "shared_memory"]
HookFuture = torch.futures.Future[Tensor]
HookSteps = Generator[Any, Any, Tensor]
CommunicationHook = Callable[[Any, Any], HookFuture | HookSteps]

# Of a wait, between two checks of the failure store, which is a network round trip.
SLICE_SECONDS = 0.5


class Work(Protocol):
    """A sum over the ranks that is under way."""

    finished_at: float | None
    """End in seconds of time.perf_counter; `None` if it is not known."""

    def is_done(self) -> bool:
        """Return True if there is nothing left to wait for."""

    def wait(self) -> object:
        """Return once the tensor holds the sum over all ranks; raise RankError if a rank failed or timed out."""


class WaitableWork(Protocol):
    """What a WatchedWork needs of a torch.distributed.Work."""

    def is_completed(self) -> bool:
        """Return True if it has ended, successfully or not."""

    def wait(self, timeout: timedelta) -> object:
        """Return once it has ended; raise RuntimeError if it failed or the timeout passes."""


class Transport(ABC):
    """Sums flat buckets over all ranks, asynchronously; every rank starts the same buckets in the same order."""

    name: str
    sends: bool = True
    """False if gradients stay on this host."""

    @abstractmethod
    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return a flat tensor for each (elements, dtype), not initialized; earlier ones stay readable. Collective."""

    def allocate_on(self, devices: Sequence[torch.device], sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Allocate on the device of each tensor, several of this process; raises ValueError if that is impossible."""
        names = ", ".join(sorted({str(device) for device in devices}))
        raise ValueError(f"the parameters are on several devices ({names}), but transport={self.name} has one")

    def reserve(self, bucket: int) -> None:
        """Take the memory of a bucket that is about to be filled for the first time."""

    @abstractmethod
    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        """Start to sum the allocated tensor number `bucket`; `where` names the place in errors.

        With `timed` the work notes its end even if nobody is waiting for it then.
        """

    def flags_on_host(self, bucket: int) -> Tensor | None:
        """Return the summed numbers after the gradients of a bucket, if they are in host memory beside the device."""
        return None

    def progress(self) -> None:
        """Advance the sums under way as far as possible without waiting."""

    def fail(self, message: str) -> None:
        """Report to ranks that wait in this transport why this rank stops."""

    @abstractmethod
    def close(self) -> None:
        """Release the transport's resources; may be called twice."""


class ProcessGroupTransport(Transport):
    """One asynchronous all_reduce for each bucket."""

    name = "process_group"

    def __init__(
        self, group: dist.ProcessGroup, *, failure_store: FailureStore, device: torch.device, timeout_seconds: float
    ) -> None:
        self.group, self.failure_store, self.device = group, failure_store, device
        self.timeout_seconds = timeout_seconds
        # With nccl `wait` returns at once and orders streams; gloo blocks the thread, also for CUDA tensors.
        self.on_stream = has_streams(device) and dist.get_default_backend_for_device(device) in dist.get_backend(group)
        self.flats: list[Tensor] = []

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        return self.allocate_on([self.device] * len(sizes), sizes)

    def allocate_on(self, devices: Sequence[torch.device], sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        # Pages are taken as gradients move in, while moved ones free their own: there are never two full sets.
        pairs = zip(devices, sizes, strict=True)
        self.flats = [torch.empty(numel, dtype=dtype, device=device) for device, (numel, dtype) in pairs]
        return self.flats

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        return self.start_tensor(self.flats[bucket], where=where, timed=timed)

    def start_tensor(self, tensor: Tensor, *, where: str, timed: bool = False) -> Work:
        """Start to sum any tensor, sparse ones included."""
        if self.group.size() == 1:
            return StreamWork(None)
        # Callers start buckets in index order on every rank; the backend pairs collectives by order alone.
        return self.watch(dist.all_reduce(tensor, group=self.group, async_op=True), where=where, timed=timed)

    def watch(self, work: dist.Work | None, *, where: str, timed: bool = False) -> Work:
        """Return a collective of the group as a work whose wait ends if a rank fails."""
        assert work is not None  # torch returns None only on a rank outside of the group
        if self.on_stream:
            return StreamWork(work)
        watched = WatchedWork(work, where=where, failure_store=self.failure_store, timeout_seconds=self.timeout_seconds)
        if timed:  # not always: the callback takes the interpreter's lock on the backend's thread, during backward
            work.get_future().add_done_callback(watched.note_time)
        return watched

    def close(self) -> None:
        self.flats = []


class WatchedWork:
    """A collective's work whose wait checks the failure store, so that no rank waits for one that has failed."""

    def __init__(self, work: WaitableWork, *, where: str, failure_store: FailureStore, timeout_seconds: float) -> None:
        self.work, self.where, self.failure_store, self.timeout_seconds = work, where, failure_store, timeout_seconds
        self.finished_at: float | None = None

    def note_time(self, _: object) -> None:
        """Note that the collective is done; called on the backend's thread."""
        self.finished_at = time.perf_counter()

    def is_done(self) -> bool:
        """Return True if the collective has ended, successfully or not."""
        return self.work.is_completed()

    def wait(self) -> None:
        """Return once the collective is done; raise RankError with the root cause if a rank failed or timed out."""
        start, slices = time.monotonic(), 0
        while True:
            # One long wait would not see that a peer has failed: gloo only knows connections and its own timeout.
            try:
                self.work.wait(timedelta(seconds=SLICE_SECONDS))
            except RuntimeError as error:  # the slice has passed, or the collective failed: torch has one type for both
                slices += 1
                self._check(error, waited=time.monotonic() - start, slices=slices)
            else:
                if slices > 1:  # `_check` has stored that this rank waits
                    self.failure_store.note_waiting("")
                return

    def _check(self, error: RuntimeError, *, waited: float, slices: int) -> None:
        cause = self.failure_store.root_cause()
        if cause is None and self.work.is_completed():
            try:  # the connection broke, or the collective ended just after the slice did
                self.work.wait(timedelta(seconds=SLICE_SECONDS))
                return
            except RuntimeError as broken:
                error = broken
            time.sleep(SLICE_SECONDS)  # a peer that is just failing gets the time to publish why
            raise self.failure_store.broken(error, where=self.where, seconds=self.timeout_seconds) from None
        if cause is not None:
            raise stopped(self.where, cause) from None
        if slices > 1:  # the first slice is often just a slow rank
            self.failure_store.check(where=self.where, waited=waited, timeout_seconds=self.timeout_seconds)


class StreamWork:
    """A collective on a CUDA stream: waiting only orders streams, and nccl's own watchdog keeps the time.

    Without a work it is the sum of a single rank.
    """

    finished_at: float | None = None

    def __init__(self, work: dist.Work | None) -> None:
        self.work = work

    def is_done(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


class PendingHook:
    """A communication hook that returned a future, or a generator that yields works and futures.

    A generator goes on only when the Reducer advances it, in the order of buckets, and returns the reduced tensor. So
    it may use several collectives in a row. Callbacks on futures may not: they run on the backend's threads, in an
    order that differs between ranks.
    """

    def __init__(self, returned: Any, *, where: str, failure_store: FailureStore, timeout_seconds: float) -> None:
        self.where, self.failure_store, self.timeout_seconds = where, failure_store, timeout_seconds
        self.result: Tensor | None = None
        self.steps: HookSteps | None = None
        self.waiting: Any = None
        if isinstance(returned, Generator):
            self.steps = returned
            self._step(None)
        elif isinstance(returned, torch._C.Future):  # private: the futures of works are not torch.futures.Future
            self.waiting = returned
        else:
            raise RuntimeError(
                f"the communication hook returned {type(returned).__name__}; it must return a "
                "torch.futures.Future of the reduced tensor, or be a generator that returns it."
            )

    def advance(self) -> bool:
        """Wait for what the hook waits for, and resume it; return True if it has ended."""
        if self.result is None:
            self._step(self._wait(self.waiting))
        return self.result is not None

    def _step(self, value: Any) -> None:
        if self.steps is None:
            self.result = _as_tensor(value)
            return
        try:
            self.waiting = self.steps.send(value)
        except StopIteration as stop:
            self.result = _as_tensor(stop.value)

    def _wait(self, waiting: Any) -> Any:
        if isinstance(waiting, list | tuple):
            return [self._wait(item) for item in waiting]
        if not isinstance(waiting, dist.Work):
            self._wait_for_future(waiting)
        elif not waiting.is_completed():
            self._wait_for_future(waiting.get_future())
        # It has ended: this raises its error, returns its value, and on CUDA orders the current stream after it.
        return waiting.wait()

    def _wait_for_future(self, future: Any) -> None:
        # A future's own wait has no time limit, so it would not notice that another rank has failed.
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        start = time.monotonic()
        while not done.wait(SLICE_SECONDS):
            waited = time.monotonic() - start
            self.failure_store.check(where=self.where, waited=waited, timeout_seconds=self.timeout_seconds)


def dtype_sent(dtype: torch.dtype, chosen: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are sent: `chosen` if that is narrower, their own if complex."""
    # bf16 and fp16 are never sent as each other: one lacks the range, the other the precision.
    if chosen is None or not dtype.is_floating_point or dtype.itemsize <= chosen.itemsize:
        return dtype
    return chosen


def _as_tensor(value: Any) -> Tensor:
    """Return the tensor of a hook's result; some futures hold a list of one."""
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        raise RuntimeError(f"the communication hook's result is {type(value).__name__}, not a tensor")
    return value
