"""How fast training is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainkit.callback import Callback

if TYPE_CHECKING:
    from trainkit.run import Run


class Throughput(Callback):
    """Adds `train/samples_per_second` and `train/steps_per_second`, over the time since the last log point.

    Time spent in evaluations is left out. A log point has waited for the device just before, so that nothing more has
    to wait here.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._step = 0
        self._samples = 0
        self._evaluating_since = 0.0
        self._evaluating = 0.0

    def on_fit_start(self, run: Run) -> None:
        self._begin(run, time.monotonic())

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._evaluating_since = time.monotonic()

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._evaluating += time.monotonic() - self._evaluating_since

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        seconds = now - self._since - self._evaluating
        if seconds > 0 and run.state.step > self._step:
            metrics["train/samples_per_second"] = (run.state.samples - self._samples) / seconds
            metrics["train/steps_per_second"] = (run.state.step - self._step) / seconds
        self._begin(run, now)

    def _begin(self, run: Run, now: float) -> None:
        self._since, self._evaluating = now, 0.0
        self._step, self._samples = run.state.step, run.state.samples
