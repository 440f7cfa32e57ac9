"""Signals that stop a run: SIGINT, SIGTERM, SIGHUP and a scheduler's preemption signal; requeueing of SLURM jobs."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from trainkit.errors import UserError, nearest

logger = logging.getLogger(__name__)

ALWAYS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REGROW = signal.SIGUSR2
"""Takes all ranks again after a loss with which fewer have gone on, unless it is the preemption signal."""
# 128 plus the number, as shells report it.
EXIT_CODES = {number.name: 128 + number for number in signal.Signals}
"""Exit code of a program that a signal ended, by the signal's name."""

_REQUEUE_SECONDS = 60.0  # a controller that does not answer must not keep the process from ending
_PREEMPTION = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP", "SIGXCPU")


def preemption_signal_named(name: str | None) -> signal.Signals | None:
    """Return the preemption signal called `name`; raises UserError for a signal that cannot be one."""
    if name is None:
        return None
    if name not in _PREEMPTION:
        hint = nearest(str(name), _PREEMPTION)
        raise UserError(f"preemption_signal={name!r} is unknown.{hint} Choose one of: {', '.join(_PREEMPTION)}.")
    return signal.Signals[name]


@contextmanager
def recorded_signals(signals: Sequence[int]) -> Iterator[list[int]]:
    """Collect the signals that this process receives; without effect outside the main thread."""
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        _note_hangup(number)
        received.append(number)

    # Python refuses to set handlers in other threads.
    is_main = threading.current_thread() is threading.main_thread()
    former_handlers = {number: signal.signal(number, record) for number in _not_ignored(signals) if is_main}
    try:
        yield received
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)


class StopSignals:
    """While entered, the first signal only sets `received`; after it, SIGINT interrupts at once.

    Handlers can only be set in the main thread; in other threads nothing is received.
    """

    def __init__(self, signals: Sequence[signal.Signals] = ALWAYS) -> None:
        self.received: signal.Signals | None = None
        self._signals = sorted(set(signals))
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _not_ignored(self._signals):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        # Each is removed once it is restored, so that a second exit does nothing.
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type] # what signal.signal returned

    def _receive(self, number: int, frame: FrameType | None) -> None:
        _note_hangup(number)
        # The first counts: it decides the exit code, and whether the job is requeued.
        if self.received is None:
            self.received = signal.Signals(number)
        # A run that hangs never reaches the check between steps, and must still end by Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _not_ignored(signals: Sequence[int]) -> list[int]:
    """Return the signals without SIGHUP where this process ignores it, as one that was started by nohup."""
    return [n for n in signals if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


def _note_hangup(number: int) -> None:
    """Discard further output after a SIGHUP if its terminal is closed: a print would raise an error before the save."""
    if number != signal.SIGHUP:
        return
    for descriptor in (1, 2):
        with suppress(OSError):  # it is closed
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            # A device that is no terminal any more, not a file or pipe, into which output may still go.
            if is_device and not os.isatty(descriptor):
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)


def requeue_job() -> None:
    """Requeue this process's SLURM job; failures are only logged, since the state is saved already.

    SLURM ends the job at once, so call it last.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        logger.warning("requeue=true, but this is not a SLURM job (SLURM_JOB_ID is not set): nothing is requeued.")
        return
    logger.info("requeueing SLURM job %s", job)
    try:
        command = ["scontrol", "requeue", job]
        subprocess.run(command, capture_output=True, text=True, timeout=_REQUEUE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        logger.error("job %s was not requeued: %s. Type: scontrol requeue %s", job, reason, job)
