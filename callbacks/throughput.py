"""How fast training is."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from trainkit.callback import Callback

if TYPE_CHECKING:
    from trainkit.run import Run

logger = logging.getLogger(__name__)

MOST_WAITING = 0.2
"""Part of the time that may pass without work for the device."""
STRETCHES_TO_WARN = 3
"""Stretches in a row with more of it, before the user is told, once."""
SHORTEST_SECONDS = 0.5
"""Of a stretch, which is as many log intervals as it takes: one of quick steps alone says nothing."""


class Throughput(Callback):
    """Adds `train/samples_per_second` and `train/steps_per_second`, over the time since the last log point.

    Time spent in evaluations is left out. A log point has waited for the device just before, so that nothing more has
    to wait here. `train/data_wait_fraction` is the fraction of the time in which the loop waited for this rank's next
    samples; where it stays above a fifth, a warning says once what to change.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._waited = 0.0
        self._stretch_waited = self._stretch_seconds = 0.0
        self._slow_stretches = 0
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
            self._look_at_waiting(run, metrics, seconds)
        self._begin(run, now)

    def _begin(self, run: Run, now: float) -> None:
        self._since, self._evaluating = now, 0.0
        self._step, self._samples = run.state.step, run.state.samples
        self._waited = 0.0 if run.feed is None else run.feed.seconds_waited

    def _look_at_waiting(self, run: Run, metrics: dict[str, float], seconds: float) -> None:
        if run.feed is None:
            return
        waited = run.feed.seconds_waited - self._waited
        metrics["train/data_wait_fraction"] = min(1.0, waited / seconds)
        self._stretch_waited += waited
        self._stretch_seconds += seconds
        if self._stretch_seconds < SHORTEST_SECONDS:
            return
        part = min(1.0, self._stretch_waited / self._stretch_seconds)
        self._stretch_waited = self._stretch_seconds = 0.0
        # One stretch may be the start of workers or of an epoch.
        self._slow_stretches = self._slow_stretches + 1 if part > MOST_WAITING else 0
        if self._slow_stretches == STRETCHES_TO_WARN:
            logger.warning("%s", _bottleneck(part, run.feed.source.workers))


def _bottleneck(part: float, workers: int) -> str:
    remedy = (
        "the training process reads them itself: set data.workers=2 or more"
        if workers == 0
        else f"{workers} worker process{'es read' if workers > 1 else ' reads'} them: set data.workers higher, or make "
        "the dataset's __getitem__ quicker (decode less, read from a faster disk, prepare samples beforehand)"
    )
    return f"data is the bottleneck: {100 * part:.0f} % of the time the loop waits for samples; {remedy}."
