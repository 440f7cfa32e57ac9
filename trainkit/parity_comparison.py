"""Every trial held against the one of `single`, step by step, and what may explain a difference."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from trainkit.parity_causes import find_causes
from trainkit.parity_report import Difference, ParityRow
from trainkit.parity_trials import REFERENCE, Trial, Trials, made
from trainkit.strategy import Strategy

_NORM_SLACK = 10  # a norm is a long fp32 sum, which some strategies add up more exactly than others
_SMALLEST_SCALE = 0.01  # of a parameter, relative to the largest weight of the task: biases begin at zero
_VANISHED = 1e-3  # of the tolerance: what is left in fp64 of a difference that is rounding
_WARM_UP_STEPS = 2  # not counted in the time of a step


class Comparison:
    """Holds every trial against the one of `single`."""

    def __init__(self, trials: Trials, single: Trial, *, tolerance: float) -> None:
        self._trials, self._single, self._tolerance = trials, single, tolerance
        self._parameters = [name for name, _ in trials.task().named_parameters()]
        self._untouched: dict[str, Strategy] = {}  # as they were before they trained
        self._loss_scales: dict[str, float] = {}  # by phase
        for step in range(1, trials.steps + 1):
            for phase, loss in single.step(step)["losses"].items():
                self._loss_scales[phase] = max(self._loss_scales.get(phase, 0.0), abs(loss))

    def reference(self) -> ParityRow:
        """Return the row of `single` itself."""
        return self.row(REFERENCE, self._single, verdict="reference")

    def attempt(self, name: str, strategy: Strategy) -> ParityRow:
        """Train under a strategy and return its row, also when that fails."""
        self._untouched[name] = copy.deepcopy(strategy)
        try:
            trial = self._trials.train(name, strategy)
        except Exception as error:
            return ParityRow(name, "failed", error=f"{type(error).__name__}: {error}")
        row = self.row(name, trial, verdict="equal")
        return row if self.agrees(row) else replace(row, verdict="different")

    def agrees(self, row: ParityRow) -> bool:
        """Whether the differences are within the tolerance."""
        # A difference that is no number agrees with nothing.
        norms_agree = row.gradient_norm.value <= _NORM_SLACK * self._tolerance
        return norms_agree and row.loss.value <= self._tolerance and row.weights.value <= self._tolerance

    def row(self, name: str, trial: Trial, *, verdict: str) -> ParityRow:
        """Return the largest differences over all steps."""
        loss = norm = weights = Difference()
        seconds = []
        for step in range(self._trials.steps + 1):
            ours, expected = trial.step(step), self._single.step(step)
            weights = _larger(weights, self._weights(ours["weights"], expected["weights"], step))
            if step:
                for phase, scale in self._loss_scales.items():
                    losses = ours["losses"][phase], expected["losses"][phase]
                    loss = _larger(loss, _numbers(*losses, scale=scale, step=step, phase=phase))
                    norms = ours["norms"][phase], expected["norms"][phase]
                    norm = _larger(norm, _numbers(*norms, scale=abs(norms[1]), step=step, phase=phase))
                seconds.append(ours["seconds"])
        timed = sorted(seconds[_WARM_UP_STEPS:] or seconds)
        return ParityRow(name, verdict, trial.layout, loss, norm, weights, timed[len(timed) // 2], trial.bytes_a_step)

    def causes(self, rows: Sequence[ParityRow], *, device: str) -> tuple[list[str], list[str]]:
        """Return why rows differ as far as the task tells, and notes on the causes that could not be looked for."""
        trials = self._trials
        causes, notes = [], []
        again = self.attempt("again", made(REFERENCE, 1, device))
        if again.verdict == "failed":
            notes.append(f"whether two equal runs of single agree, because of {again.error}")
        elif again.weights.value != 0.0:
            where = f"step {again.weights.step}, {again.weights.parameter}"
            causes.append(
                f"two equal runs of single differ by {again.weights.value:.1e} ({where}): the task or its data is not "
                "a function of samples and seed. Look for clocks and for generators of its own, or set "
                "trainer.deterministic=true."
            )
        told = find_causes(trials.task(), trials.data(), seed=trials.seed, total_steps=trials.steps)
        causes += told.found
        notes = [f"not looked for: {what}" for what in (*notes, *told.not_looked_for)]
        return causes or self._rounding(rows, device=device), notes

    def _rounding(self, rows: Sequence[ParityRow], *, device: str) -> list[str]:
        """Return that differences are fp32's rounding, enlarged, where they vanish in fp64."""
        if self._trials.precision != "fp32":
            return []
        trials = self._trials.in_precision("fp64")
        try:
            single = trials.train(REFERENCE, made(REFERENCE, 1, device))
        except Exception:  # a task that knows fp32 only
            return []
        exact = Comparison(trials, single, tolerance=_VANISHED * self._tolerance)
        names = [row.strategy for row in rows if row.verdict == "different"]
        again = [exact.attempt(name, self._untouched[name]) for name in names]
        vanished = {row.strategy: row.weights.value for row in again if row.verdict == "equal"}
        if not vanished:
            return []
        return [
            f"in fp64 the weights of {', '.join(vanished)} agree with single to {max(vanished.values()):.1e}: the task "
            "enlarges the rounding of fp32, as units and poolings that switch do, or optimizers that divide by small "
            "gradients. Compare in fp64, which is what happens without trainer.precision."
        ]

    def _weights(self, ours: dict[str, Tensor], expected: dict[str, Tensor], step: int) -> Difference:
        sizes = {name: _size(expected[name]) for name in self._parameters}
        floor = _SMALLEST_SCALE * max(sizes.values(), default=0.0)
        largest = Difference()
        for name in self._parameters:
            scale = max(sizes[name], floor)
            apart = distance(ours[name], expected[name])
            largest = _larger(largest, Difference(_relative(apart, scale), step, name))
        return largest


def _numbers(ours: float, expected: float, *, scale: float, step: int, phase: str) -> Difference:
    if ours == expected or (math.isnan(ours) and math.isnan(expected)):  # also where neither tells it
        return Difference(0.0, step)
    return Difference(_relative(abs(ours - expected), scale), step, phase)


def _relative(apart: float, scale: float) -> float:
    return apart / scale if scale > 0 and apart else apart


def _larger(left: Difference, right: Difference) -> Difference:
    """Return the larger difference, the first of equal ones; what is no number is larger than all."""
    return right if right.value > left.value or (math.isnan(right.value) and not math.isnan(left.value)) else left


def distance(left: Tensor, right: Tensor) -> float:
    """Return the largest difference between two elements."""
    if left.numel() == 0:
        return 0.0
    return float((left.detach().cpu().double() - right.detach().cpu().double()).abs().max())


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
