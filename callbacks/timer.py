"""Where the time of a run went, in hours and minutes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.console import clock, say

if TYPE_CHECKING:
    from trainkit.run import Run


class Timer(Callback):
    """Adds `time/hours` and `time/evaluation_hours`, those before a resume included, and says them at the end."""

    def __init__(self) -> None:
        self._evaluating = 0.0
        self._since: float | None = None

    def on_fit_start(self, run: Run) -> None:
        if run.resumed_from is None:
            self._evaluating = 0.0
        self._since = None

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._since = time.monotonic()

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if self._since is not None and stage != "sanity":
            self._evaluating += time.monotonic() - self._since
        self._since = None

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        metrics["time/hours"] = run.state.seconds / 3600
        metrics["time/evaluation_hours"] = self._evaluating / 3600

    def on_fit_end(self, run: Run) -> None:
        if run.is_main:
            say(f"trained for {clock(run.state.seconds)}, of which {clock(self._evaluating)} in evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"evaluating": self._evaluating}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._evaluating = saved["evaluating"]
