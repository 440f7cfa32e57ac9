"""Saving again after the disk was full or away, while training goes on."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from trainkit.checkpoints.store import CheckpointError, DamagedCheckpoint
from trainkit.duration import Duration
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.run import Run

logger = logging.getLogger(__name__)


class SaveRetries:
    """Says whether a save that failed is to be tried again, and after which step.

    step      100           110           120
    save      disk full     disk full     saved: from the beginning again
    failures  1             2             0

    Args:
        limit: How many saves in a row may fail; the one after them ends the run.
        wait: How much is trained before the next try.

    """

    def __init__(self, limit: int, wait: Duration) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise UserError(f"checkpoint.retries must be a whole number, 0 or more, got {limit!r}.")
        self._limit, self._wait = limit, wait
        self._failures = 0
        self.step: int | None = None
        """After this step it is time to try again; `None` if nothing has failed."""

    def start(self) -> None:
        """Forget the failures of an earlier run."""
        self._failures, self.step = 0, None

    def succeeded(self) -> None:
        """Count from the beginning; may be called by the thread that saves."""
        self._failures, self.step = 0, None

    def failed(self, error: CheckpointError, run: Run) -> None:
        """Warn, and know when to try again, on all ranks alike; raises the error after too many. Collective."""
        self.count(error)
        self.step = run.state.step + run.strategy.comm.broadcast_object(_steps(self._wait, run))
        if run.is_main:
            self._warn(error, f"after step {self.step}")

    def failed_in_background(self, error: CheckpointError, run: Run) -> None:
        """Warn, on the ranks that know of it; raises the error if that was the last time. Not collective."""
        self.count(error)
        if run.is_main:
            self._warn(error, "when the next is due")

    def count(self, error: CheckpointError) -> None:
        """Count a failure; raises the error if it cannot be tried again."""
        self._failures += 1
        if self._failures > self._limit or isinstance(error, DamagedCheckpoint):
            raise error

    def _warn(self, error: CheckpointError, when: str) -> None:
        logger.warning(
            "%s Training goes on, and saving is tried again %s; %d failures more in a row end the run "
            "(callbacks.checkpoint.retries=%d).",
            error,
            when,
            self._limit - self._failures + 1,
            self._limit,
        )


def _steps(wait: Duration, run: Run) -> int:
    """Return about how many steps a duration has, from those that were made."""
    state = run.state
    elapsed = wait.elapsed(state)
    return max(1, math.ceil(wait.value * max(state.step, 1) / elapsed)) if elapsed > 0 else 1
