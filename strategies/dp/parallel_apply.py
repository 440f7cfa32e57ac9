"""ParallelApply: one thread for each replica, or one replica after the other where results would depend on timing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.devices import current_stream, generator_state, has_streams, on
from trainkit.errors import UserError
from trainkit.rng import python_rng_state

T = TypeVar("T")
logger = logging.getLogger(__name__)

_ONLY_PARAMETERS = (
    "only change requires_grad flags of leaf variables",
    "(torch.nn.Parameter or None expected)",
    "hooks cannot be registered on non-leaf tensors",
)
"""What torch says of tensors that are not parameters."""


# The mode's module is private: torch has no public way to see every operation that runs.
class DrawDetector(TorchDispatchMode):
    """Sees whether operations draw random numbers, also where the generator's state is put back (`fork_rng`)."""

    has_drawn = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: compiled functions stay compiled. They draw by changing the generator's state."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class ParallelApply:
    """Runs one call for each device: the first in the caller's thread, the others in a thread each.

    Threads that draw from the same random generator (the CPU's, Python's, NumPy's, that of a device named twice) get
    numbers in an order that depends on timing. So the first calls of each kind run in turn, and if they draw, from any
    generator, all later ones do.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        # The caller's thread takes the first call. A pool of no threads is refused.
        self._pool = ThreadPoolExecutor(max(1, len(devices) - 1), thread_name_prefix="replica")
        # A GPU that is named once has a generator that no other replica draws from.
        self._repeated = [d for d in dict.fromkeys(devices) if d.type != "cpu" and devices.count(d) > 1]
        self._draws: dict[str, bool] = {}  # kind of call -> whether it draws random numbers

    def run(self, calls: Sequence[Callable[[], T]], *, kind: str) -> list[T]:
        """Return the results of the calls, in their order, once all have ended.

        Raises the first error in this order, with its shard and device in the message.
        """
        if len(calls) == 1:
            return [calls[0]()]
        states_before = self._generator_states()
        # Nothing is known of the first calls of a kind: at once, they could already draw in another order.
        in_turn = self._draws.get(kind, True)
        detector = DrawDetector()  # type: ignore[no-untyped-call] # torch's own
        # A dispatch mode sees only its thread, in which the first calls run. It costs a Python call for each operation.
        with nullcontext() if kind in self._draws else detector:
            futures = self._in_turn(calls) if in_turn else self._at_once(calls)
        for index, future in enumerate(futures):
            error = future.exception()
            # Others, such as SystemExit, are raised as they are by `result` below.
            if isinstance(error, Exception):
                raise _located(error, index, len(calls), self._devices[index])
        # The states show the draws of compiled code, of Python and of NumPy, and those of later calls.
        draws = detector.has_drawn or states_before != self._generator_states()
        if draws and not in_turn:
            logger.warning(
                "%s began to draw random numbers, so this step is not reproducible; from now on replicas take turns, "
                "which makes later steps reproducible. strategy=ddp gives each replica a process with its own "
                "generators.",
                kind,
            )
        # Once turns are taken they stay: a step that draws only now and then would be reproducible only in part.
        self._draws[kind] = draws or self._draws.get(kind, False)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._pool.shutdown()

    def _in_turn(self, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        futures = []
        # The last round of a step may have fewer shards than there are devices.
        for call, device in zip(calls, self._devices, strict=False):
            with on(device):
                futures.append(_run_now(call))
            if futures[-1].exception() is not None:
                break
        return futures

    def _at_once(self, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        grad_enabled = torch.is_grad_enabled()

        def on_thread(call: Callable[[], T], device: torch.device, stream: torch.Stream | None) -> T:
            # Grad mode, device and stream belong to a thread; autocast is entered by the call itself.
            with torch.set_grad_enabled(grad_enabled), on(device, stream):
                return call()

        others = []
        for call, device in zip(calls[1:], self._devices[1:], strict=False):
            # The caller's stream is where the copies to this device were started; a thread begins with the default one.
            stream = current_stream(device) if has_streams(device) else None
            others.append(self._pool.submit(on_thread, call, device, stream))
        try:
            with on(self._devices[0]):
                first = _run_now(calls[0])
        finally:
            # Also after KeyboardInterrupt: threads that go on would run the task while the caller saves or leaves it.
            wait(others)
        return [first, *others]

    def _generator_states(self) -> list[Any]:
        """Return the state of every generator that several replicas share; no device sync."""
        shared = [torch.get_rng_state(), *(generator_state(device) for device in self._repeated)]
        return [
            *(state.numpy().tobytes() for state in shared if state is not None),
            *python_rng_state(),
        ]  # bytes compare by value


def _run_now(call: Callable[[], T]) -> Future[T]:
    """Return a finished future with the call's result or error."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def _located(error: Exception, index: int, count: int, device: torch.device) -> Exception:
    """Return an error of the same type, if possible, with the shard and device in its message.

    Replica 0 is the task itself. The parameters of the others are tensors, of which less can be changed.
    """
    if index > 0 and any(text in str(error) for text in _ONLY_PARAMETERS):
        refusal = UserError(
            "strategy=dp: a step freezes, assigns or hooks a parameter, which only replica 0 can do. Do it in a "
            f"callback's on_step_end, or set strategy=ddp. Replica {index} of {count} raised: {error}"
        )
        refusal.__cause__ = error
        return refusal
    shard_and_device = f"shard {index} of {count}, on {device}"
    if error.args and isinstance(error.args[0], str):
        # The same object keeps its type, by which callers catch it, and its traceback.
        error.args = (f"{error.args[0]} [{shard_and_device}]", *error.args[1:])
        return error
    located = RuntimeError(f"{type(error).__name__}: {error} [{shard_and_device}]")
    located.__cause__ = error
    return located
