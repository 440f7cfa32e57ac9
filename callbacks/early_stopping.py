"""Early stopping on a validation metric."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from annotated_types import Ge, Unit

from trainkit.callback import Callback
from trainkit.errors import UserError, check_monitored
from trainkit.run import Run
from trainkit.settings import check_arguments

from .checkpoint import warn_of_mode


class EarlyStopping(Callback):
    """Ends training when a validation metric has not improved for some evaluations. NaN never improves.

    Args:
        monitor: Name of a validation metric.
        mode: `min` if a small value is good, `max` if a large one is.
        patience: Evaluations in a row without improvement after which training ends.
        min_delta: Least improvement over the best value so far that counts.
        threshold: Value at which training ends at once; `None` disables it.

    """

    def __init__(
        self,
        *,
        monitor: str = "validation/loss",
        mode: Literal["min", "max"] = "min",
        patience: Annotated[int, Ge(1), Unit("evaluations")] = 3,
        min_delta: Annotated[float, Ge(0)] = 0.0,
        threshold: float | None = None,
    ) -> None:
        check_arguments(EarlyStopping.__init__, locals(), of="early_stopping")
        self.monitor = self.monitored = monitor
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.threshold = threshold
        self._sign = 1.0 if mode == "min" else -1.0
        self._best: float | None = None
        self._best_step = 0
        self._waited = 0

    def on_fit_start(self, run: Run) -> None:
        if not run.validates:
            raise UserError(
                f"early_stopping.monitor={self.monitor!r} is a metric of validation, but the data has none, or "
                "evaluate_every is None; give Data(validation=...) and evaluate_every='1epoch', or remove "
                "early_stopping."
            )
        if run.is_main:
            warn_of_mode("early_stopping", self.monitor, self.mode)
        # A resumed run has its counts from load_state_dict, which ran before.
        if run.resumed_from is None:
            self._best, self._best_step, self._waited = None, 0, 0

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        # Without a phase optimizer this is an evaluation outside of fit, which nothing can stop.
        if stage not in ("validation", "sanity") or run.phase_optimizer is None:
            return
        check_monitored(f"early_stopping.monitor={self.monitor!r}", self.monitor, metrics)
        # The sanity batches only check that the metric exists.
        if stage == "sanity":
            return
        value = metrics[self.monitor]
        best = self._sign * math.inf if self._best is None else self._best
        # NaN compares as not smaller, and so never improves.
        if self._sign * (best - value) > self.min_delta:
            self._best, self._best_step, self._waited = value, run.state.step, 0
        else:
            self._waited += 1
        reason = self._stop_reason(value)
        if reason is not None:
            run.request_stop(reason)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "waited": self._waited}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._best, self._best_step, self._waited = saved["best"], saved["best_step"], saved["waited"]

    def _stop_reason(self, value: float) -> str | None:
        if self.threshold is not None and self._sign * value <= self._sign * self.threshold:
            return f"{self.monitor} reached {value:.6g}, the threshold is {self.threshold:.6g}"
        if self._waited < self.patience:
            return None
        best = "no value so far" if self._best is None else f"best {self._best:.6g} at step {self._best_step:,}"
        return f"{self.monitor} has not improved for {self._waited} evaluations ({best})"
