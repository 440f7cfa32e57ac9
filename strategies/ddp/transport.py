"""The way in which flat buckets are summed over the ranks: the interface, and the choice of one."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore, RankError, timed_out

if TYPE_CHECKING:
    from trainkit.distributed.failure_store import FailureStore


TransportName = Literal["auto", "group", "shared_memory"]

logger = logging.getLogger(__name__)


class Work(Protocol):
    """A sum over the ranks that is under way."""

    finished_at: float | None
    """When it was done, in seconds of time.perf_counter, where that is known; else None."""

    def is_done(self) -> bool:
        """Whether there is nothing to wait for any more."""

    def wait(self) -> object:
        """Return once the tensor holds the sum over all ranks; raise when a rank failed or did not come in time."""


class Transport(ABC):
    """Sums flat buckets over all ranks, asynchronously; every rank starts the same buckets in the same order."""

    name: str

    @abstractmethod
    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return a flat tensor of any content for each (elements, dtype); earlier ones stay readable. Collective."""

    def reserve(self, bucket: int) -> None:
        """Take the memory of a bucket, which is about to be filled for the first time, where it is not taken yet."""

    @abstractmethod
    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        """Start to sum the allocated tensor number `bucket`; `where` names the place in messages.

        With `timed` the reduction notes when it is done, also if nobody waits for it then.
        """

    def progress(self) -> None:
        """Do what can be done now for the reductions under way, without waiting."""

    def fail(self, message: str) -> None:
        """Let ranks that wait in this transport know at once why this one stops."""

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds; may be called twice."""


SLICE = timedelta(seconds=0.5)  # between two looks at the board


class ProcessGroupTransport(Transport):
    """One asynchronous all_reduce for each bucket."""

    name = "group"

    def __init__(
        self, group: dist.ProcessGroup, *, failure_store: FailureStore, device: torch.device, timeout_seconds: float
    ) -> None:
        self.group, self.failure_store, self.device = group, failure_store, device
        self.timeout_seconds = timeout_seconds
        self.on_stream = device.type == "cuda" and "nccl" in dist.get_backend(group)
        self.flats: list[Tensor] = []

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return one flat tensor for each (elements, dtype).

        Nothing is written yet: memory is taken as gradients move in, while those that have moved let go of theirs.
        """
        self.flats = [torch.empty(numel, dtype=dtype, device=self.device) for numel, dtype in sizes]
        return self.flats

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        """Start to sum the allocated tensor number `bucket`."""
        return self.start_tensor(self.flats[bucket], where=where, timed=timed)

    def start_tensor(self, tensor: Tensor, *, where: str, timed: bool = False) -> Work:
        """Start to sum any tensor, a sparse one included."""
        if self.group.size() == 1:
            return _Done()
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        if self.on_stream:
            return StreamWork(work)
        patient = WatchedWork(work, where=where, failure_store=self.failure_store, timeout_seconds=self.timeout_seconds)
        if timed:
            work.get_future().add_done_callback(patient.note_time)
        return patient

    def close(self) -> None:
        """Release the tensors; may be called twice."""
        self.flats = []


class WatchedWork:
    """A collective's work whose wait looks at the failure board, so that no rank waits for one that has failed."""

    def __init__(self, work: dist.Work, *, where: str, failure_store: FailureStore, timeout_seconds: float) -> None:
        self.work, self.where, self.failure_store, self.timeout_seconds = work, where, failure_store, timeout_seconds
        self.finished_at: float | None = None

    def note_time(self, _: object) -> None:
        """Note that the collective is done; called on the backend's thread."""
        self.finished_at = time.perf_counter()

    def is_done(self) -> bool:
        """Whether the collective has ended, well or not."""
        return self.work.is_completed()

    def wait(self) -> None:
        """Return once the collective is done; raise with the root cause when a rank failed or did not come."""
        start, slices = time.monotonic(), 0
        while True:
            try:
                self.work.wait(SLICE)
            except RuntimeError as error:
                slices += 1
                self._look_around(error, waited=time.monotonic() - start, slices=slices)
            else:
                if slices > 1:
                    self.failure_store.note_waiting("")
                return

    def _look_around(self, error: RuntimeError, *, waited: float, slices: int) -> None:
        cause = self.failure_store.root_cause()
        if cause is not None:
            raise RankError(f"stopped while waiting in {self.where}, because {cause}") from None
        if self.work.is_completed():  # the connection broke, or the collective ended just after the slice did
            try:
                self.work.wait(SLICE)
                return
            except RuntimeError as broken:
                error = broken
            time.sleep(SLICE.total_seconds())  # a peer that is just failing gets the time to say why
            cause = self.failure_store.root_cause() or f"a rank is gone ({str(error).splitlines()[0]})"
            raise RankError(f"stopped while waiting in {self.where}, because {cause}") from None
        if slices > 1:
            self.failure_store.note_waiting(self.where)
        if waited > self.timeout_seconds:
            raise timed_out(self.failure_store, where=self.where, seconds=waited) from None


class StreamWork:
    """A collective on a CUDA stream: waiting only orders streams, and nccl's own watchdog keeps the time."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work
        self.finished_at: float | None = None

    def is_done(self) -> bool:
        """Whether the device has done the collective."""
        return self.work.is_completed()

    def wait(self) -> None:
        """Let later kernels of the current stream run after the collective."""
        self.work.wait()


class _Done:
    finished_at: float | None = None

    def is_done(self) -> bool:
        """Return true."""
        return True

    def wait(self) -> None:
        """Return at once: a single rank's sum is its own."""


HookFuture = torch.futures.Future[Tensor]
HookSteps = Generator[Any, Any, Tensor]
CommunicationHook = Callable[[Any, Any], HookFuture | HookSteps]

SLICE_SECONDS = 0.5


class PendingHook:
    """A hook that returned a future, or one that is a generator and yields what it waits for.

    A generator yields works or futures and returns the reduced tensor. It goes on only when the Reducer says so,
    in the order of buckets: so a hook may use several collectives in a row, which callbacks on futures may not,
    since they run on the backend's threads in an order that differs between ranks.
    """

    def __init__(self, returned: Any, *, where: str, failure_store: FailureStore, timeout_seconds: float) -> None:
        self.where, self.failure_store, self.timeout_seconds = where, failure_store, timeout_seconds
        self.result: Tensor | None = None
        self.steps: HookSteps | None = None
        self.waiting: Any = None
        if isinstance(returned, Generator):
            self.steps = returned
            self._step(None)
        elif isinstance(returned, torch._C.Future):  # what works give is not yet a torch.futures.Future
            self.waiting = returned
        else:
            raise RuntimeError(
                f"the communication hook returned {type(returned).__name__}; it must return a "
                "torch.futures.Future of the reduced tensor, or be a generator that returns it."
            )

    def advance(self) -> bool:
        """Wait for what the hook waits for and let it go on; return whether it has ended."""
        if self.result is not None:
            return True
        if self.steps is None:
            self.result = _as_tensor(self._wait(self.waiting))
            return True
        return self._step(self._wait(self.waiting))

    def _step(self, value: Any) -> bool:
        assert self.steps is not None
        try:
            self.waiting = self.steps.send(value)
        except StopIteration as stop:
            self.result = _as_tensor(stop.value)
            return True
        return False

    def _wait(self, waiting: Any) -> Any:
        if isinstance(waiting, list | tuple):
            return [self._wait(item) for item in waiting]
        if not isinstance(waiting, dist.Work):
            self._wait_patiently(waiting)
            return waiting.wait()
        if not waiting.is_completed():
            self._wait_patiently(waiting.get_future())
        return waiting.wait()

    def _wait_patiently(self, future: Any) -> None:
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        start = time.monotonic()
        while not done.wait(SLICE_SECONDS):
            cause = self.failure_store.root_cause()
            if cause is not None:
                raise RankError(f"stopped while waiting in {self.where}, because {cause}")
            self.failure_store.note_waiting(self.where)
            if time.monotonic() - start > self.timeout_seconds:
                raise timed_out(self.failure_store, where=self.where, seconds=self.timeout_seconds)


def _as_tensor(value: Any) -> Tensor:
    """Return the tensor that a hook means: some futures hold a list of one."""
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        raise RuntimeError(f"the communication hook's result is {type(value).__name__}, not a tensor")
    return value
