"""How far a run has come, in numbers and words; only reads, so that any thread may ask."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainkit.console import clock, number

if TYPE_CHECKING:
    from trainkit.run import Run

_SHOWN_ELSEWHERE = ("train/epoch", "train/samples_per_second", "train/steps_per_second")


class Progress:
    """Counts from the moment it is made, which may be that of a resumed run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.started = time.monotonic()
        self._first_step = run.state.step
        self._first_samples = run.state.samples

    def words(self, metrics: Mapping[str, float], *, now: float) -> list[str]:
        """Return one line in words, for a log point whose metrics are given."""
        words = [self.step(), f"epoch {self.epoch()}", *self.training_metrics(metrics)]
        words += [f"{self.samples_per_second(metrics, now=now):,.0f} samples/s"]
        remaining = self.seconds_left(now=now)
        return words if remaining is None else [*words, f"ETA {clock(remaining)}"]

    def step(self) -> str:
        """Return `step 120/4,000`, without the total where the duration does not tell."""
        total = self.run.max_steps
        return f"step {self.run.state.step:,}" + (f"/{total:,}" if total is not None else "")

    def epoch(self) -> str:
        """Return the present epoch, counted from 1, of how many."""
        steps = self.run.feed.num_steps if self.run.feed is not None else None
        total = math.ceil(self.run.max_steps / steps) if steps and self.run.max_steps is not None else None
        state = self.run.state
        present = max(1, state.epoch + (state.position > 0))  # after an epoch's last step it is still that epoch
        return f"{present}" if total is None else f"{min(present, total)}/{total}"

    def fraction(self) -> float | None:
        """Return the part of the run that is done; of the epoch, where the duration does not tell."""
        state = self.run.state
        if self.run.max_steps:
            return min(1.0, state.step / self.run.max_steps)
        return min(1.0, state.position / state.epoch_length) if state.epoch_length else None

    def training_metrics(self, metrics: Mapping[str, float]) -> list[str]:
        """Return `loss 0.6931` and the like for what training logged."""
        train = {name: value for name, value in metrics.items() if name.startswith("train/")}
        return named({name: value for name, value in train.items() if name not in _SHOWN_ELSEWHERE}, without="train/")

    def samples_per_second(self, metrics: Mapping[str, float], *, now: float) -> float:
        """Return what was measured over the last log interval; before there was one, the mean since the start."""
        measured = metrics.get("train/samples_per_second")
        if measured is not None:
            return measured
        return (self.run.state.samples - self._first_samples) / max(now - self.started, 1e-9)

    def seconds_left(self, *, now: float) -> float | None:
        """Return how long the rest will take at the mean pace so far, evaluations included."""
        done = self.run.state.step - self._first_step
        if self.run.max_steps is None or done == 0:
            return None
        return (now - self.started) / done * max(0, self.run.max_steps - self.run.state.step)


def named(metrics: Mapping[str, float], *, without: str = "") -> list[str]:
    """Return each metric as its name and its value."""
    return [f"{name.removeprefix(without)} {number(value)}" for name, value in metrics.items()]
