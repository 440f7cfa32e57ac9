"""Ranks agree to stop after the same step, without waiting for each other in every step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

INTERVAL_SECONDS = 0.1  # between two questions
MAX_INTERVAL = 256  # steps


class StopAgreement:
    """Asks all ranks now and then whether one wants to stop; the answer is read some steps later.

        step       0     1 ... n      n+1 ... 2n
        question   ask         ask            ask
        answer                 read           read      the same on every rank, since n is agreed as well

    The number of steps between questions follows the length of a step, so that asking costs next to nothing. The time
    of training goes along with the question, for durations in minutes.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        """Ask on `device`: the host, where the group can talk between hosts' memories; no step waits for a GPU then."""
        self.group, self.device = group, device
        self.seconds = 0.0
        """The longest time of any rank when it was last asked; the same on every rank."""
        self._step = 0
        self._next = 0  # step after which to read and to ask
        self._last_time = time.monotonic()
        self._interval = 1
        self._answer: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def after_step(self, requested: bool, *, seconds: float = 0.0) -> bool:
        """Return whether any rank had requested to stop when it was last asked; the same on every rank."""
        step, self._step = self._step, self._step + 1
        if step < self._next:
            return False
        stop = False
        if self._work is not None and self._answer is not None:
            self._work.wait()
            flag, interval, milliseconds = self._answer.tolist()
            stop, self._interval, self.seconds = bool(flag), interval, milliseconds / 1000
        self._ask(requested, seconds)
        self._next = step + self._interval
        return stop

    def _ask(self, requested: bool, training_seconds: float) -> None:
        now = time.monotonic()
        seconds = max(now - self._last_time, 1e-9) / self._interval  # of one step
        self._last_time = now
        wanted = min(max(int(INTERVAL_SECONDS / seconds), 1), MAX_INTERVAL, 2 * self._interval)
        self._answer = torch.tensor([int(requested), wanted, int(1000 * training_seconds)], device=self.device)
        self._work = dist.all_reduce(self._answer, dist.ReduceOp.MAX, group=self.group, async_op=True)
