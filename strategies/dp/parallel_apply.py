"""One thread for each replica, or one after the other where that is needed for the same result in every run."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ParallelApply:
    """Runs one call for each device: the first in the caller's thread, the others in threads of their own.

    Threads that draw from one random generator (the CPU's, python's, numpy's, that of a device named twice) get
    numbers by chance. So the first calls of each kind take turns, and if they draw, the later ones do so, too.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._pool = ThreadPoolExecutor(max(1, len(devices) - 1), thread_name_prefix="replica")
        self._repeated = sorted({str(d) for d in devices if d.type == "cuda" and devices.count(d) > 1})
        self._take_turns: dict[str, bool] = {}  # kind of call -> whether it draws

    def run(self, calls: Sequence[Callable[[], T]], *, kind: str) -> list[T]:
        """Return what the calls returned, in their order, once all have ended.

        Raises the first error in this order, which then names its shard and device.
        """
        if len(calls) == 1:
            return [calls[0]()]
        before = self._generators()
        take_turns = self._take_turns.get(kind, True)
        outcomes = self._in_turn(calls) if take_turns else self._at_once(calls)
        for index, outcome in enumerate(outcomes):
            if outcome.error is not None:
                raise _located(outcome.error, index, len(calls), self._devices[index])
        draws = not _same(before, self._generators())
        if draws and not take_turns:
            logger.warning(
                "%s began to draw random numbers: this step cannot be repeated to the bit; from now on replicas take "
                "turns, so that later ones can. strategy=ddp gives each replica a process with its own generators.",
                kind,
            )
        self._take_turns[kind] = draws or self._take_turns.get(kind, False)
        return [outcome.result() for outcome in outcomes]

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._pool.shutdown()

    def _in_turn(self, calls: Sequence[Callable[[], T]]) -> list[_Outcome[T]]:
        outcomes = []
        for call, device in zip(calls, self._devices, strict=False):
            with _on(device, None):
                outcomes.append(_attempt(call))
            if outcomes[-1].error is not None:
                break
        return outcomes

    def _at_once(self, calls: Sequence[Callable[[], T]]) -> list[_Outcome[T]]:
        gradients = torch.is_grad_enabled()

        def on_thread(call: Callable[[], T], device: torch.device, stream: torch.cuda.Stream | None) -> _Outcome[T]:
            # Grad mode, device and stream belong to a thread; autocast is entered by the call itself.
            with torch.set_grad_enabled(gradients), _on(device, stream):
                return _attempt(call)

        others = []
        for call, device in zip(calls[1:], self._devices[1:], strict=False):
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            others.append(self._pool.submit(on_thread, call, device, stream))
        try:
            with _on(self._devices[0], None):
                first = _attempt(calls[0])
        finally:
            outcomes = [other.result() for other in others]
        return [first, *outcomes]

    def _generators(self) -> list[Any]:
        """Return the state of every generator that several replicas share; waits for no device."""
        import numpy as np

        shared = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._repeated)]
        numpy_state = np.random.get_state(legacy=False)
        assert isinstance(numpy_state, dict)
        internal = numpy_state["state"]
        return [*shared, random.getstate(), internal["pos"], internal["key"].tobytes()]


class _Outcome(Generic[T]):
    """What a call returned or raised."""

    def __init__(self, value: T | None = None, error: Exception | None = None) -> None:
        self.value = value
        self.error = error

    def result(self) -> T:
        return self.value  # type: ignore[return-value] # there is no error, so the call returned


def _attempt(call: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(call())
    except Exception as error:
        return _Outcome(error=error)


def _on(device: torch.device, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device) if stream is None else torch.cuda.stream(stream)


def _same(before: list[Any], after: list[Any]) -> bool:
    pairs = zip(before, after, strict=True)
    return all(torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new for old, new in pairs)


def _located(error: Exception, index: int, count: int, device: torch.device) -> Exception:
    """Return the same error with its place in the message, so that whoever catches its type still does."""
    place = f"shard {index} of {count}, on {device}"
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} [{place}]", *error.args[1:])
        return error
    located = RuntimeError(f"{type(error).__name__}: {error} [{place}]")
    located.__cause__ = error
    return located
