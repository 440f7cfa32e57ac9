"""Stochastic weight averaging: the mean of the weights of the last part of training."""

from __future__ import annotations

from trainkit.duration import Duration, Interval
from trainkit.errors import UserError
from trainkit.run import Run
from trainkit.settings import check_arguments

from .ema import WeightAveraging


class SWA(WeightAveraging):
    """Evaluates with the equal mean of the weights at regular points of the last part of training.

    Use it with a learning rate that stays high in that part: constant, or cyclic with cycles that end at these points.
    Batch-norm statistics are the mean of those at the same points.

    Args:
        start: Start of averaging: a fraction of the run (0.75), or a duration.
        every: Interval between the points.
        load_average_at_end: Load the average into the task when training ends.

    """

    def __init__(
        self,
        *,
        start: float | str | Duration = 0.75,
        every: str | Duration = "1epoch",
        load_average_at_end: bool = True,
    ) -> None:
        check_arguments(SWA.__init__, locals(), of="swa")
        if isinstance(start, (int, float)) and not 0 <= start < 1:
            raise UserError(f"swa.start must be a fraction of the run, from 0 to below 1, or a duration; got {start}.")
        super().__init__(load_average_at_end=load_average_at_end)
        self.start = start if isinstance(start, (int, float)) else Duration.parse(start, where="swa.start")
        self.every = Duration.parse(every, where="swa.every")
        if self.every.is_time or (isinstance(self.start, Duration) and self.start.is_time):
            raise UserError("swa.start and swa.every must be in steps, epochs or samples: clocks differ on ranks.")
        self._interval = Interval(self.every)

    def on_fit_start(self, run: Run) -> None:
        super().on_fit_start(run)
        if isinstance(self.start, float) and run.max_steps is None:
            raise UserError(
                f"swa.start={self.start} is a fraction of a run whose number of steps is unknown; give a duration, "
                "such as swa.start=10epoch."
            )
        self._interval.start(run.state)

    def update_weight(self, run: Run) -> float | None:
        # The interval is asked first: it must notice each of its points, also those before the start.
        return 1.0 / (self._updates + 1) if self._interval.due(run.state) and self._has_started(run) else None

    def _has_started(self, run: Run) -> bool:
        if isinstance(self.start, Duration):
            return self.start.reached(run.state)
        assert run.max_steps is not None
        return run.state.step >= self.start * run.max_steps
