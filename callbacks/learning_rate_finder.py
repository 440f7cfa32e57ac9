"""Learning-rate range test before training."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainkit.callback import Callback
from trainkit.checkpoint.files import write_text
from trainkit.data.batch import StepBatch
from trainkit.errors import UserError, nearest
from trainkit.loops.fit_loop import make_phase_step
from trainkit.loops.phases import PhaseControl
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.report.charts import line_chart
from trainkit.rng import preserve_rng
from trainkit.run_dir.console import say
from trainkit.strategy import local_state
from trainkit.tree import map_tensors

if TYPE_CHECKING:
    from trainkit.loops.run import Run
    from trainkit.metrics.step_output import StepOutput

logger = logging.getLogger(__name__)

_ENDINGS = ("stop", "apply", "continue")
_DIVERGED = 4.0  # times the least loss
_SMOOTHING = 0.8
_SCALED = ("lr", "initial_lr", "max_lr", "min_lr")


class LearningRateFinder(Callback):
    """Tries learning rates from low to high before training starts and suggests one.

    Each trial step is a real step: under the run's strategy, with its global batch. Afterwards everything is restored.
    The suggestion is the rate at which the loss falls most steeply. `learning_rates.svg` and `learning_rates.json` in
    the run folder hold the result. The finder does not run again after a resume.

    In a task with phases the rate of one phase is varied; the others train with their own rates. The loss is that of
    the varied phase.

    Args:
        min_lr: The first rate.
        max_lr: The last rate; the trial ends earlier if the loss explodes.
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
        num_steps: int = 100,
        on_finish: Literal["stop", "apply", "continue"] = "stop",
        phase: str | None = None,
    ) -> None:
        if not 0 < min_lr < max_lr:
            raise UserError(f"learning_rate_finder: 0 < min_lr < max_lr must hold, got {min_lr} and {max_lr}.")
        if isinstance(num_steps, bool) or num_steps < 10:
            raise UserError(f"learning_rate_finder.num_steps must be at least 10, got {num_steps}.")
        if on_finish not in _ENDINGS:
            raise UserError(
                f"learning_rate_finder.on_finish={on_finish!r} is unknown.{nearest(on_finish, _ENDINGS)} "
                f"Choose {', '.join(_ENDINGS)}."
            )
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
        phase_optimizer = self._swept(run)
        with trial(run):
            rates, losses = self._sweep(run, phase_optimizer)
        self.suggestion = suggest(rates, losses)
        if run.is_main:
            self._report(run, rates, losses)
        if self.on_finish == "stop":
            run.request_stop("learning_rate_finder has finished; set the rate, or learning_rate_finder.on_finish=apply")
        elif self.on_finish == "apply" and self.suggestion is not None:
            _apply(phase_optimizer, self.suggestion)

    def _swept(self, run: Run) -> PhaseOptimizer:
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
        means = WeightedMeans(run.strategy.device)
        control = TrialPhases(run) if phase_optimizer.phase else None
        name = f"{phase_optimizer.phase}/loss" if phase_optimizer.phase else "loss"
        for number, step_batch in zip(range(self.num_steps * phase_optimizer.every), _windows(run), strict=False):
            rate = self.min_lr * (self.max_lr / self.min_lr) ** (len(rates) / (self.num_steps - 1))
            _scale(phase_optimizer, rate)
            if control is None:
                means.add(run.strategy.forward_backward(run.task, step_batch))
                run.strategy.optimizer_step(phase_optimizer)
            else:
                means.add(control.make_step(run, step_batch, number=number))
            loss = means.reduce(run.strategy.comm).get(name)
            if loss is None or number % phase_optimizer.every:  # the phase is not in this step
                continue
            rates.append(rate)
            losses.append(loss)
            if not math.isfinite(loss):
                break
            smooth = _smoothed(losses)
            if len(rates) > self.num_steps // 10 + 1 and smooth[-1] > _DIVERGED * min(smooth) > 0:
                break
        return rates, losses

    def _report(self, run: Run, rates: list[float], losses: list[float]) -> None:
        found = self.suggestion
        say(
            "learning rate: no suggestion, because the loss did not fall; try a wider range"
            if found is None
            else f"learning rate: {found:.2g} is where the loss fell most steeply, of {len(rates)} rates"
        )
        if run.run_dir is not None:
            titles = ("Loss while the learning rate rises", "learning rate", "loss")
            write_text(run.run_dir / "learning_rates.svg", line_chart(rates, losses, marked=found, titles=titles))
            finite = [loss if math.isfinite(loss) else None for loss in losses]
            kept = {"suggestion": found, "rates": rates, "losses": finite}
            write_text(run.run_dir / "learning_rates.json", json.dumps(kept) + "\n")


@contextmanager
def trial(run: Run) -> Iterator[None]:
    """Restore weights, buffers, optimizers, gradient-norm averages, scaler and random generators at the end.

    Raises UserError if the strategy shards the optimizer or steps it in backward: then it cannot be restored.
    """
    for setting in ("shard_optimizer", "overlap_optimizer"):
        if getattr(run.strategy, setting, False):
            raise UserError(
                f"learning_rate_finder restores the optimizer, which strategy.{setting}=true does not allow; set it to "
                "false for the search (weights are the same under every strategy)."
            )
    held = {name: tensor.detach().clone() for name, tensor in local_state(run.strategy, run.task).items()}
    groups = [[_settings(group) for group in one.optimizer.param_groups] for one in run.phase_optimizers]
    states = [
        {parameter: _copy(state) for parameter, state in one.optimizer.state.items()} for one in run.phase_optimizers
    ]
    spikes = [None if one.spikes is None else one.spikes.state_dict() for one in run.phase_optimizers]
    skipped = [one.skipped_steps for one in run.phase_optimizers]
    scaler = run.precision.state_dict()
    try:
        with preserve_rng():
            yield
    finally:
        with torch.no_grad():
            for name, tensor in local_state(run.strategy, run.task).items():
                tensor.copy_(held[name])
        for one, own_groups, own_states in zip(run.phase_optimizers, groups, states, strict=True):
            one.optimizer.state.clear()
            one.optimizer.state.update(own_states)
            for group, settings in zip(one.optimizer.param_groups, own_groups, strict=True):
                group.update(settings)
            one.zero_grad()
        for one, own_spikes, own_skipped in zip(run.phase_optimizers, spikes, skipped, strict=True):
            if one.spikes is not None and own_spikes is not None:
                one.spikes.load_state_dict(own_spikes)
            one.skipped_steps = own_skipped
        run.precision.load_state_dict(scaler)
        if run.phase_optimizers[0].phase:
            run.strategy.end_phases()


class TrialPhases(PhaseControl):
    """Drives the steps of a task with phases, without stepping schedules."""

    def __init__(self, run: Run) -> None:
        steps = [make_phase_step(run.task, run.strategy, phase_optimizer) for phase_optimizer in run.phase_optimizers]
        super().__init__([replace(step, step_schedules=_keep_schedules) for step in steps])

    def make_step(self, run: Run, step_batch: StepBatch, *, number: int) -> list[StepOutput]:
        """Return the outputs of the phases that take part in step `number`. Collective."""
        self.begin(step_batch, num_steps=number)
        if run.task.manual:
            run.task.manual_step(self)
        else:
            self.run_due_phases()
        return self.outputs


def _keep_schedules() -> None:
    """Step no schedule."""


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) for name, value in group.items() if name != "params"}


def _copy(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.detach().clone())


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which the smoothed loss falls most steeply over the logarithm of the rate.

    `None` if it does not fall by more than a twentieth of itself. Rates after the lowest loss are ignored.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 5:
        return None
    reach = max(1, len(finite) // 12)  # the loss of a single batch is noisy
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
    """Return the exponential moving averages, with the bias of the first values corrected."""
    smooth: list[float] = []
    mean = 0.0
    for number, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smooth.append(mean / (1 - _SMOOTHING**number))
    return smooth


def _windows(run: Run) -> Iterator[StepBatch]:
    """Yield the step batches of epoch after epoch."""
    assert run.loader is not None
    for epoch in count():
        seen = False
        for step_batch in run.strategy.step_batches(
            run.loader.step_batches(epoch, 0), pin_memory=run.loader.stage_data.pin_memory
        ):
            seen = True
            yield step_batch
        if not seen:
            return


def _scale(phase_optimizer: PhaseOptimizer, rate: float) -> None:
    """Set the largest rate of the groups to `rate`, and keep their ratios."""
    groups = [group for group in phase_optimizer.optimizer.param_groups if "lr" in group]
    largest = max(float(group.get("initial_lr", group["lr"])) for group in groups)
    for group in groups:
        group["lr"] = rate * (float(group.get("initial_lr", group["lr"])) / largest if largest else 1.0)


def _apply(phase_optimizer: PhaseOptimizer, rate: float) -> None:
    """Scale the rates of all groups and their schedules, so that the largest initial rate is `rate`."""
    groups = phase_optimizer.optimizer.param_groups
    factor = rate / max(float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups)
    for group in groups:
        for name in _SCALED:
            if isinstance(group.get(name), float):
                group[name] *= factor
    for schedule in phase_optimizer.schedules:
        scheduler = schedule.scheduler
        for one in [scheduler, *getattr(scheduler, "_schedulers", ())]:
            for name in ("base_lrs", "_last_lr"):
                if isinstance(getattr(one, name, None), list):
                    setattr(one, name, [value * factor for value in getattr(one, name)])
