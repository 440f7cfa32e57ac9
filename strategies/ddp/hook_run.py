"""One call of a communication hook, driven to its end from the thread that trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore, RankError, timed_out

HookFuture = torch.futures.Future[Tensor]
HookSteps = Generator[Any, Any, Tensor]
CommunicationHook = Callable[[Any, Any], HookFuture | HookSteps]

SLICE_SECONDS = 0.5


class HookRun:
    """A hook that returned a future, or one that is a generator and yields what it waits for.

    A generator yields works or futures and returns the reduced tensor. It goes on only when the Reducer says so,
    in the order of buckets: so a hook may use several collectives in a row, which callbacks on futures may not,
    since they run on the backend's threads in an order that differs between ranks.
    """

    def __init__(self, returned: Any, *, where: str, board: FailureStore, timeout_seconds: float) -> None:
        self.where, self.board, self.timeout_seconds = where, board, timeout_seconds
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
            cause = self.board.root_cause()
            if cause is not None:
                raise RankError(f"stopped while waiting in {self.where}, because {cause}")
            self.board.note_waiting(self.where)
            if time.monotonic() - start > self.timeout_seconds:
                raise timed_out(self.board, where=self.where, seconds=self.timeout_seconds)


def _as_tensor(value: Any) -> Tensor:
    """Return the tensor that a hook means: some futures hold a list of one."""
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        raise RuntimeError(f"the communication hook's result is {type(value).__name__}, not a tensor")
    return value
