"""Some steps in which a strategy says how much of its communication computation hides."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from trainkit.console import say
from trainkit.overlap import NO_COMMUNICATION, Overlap
from trainkit.strategy import Strategy, SupportsOverlapProfile

if TYPE_CHECKING:
    from trainkit.run import Run

_STEPS = 4
_FEWEST = 2  # some strategies know of a step when the next one begins
_SETTLED = 2  # steps after which buckets are as they stay


class OverlapWindow:
    """Measures up to four steps that end before others are recorded, whose recording would slow them.

    Args:
        end: The last of the steps.

    """

    def __init__(self, *, end: int) -> None:
        self._end = end
        self._begin = max(end - _STEPS, _SETTLED)
        self._since = 0.0
        self._evaluating_since = 0.0
        self.record: dict[str, Any] = {}
        """What was found, on the main rank."""

    def on_step_end(self, run: Run, step: int) -> None:
        """Begin, or end and say what was found; `step` counts from where the run began."""
        if step == self._begin and self._is_long_enough:
            if isinstance(run.strategy, SupportsOverlapProfile):
                run.strategy.start_overlap_profile()
            self._since = _now(run)
        elif step == self._end:
            self._tell(run, _now(run) - self._since if self._is_long_enough else 0.0)

    def on_evaluation_start(self) -> None:
        """Count no time until the evaluation has ended."""
        self._evaluating_since = time.perf_counter()

    def on_evaluation_end(self) -> None:
        """Count time again."""
        self._since += time.perf_counter() - self._evaluating_since

    @property
    def _is_long_enough(self) -> bool:
        return self._end - self._begin >= _FEWEST

    def _tell(self, run: Run, seconds: float) -> None:
        steps = max(self._end - self._begin, 1)
        found = _stop_profile(run.strategy, steps)
        if not run.is_main:
            return
        name = type(run.strategy).__name__
        if found is not None:
            self.record = found.record(strategy=name, step_seconds=seconds / steps)
        elif not self._is_long_enough:
            self.record = {"line": "overlap: not measured; profiler.first=6 or later leaves the steps for it"}
        else:
            self.record = {"line": f"overlap: not known under {name} on {run.strategy.device.type}; see the trace"}
        say(self.record["line"])


def _now(run: Run) -> float:
    if run.strategy.device.type == "cuda":
        torch.cuda.synchronize(run.strategy.device)
    return time.perf_counter()


def _stop_profile(strategy: Strategy, steps: int) -> Overlap | None:
    if isinstance(strategy, SupportsOverlapProfile):
        return strategy.stop_overlap_profile(steps)
    return NO_COMMUNICATION if strategy.comm.num_processes == 1 else None
