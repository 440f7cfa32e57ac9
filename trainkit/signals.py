"""Being asked to stop: by SIGINT, by SIGTERM, or by a signal that announces that the job's time is over."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from signal import Signals
from types import FrameType, TracebackType

from trainkit.errors import UserError, nearest

ALWAYS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODES = {number.name: 128 + number for number in signal.Signals}
"""What a program ends with that a signal ended."""

_PREEMPTION = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP", "SIGXCPU")


def preemption_signal_named(name: str | None) -> signal.Signals | None:
    """Return the signal that a scheduler announces the end with; raises UserError for one that cannot be."""
    if name is None:
        return None
    if name not in _PREEMPTION:
        raise UserError(
            f"preemption_signal={name!r} is unknown.{nearest(str(name), _PREEMPTION)} Choose one of: "
            f"{', '.join(_PREEMPTION)}."
        )
    return signal.Signals[name]


class StopSignals:
    """While entered, the first of the signals only sets `received`; after it, SIGINT interrupts at once.

    Handlers can only be set in the main thread; elsewhere nothing is changed and nothing received.
    """

    def __init__(self, preemption: signal.Signals | None = None) -> None:
        self.received: signal.Signals | None = None
        self._signals = tuple(dict.fromkeys((*ALWAYS, *(() if preemption is None else (preemption,)))))
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type] # what signal.signal returned

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)


_WAIT_SECONDS = 60.0

logger = logging.getLogger(__name__)


def signal_to_requeue_after(requeue: bool, preemption: Signals | None) -> str | None:
    """Return the name of the signal after which the job is queued again; raises UserError if none is chosen."""
    if not requeue:
        return None
    if preemption is None:
        raise UserError(
            "requeue=true queues the job again after a signal, and none is chosen; type "
            "trainer.preemption_signal=SIGUSR1, and #SBATCH --signal=USR1@120 in the job."
        )
    return preemption.name


def check_goes_on(requeue: bool, *, resumes_by_itself: bool) -> None:
    """Raise UserError if a job that is queued again would begin anew."""
    if requeue and not resumes_by_itself:
        raise UserError(
            "requeue=true starts the same command again, which must go on with this run then; add resume=auto."
        )


def requeue_job() -> None:
    """Ask SLURM to queue this process's job again; what goes wrong is logged, since the state is saved already.

    SLURM ends the job at once, so nothing may be left to do.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        logger.warning("requeue=true, but this is no SLURM job (SLURM_JOB_ID is not set): nothing is queued again.")
        return
    logger.info("queueing SLURM job %s again", job)
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.error("job %s was not queued again: %s. Type: scontrol requeue %s", job, error, job)
        return
    if done.returncode:
        logger.error("job %s was not queued again: %s. Type: scontrol requeue %s", job, done.stderr.strip(), job)
