"""Which learning rate to begin with."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Literal

from trainkit.callback import Callback
from trainkit.checkpoints.file import write_text
from trainkit.console import say
from trainkit.errors import UserError, nearest
from trainkit.metrics import WeightedMeans
from trainkit.optimization import Optimization
from trainkit.window import Window

from .chart import chart
from .trial import TriedPhases, trial

if TYPE_CHECKING:
    from trainkit.run import Run

logger = logging.getLogger(__name__)

_ENDINGS = ("stop", "apply", "continue")
_DIVERGED = 4.0  # times the least loss
_SMOOTHING = 0.8
_SCALED = ("lr", "initial_lr", "max_lr", "min_lr")


class LearningRateFinder(Callback):
    """Tries learning rates from low to high before training begins, and suggests one.

    Each step of the trial is one of the run's own, under its strategy, with its global batch; then everything is put
    back as it was. The suggestion is where the loss falls most steeply. `learning_rates.svg` and `.json` in the run's
    folder show what was seen. A resumed run does not look again.

    Of a task with phases one phase is swept; the others train along with the rates that were set. Its loss counts.

    Args:
        lowest: The first rate.
        highest: The last rate; the trial ends before if the loss explodes.
        steps: How many rates are tried.
        then: `stop` ends the run, `apply` trains with the suggestion (schedules are scaled alike), `continue` trains
            with the rate that was set.
        phase: Which phase of a task with several is swept.

    """

    def __init__(
        self,
        *,
        lowest: float = 1e-7,
        highest: float = 1.0,
        steps: int = 100,
        then: Literal["stop", "apply", "continue"] = "stop",
        phase: str | None = None,
    ) -> None:
        if not 0 < lowest < highest:
            raise UserError(f"learning_rate_finder: 0 < lowest < highest must hold, got {lowest} and {highest}.")
        if isinstance(steps, bool) or steps < 10:
            raise UserError(f"learning_rate_finder.steps must be at least 10, got {steps}.")
        if then not in _ENDINGS:
            raise UserError(
                f"learning_rate_finder.then={then!r} is unknown.{nearest(then, _ENDINGS)} Choose {', '.join(_ENDINGS)}."
            )
        self.lowest = lowest
        self.highest = highest
        self.steps = steps
        self.then = then
        self.phase = phase
        self.suggestion: float | None = None
        """What was found, on every rank."""

    def on_fit_start(self, run: Run) -> None:
        if run.resumed_from is not None:
            return
        optimization = self._swept(run)
        with trial(run, who="learning_rate_finder"):
            rates, losses = self._sweep(run, optimization)
        self.suggestion = suggest(rates, losses)
        if run.is_main:
            self._tell(run, rates, losses)
        if self.then == "stop":
            run.request_stop("learning_rate_finder has looked; set the rate, or learning_rate_finder.then=apply")
        elif self.then == "apply" and self.suggestion is not None:
            _apply(optimization, self.suggestion)

    def _swept(self, run: Run) -> Optimization:
        """Return the optimizer whose rate is looked for."""
        phases = {optimization.phase: optimization for optimization in run.optimizations}
        if (self.phase or "") in phases:
            return phases[self.phase or ""]
        if "" in phases:
            raise UserError(
                f"learning_rate_finder.phase={self.phase}: {type(run.task).__name__} has no phases; leave it out."
            )
        if self.phase is None:
            raise UserError(
                "learning_rate_finder looks for the rate of one optimizer, and "
                f"{type(run.task).__name__} has the phases {', '.join(phases)}; say which one, as "
                f"learning_rate_finder.phase={next(iter(phases))}."
            )
        raise UserError(
            f"learning_rate_finder.phase={self.phase} is no phase of {type(run.task).__name__}."
            f"{nearest(self.phase, list(phases))} Choose {', '.join(phases)}."
        )

    def _sweep(self, run: Run, optimization: Optimization) -> tuple[list[float], list[float]]:
        """Return rates and the losses that were met with them; the same on every rank."""
        rates: list[float] = []
        losses: list[float] = []
        means = WeightedMeans(run.strategy.device)
        control = TriedPhases(run.task, run.strategy, run.optimizations) if optimization.phase else None
        name = f"{optimization.phase}/loss" if optimization.phase else "loss"
        for number, window in zip(range(self.steps * optimization.every), _windows(run), strict=False):
            rate = self.lowest * (self.highest / self.lowest) ** (len(rates) / (self.steps - 1))
            _scale(optimization, rate)
            if control is None:
                means.add(run.strategy.forward_backward(run.task, window))
                run.strategy.optimizer_step(optimization)
            else:
                means.add(control.make_step(run, window, number=number))
            loss = means.reduce(run.strategy.comm).get(name)
            if loss is None or number % optimization.every:  # the phase takes no part in this step
                continue
            rates.append(rate)
            losses.append(loss)
            if not math.isfinite(loss):
                break
            smooth = _smoothed(losses)
            if len(rates) > self.steps // 10 + 1 and smooth[-1] > _DIVERGED * min(smooth) > 0:
                break
        return rates, losses

    def _tell(self, run: Run, rates: list[float], losses: list[float]) -> None:
        found = self.suggestion
        say(
            "learning rate: no suggestion, as the loss did not fall; look at a wider range"
            if found is None
            else f"learning rate: {found:.2g} is where the loss fell most steeply, of {len(rates)} that were tried"
        )
        if run.run_dir is not None:
            titles = ("Loss while the learning rate rises", "learning rate", "loss")
            write_text(run.run_dir / "learning_rates.svg", chart(rates, losses, marked=found, titles=titles))
            finite = [loss if math.isfinite(loss) else None for loss in losses]
            kept = {"suggestion": found, "rates": rates, "losses": finite}
            write_text(run.run_dir / "learning_rates.json", json.dumps(kept) + "\n")


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which the smoothed loss falls most steeply over the logarithm of the rate.

    `None` if it does not fall by more than a twentieth of itself. What comes after the least loss does not count.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 5:
        return None
    reach = max(1, len(finite) // 12)  # batches differ: what one of them says is mostly chance
    smooth = [_mean(finite[max(0, index - reach) : index + reach + 1]) for index in range(len(finite))]
    lowest = min(range(len(smooth)), key=smooth.__getitem__)
    if lowest < 2 or smooth[0] - smooth[lowest] <= 0.05 * abs(smooth[0]):
        return None
    slopes = {
        index: (smooth[min(index + reach, lowest)] - smooth[max(index - reach, 0)])
        for index in range(min(reach, lowest - 1), lowest)
    }
    return rates[min(slopes, key=slopes.__getitem__)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return the moving averages, as if nothing had come before the first loss."""
    smooth: list[float] = []
    mean = 0.0
    for number, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smooth.append(mean / (1 - _SMOOTHING**number))
    return smooth


def _windows(run: Run) -> Iterator[Window]:
    """Yield windows of the first epochs, again and again if they are few."""
    assert run.feed is not None
    for epoch in count():
        seen = False
        for window in run.strategy.step_batches(run.feed.windows(epoch, 0), pin_memory=run.feed.source.pin_memory):
            seen = True
            yield window
        if not seen:
            return


def _scale(optimization: Optimization, rate: float) -> None:
    """Give the groups rates whose largest is `rate`, as they are to each other."""
    groups = [group for group in optimization.optimizer.param_groups if "lr" in group]
    largest = max(float(group.get("initial_lr", group["lr"])) for group in groups)
    for group in groups:
        group["lr"] = rate * (float(group.get("initial_lr", group["lr"])) / largest if largest else 1.0)


def _apply(optimization: Optimization, rate: float) -> None:
    """Scale the rates of all groups, and what schedules make of them, so that the largest first one is `rate`."""
    groups = optimization.optimizer.param_groups
    factor = rate / max(float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups)
    for group in groups:
        for name in _SCALED:
            if isinstance(group.get(name), float):
                group[name] *= factor
    for schedule in optimization.schedules:
        scheduler = schedule.scheduler
        for one in [scheduler, *getattr(scheduler, "_schedulers", ())]:
            for name in ("base_lrs", "_last_lr"):
                if isinstance(getattr(one, name, None), list):
                    setattr(one, name, [value * factor for value in getattr(one, name)])
