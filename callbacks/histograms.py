"""How weights are distributed, over time."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainkit.callback import Callback
from trainkit.duration import Duration, Interval
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.run import Run


class Histograms(Callback):
    """Writes a histogram of each parameter to the loggers that take them (TensorBoard, W&B); waits for the device then.

    Args:
        every: From one time to the next.
        pattern: Of parameters' names; `*` fits all.

    """

    def __init__(self, *, every: str | Duration = "1epoch", pattern: str = "*") -> None:
        self.every = Duration.parse(every, where="histograms.every")
        self.pattern = pattern
        self._interval = Interval(self.every)

    def on_fit_start(self, run: Run) -> None:
        self._interval.start(run.state)
        names = [name for name, _ in run.task.named_parameters()]
        if not any(fnmatchcase(name, self.pattern) for name in names):
            raise UserError(
                f"histograms.pattern={self.pattern!r} fits no parameter; there are {', '.join(names[:20])}."
            )

    def on_step_end(self, run: Run) -> None:
        if self._interval.due(run.state) and run.loggers:
            for name, tensor in run.strategy.held(run.task).items():
                if fnmatchcase(name, self.pattern) and tensor.is_floating_point():
                    run.log_histogram(f"weights/{name}", tensor)
