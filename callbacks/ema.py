"""An exponential moving average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.duration import Duration
from trainkit.errors import UserError

from .averaged_weights import AveragedWeights

if TYPE_CHECKING:
    from trainkit.run import Run


class EMA(AveragedWeights):
    """Evaluates with `average = decay * average + (1 - decay) * weights`, taken after every step.

    Args:
        decay: How much of the average stays; with `every=n` as much is lost as in n steps.
        every: Steps from one update of the average to the next.
        start: When averaging begins, such as `"1epoch"`; `None`: with the first step.
        warm_up: Whether the decay of update n is at most (1 + n) / (10 + n), so that early weights are soon forgotten.
        leave_average: Whether the task holds the average when training has ended.

    """

    def __init__(
        self,
        *,
        decay: float = 0.999,
        every: int = 1,
        start: str | Duration | None = None,
        warm_up: bool = True,
        leave_average: bool = True,
    ) -> None:
        if not 0 < decay < 1:
            raise UserError(f"ema.decay must lie between 0 and 1, got {decay}; 0.999 remembers about 1000 steps.")
        if isinstance(every, bool) or every < 1:
            raise UserError(f"ema.every must be at least 1 step, got {every}.")
        super().__init__(leave_average=leave_average)
        self.decay = decay
        self.every = every
        self.start = None if start is None else Duration.parse(start, where="ema.start")
        if self.start is not None and self.start.unit in ("second", "minute", "hour"):
            raise UserError("ema.start is counted in steps, epochs or samples: clocks differ on ranks.")
        self.warm_up = warm_up

    def share(self, run: Run) -> float | None:
        if run.state.step % self.every or (self.start is not None and not self.start.reached(run.state)):
            return None
        decay = self.decay**self.every
        if self.warm_up:
            decay = min(decay, (1 + self._updates) / (10 + self._updates))
        return 1.0 - decay
