"""Signals that stop a run: SIGINT, SIGTERM and a scheduler's preemption signal; requeueing of SLURM jobs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType

from trainkit.errors import UserError, nearest

logger = logging.getLogger(__name__)

ALWAYS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODES = {number.name: 128 + number for number in signal.Signals}
"""Exit code of a program that a signal ended, by the signal's name."""

_REQUEUE_SECONDS = 60.0
_PREEMPTION = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP", "SIGXCPU")


def preemption_signal_named(name: str | None) -> signal.Signals | None:
    """Return the preemption signal called `name`; raises UserError for a signal that cannot be one."""
    if name is None:
        return None
    if name not in _PREEMPTION:
        hint = nearest(str(name), _PREEMPTION)
        raise UserError(f"preemption_signal={name!r} is unknown.{hint} Choose one of: {', '.join(_PREEMPTION)}.")
    return signal.Signals[name]


class StopSignals:
    """While entered, the first signal only sets `received`; after it, SIGINT interrupts at once.

    Handlers can only be set in the main thread; in other threads nothing is received.
    """

    def __init__(self, signals: Sequence[signal.Signals] = ALWAYS) -> None:
        self.received: signal.Signals | None = None
        self._signals = set(signals)
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type] # what signal.signal returned

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
