"""Having SLURM start a job again that it is about to end."""

from __future__ import annotations

import logging
import os
import subprocess
from signal import Signals

from trainkit.errors import UserError

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
