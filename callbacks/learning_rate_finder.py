"""Learning-rate range test before training."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge

from trainkit.callback import Callback
from trainkit.console import say
from trainkit.data.batch import StepBatch
from trainkit.errors import UserError, nearest
from trainkit.files import write_optional
from trainkit.loops.fit_loop import make_phase_step
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.phases import PhaseControl
from trainkit.report.charts import Series, chart
from trainkit.report.html import Section, element, page
from trainkit.report.record import Curve
from trainkit.rng import preserve_rng
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.strategy import PARTIAL_GRADIENTS, SupportsPhases, local_state
from trainkit.tree import map_tensors

logger = logging.getLogger(__name__)

_DIVERGED = 4.0  # times the lowest loss
_SMOOTHING = 0.8
_SCALED = ("lr", "initial_lr", "max_lr", "min_lr")  # keys of a parameter group


class LearningRateFinder(Callback):
    """Tries learning rates from low to high before training starts, and suggests one.

    Trial steps are real steps: under the run's strategy, with its global batch. Afterwards everything is restored.
    The suggestion is the rate at which the loss falls most steeply. `learning_rates.html` and `learning_rates.json` in
    the run folder hold the result. The finder does not run again after a resume.

    In a task with phases the rate of one phase is varied and its loss is used; the others train with their own rates.

    Args:
        min_lr: First rate.
        max_lr: Last rate; the trial ends earlier if the loss explodes.
        num_steps: Number of rates to try.
        on_finish: `stop` ends the run, `apply` trains with the suggestion (schedules are scaled to it), `continue`
            trains with the configured rate.
        phase: The phase whose rate is varied, in a task with phases.

    """

    def __init__(
        self,
        *,
        min_lr: float = 1e-7,
        max_lr: float = 1.0,
        num_steps: Annotated[int, Ge(10)] = 100,
        on_finish: Literal["stop", "apply", "continue"] = "stop",
        phase: str | None = None,
    ) -> None:
        check_arguments(LearningRateFinder.__init__, locals(), of="learning_rate_finder")
        if not 0 < min_lr < max_lr:
            raise UserError(f"learning_rate_finder: 0 < min_lr < max_lr must hold, got {min_lr} and {max_lr}.")
        self.min_lr = min_lr
        self.max_lr = max_lr
        self.num_steps = num_steps
        self.on_finish = on_finish
        self.phase = phase
        self.suggestion: float | None = None
        """The suggested rate, the same on every rank; `None` if the loss did not fall."""

    def on_fit_start(self, run: Run) -> None:
        if run.resumed_from is not None:
            return
        phase_optimizer = self._select(run)
        with trial(run):
            rates, losses = self._sweep(run, phase_optimizer)
        self.suggestion = suggest(rates, losses)
        if run.is_main:
            self._report(run, rates, losses)
        if self.on_finish == "stop":
            run.request_stop("learning_rate_finder has finished; set the rate, or learning_rate_finder.on_finish=apply")
        elif self.on_finish == "apply" and self.suggestion is not None:
            _scale_schedules(phase_optimizer, self.suggestion)

    def _select(self, run: Run) -> PhaseOptimizer:
        """Return the optimizer whose rate is varied."""
        phases = {phase_optimizer.phase: phase_optimizer for phase_optimizer in run.phase_optimizers}
        if (self.phase or "") in phases:
            return phases[self.phase or ""]
        if "" in phases:
            raise UserError(
                f"learning_rate_finder.phase={self.phase}: {type(run.task).__name__} has no phases; remove the key."
            )
        if self.phase is None:
            raise UserError(
                "learning_rate_finder varies the rate of one optimizer, and "
                f"{type(run.task).__name__} has the phases {', '.join(phases)}; choose one, for example "
                f"learning_rate_finder.phase={next(iter(phases))}."
            )
        raise UserError(
            f"learning_rate_finder.phase={self.phase} is not a phase of {type(run.task).__name__}."
            f"{nearest(self.phase, list(phases))} Choose {', '.join(phases)}."
        )

    def _sweep(self, run: Run, phase_optimizer: PhaseOptimizer) -> tuple[list[float], list[float]]:
        """Return the rates and their losses, the same on every rank. Collective."""
        rates: list[float] = []
        losses: list[float] = []
        mean, lowest = 0.0, math.inf
        means = WeightedMeans(run.strategy.device)
        control = None
        steps = [make_phase_step(run.task, run.strategy, optimizer) for optimizer in run.phase_optimizers]
        if phase_optimizer.phase:
            # Schedules do not step in the trial: the rates are the finder's.
            control = PhaseControl([replace(step, step_schedules=lambda: None) for step in steps])
        name = f"{phase_optimizer.phase}/loss" if phase_optimizer.phase else "loss"
        # The range comes first, or zip would draw one batch more and drop it.
        for step, batch in zip(range(self.num_steps * phase_optimizer.every), _step_batches(run), strict=False):
            rate = self.min_lr * (self.max_lr / self.min_lr) ** (len(rates) / (self.num_steps - 1))
            _set_rate(phase_optimizer, rate)
            if control is None:
                means.add(steps[0].forward_backward(batch))
                steps[0].update()
            else:
                control.begin(batch, num_steps=step)
                if run.task.manual:
                    run.task.manual_step(control)
                else:
                    control.run_due_phases()
                means.add(control.outputs)
            # The mean over ranks, so that all of them end the trial in the same step. It waits for the device in each
            # one: a loss that explodes must be seen at once.
            loss = means.reduce(run.strategy.comm).get(name)
            if loss is None or step % phase_optimizer.every:  # the phase is not due in this step
                continue
            rates.append(rate)
            losses.append(loss)
            if not math.isfinite(loss):
                break
            mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
            smooth = mean / (1 - _SMOOTHING ** len(losses))  # corrects the bias of the first values
            lowest = min(lowest, smooth)
            # The first losses are noisy, and must not end the trial.
            if len(rates) > self.num_steps // 10 + 1 and smooth > _DIVERGED * lowest > 0:
                break
        return rates, losses

    def _report(self, run: Run, rates: list[float], losses: list[float]) -> None:
        best = self.suggestion
        result = (
            "no suggestion, because the loss did not fall; try a wider range"
            if best is None
            else f"{best:.2g} is where the loss fell most steeply, of {len(rates)} rates"
        )
        say(f"learning rate: {result}")
        if run.run_dir is not None:
            write_optional(run.run_dir / "learning_rates.html", _page(rates, losses, best, result))
            finite = [loss if math.isfinite(loss) else None for loss in losses]
            content = {"suggestion": best, "rates": rates, "losses": finite}
            write_optional(run.run_dir / "learning_rates.json", json.dumps(content) + "\n")


def _page(rates: list[float], losses: list[float], best: float | None, result: str) -> str:
    """Return a page with the losses over the logarithm of the rates."""
    series = [Series("loss", Curve([math.log10(rate) for rate in rates], losses))]
    if best is not None:
        _, loss = min(zip(rates, losses, strict=True), key=lambda pair: abs(pair[0] - best))
        series.append(Series(f"loss at {best:.2g}", Curve([math.log10(best)], [loss]), 1))
    drawn = chart("Loss", series, x_name="log10(learning rate)")
    header = element("h1", f"Learning rate: {result}")
    return page(
        "Learning rates", header=header, sections=[Section("loss", "Loss while the learning rate rises", drawn)]
    )


@contextmanager
def trial(run: Run) -> Iterator[None]:
    """Restore weights, buffers, optimizers, gradient-norm averages, scaler, strategy and random generators at the end.

    Raises UserError if the strategy shards the optimizer or steps it in backward: then it cannot be restored.
    """
    for setting in PARTIAL_GRADIENTS:
        if getattr(run.strategy, setting, False) is True:
            raise UserError(
                f"learning_rate_finder restores the optimizer, which strategy.{setting}=true does not allow; set it to "
                "false for the search (weights are the same under every strategy)."
            )
    weights = _copy(local_state(run.strategy, run.task))
    restores = [_saved(phase_optimizer) for phase_optimizer in run.phase_optimizers]
    scaler = run.precision.state_dict()
    # Collective: all ranks restore what the main rank has.
    communication = run.strategy.comm.broadcast_object(run.strategy.strategy_state())
    try:
        with preserve_rng():
            yield
    finally:
        with torch.no_grad():
            for name, tensor in local_state(run.strategy, run.task).items():
                tensor.copy_(weights[name])
        for restore in restores:
            restore()
        run.precision.load_state_dict(scaler)
        run.strategy.load_strategy_state(communication)
        if isinstance(run.strategy, SupportsPhases):
            run.strategy.end_phases()


def _saved(phase_optimizer: PhaseOptimizer) -> Callable[[], None]:
    """Copy an optimizer's state; return the function that restores it."""
    optimizer, spikes = phase_optimizer.optimizer, phase_optimizer.spikes
    groups = [_copy({name: group[name] for name in group if name != "params"}) for group in optimizer.param_groups]
    state = _copy(dict(optimizer.state))
    norms = {} if spikes is None else spikes.state_dict()
    skipped_steps = phase_optimizer.skipped_steps

    def restore() -> None:
        # Cleared and filled: a plain dictionary would lack the defaults that optimizers rely on.
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
        phase_optimizer.zero_grad()
        if spikes is not None:
            spikes.load_state_dict(norms)
        phase_optimizer.skipped_steps = skipped_steps

    return restore


def _copy(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.detach().clone())


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which the smoothed loss falls most steeply over the logarithm of the rate.

    `None` if it does not fall by more than 5 %. Rates after the lowest loss are ignored.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 5:
        return None
    reach = max(1, len(finite) // 12)  # the loss of a single batch is noisy
    smooth = [fmean(finite[max(0, index - reach) : index + reach + 1]) for index in range(len(finite))]
    lowest = min(range(len(smooth)), key=smooth.__getitem__)
    if lowest < 2 or smooth[0] - smooth[lowest] <= 0.05 * abs(smooth[0]):
        return None
    slopes = {
        index: (smooth[min(index + reach, lowest)] - smooth[max(index - reach, 0)])
        for index in range(min(reach, lowest - 1), lowest)
    }
    return rates[min(slopes, key=slopes.__getitem__)]


def _step_batches(run: Run) -> Iterator[StepBatch]:
    """Yield the step batches of one epoch after another."""
    assert run.loader is not None
    for epoch in count():
        batch = None
        batches = run.loader.step_batches(epoch, 0)
        for batch in run.strategy.step_batches(batches, pin_memory=run.loader.stage_data.pin_memory):
            yield batch
        if batch is None:  # a stream without samples
            return


def _set_rate(phase_optimizer: PhaseOptimizer, rate: float) -> None:
    """Set the largest rate of the groups to `rate`, and keep their ratios."""
    groups = [group for group in phase_optimizer.optimizer.param_groups if "lr" in group]
    largest = max(float(group.get("initial_lr", group["lr"])) for group in groups)
    for group in groups:
        group["lr"] = rate * (float(group.get("initial_lr", group["lr"])) / largest if largest else 1.0)


def _scale_schedules(phase_optimizer: PhaseOptimizer, rate: float) -> None:
    """Scale the rates of all groups and schedules, so that the largest initial rate is `rate`."""
    groups = phase_optimizer.optimizer.param_groups
    factor = rate / max(float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups)
    for group in groups:
        for name in _SCALED:
            if isinstance(group.get(name), float):
                group[name] *= factor
    for schedule in phase_optimizer.schedules:
        # Private: torch has no public way to scale the rates that schedulers have computed and will return to.
        for scheduler in [schedule.scheduler, *getattr(schedule.scheduler, "_schedulers", ())]:
            for name in ("base_lrs", "_last_lr"):
                if isinstance(getattr(scheduler, name, None), list):
                    setattr(scheduler, name, [value * factor for value in getattr(scheduler, name)])
