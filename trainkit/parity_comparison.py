"""Every trial held against the one of `single`, step by step, and what may explain a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from trainkit.parity_causes import find_causes
from trainkit.parity_report import Difference, ParityRow
from trainkit.parity_trials import REFERENCE, Trial, Trials, made
from trainkit.strategy import Strategy

_NORM_SLACK = 10  # a norm is a long fp32 sum, which some strategies add up more exactly than others
_ROUNDING_SLACK = 10  # between one other order of additions and that of a strategy
_SMALLEST_SCALE = 0.01  # of a parameter, relative to the largest weight of the task: biases begin at zero
_WARM_UP_STEPS = 2  # not counted in the time of a step


class Comparison:
    """Holds every trial against the one of `single`."""

    def __init__(self, trials: Trials, single: Trial, *, tolerance: float) -> None:
        self._trials, self._single, self._tolerance = trials, single, tolerance
        self._parameters = [name for name, _ in trials.task().named_parameters()]
        losses = [abs(single.step(step)["loss"]) for step in range(1, trials.steps + 1)]
        self._loss_scale = max(losses)

    def reference(self) -> ParityRow:
        """Return the row of `single` itself."""
        return self.row(REFERENCE, self._single, verdict="reference")

    def attempt(self, name: str, strategy: Strategy) -> ParityRow:
        """Train under a strategy and return its row, also when that fails."""
        try:
            trial = self._trials.train(name, strategy)
        except Exception as error:
            return ParityRow(name, "failed", error=f"{type(error).__name__}: {error}")
        row = self.row(name, trial, verdict="equal")
        return row if self.agrees(row) else replace(row, verdict="different")

    def agrees(self, row: ParityRow) -> bool:
        """Whether the differences are within the tolerance."""
        return self._same_gradients(row) and row.weights.value <= self._tolerance

    def _same_gradients(self, row: ParityRow) -> bool:
        # A difference that is no number agrees with nothing.
        return row.loss.value <= self._tolerance and row.gradient_norm.value <= _NORM_SLACK * self._tolerance

    def row(self, name: str, trial: Trial, *, verdict: str) -> ParityRow:
        """Return the largest differences over all steps."""
        loss = norm = weights = Difference()
        seconds = []
        for step in range(self._trials.steps + 1):
            ours, expected = trial.step(step), self._single.step(step)
            weights = _larger(weights, self._weights(ours["weights"], expected["weights"], step))
            if step:
                loss = _larger(loss, _numbers(ours["loss"], expected["loss"], self._loss_scale, step))
                norm = _larger(norm, _numbers(ours["norm"], expected["norm"], abs(expected["norm"]), step))
                seconds.append(ours["seconds"])
        timed = sorted(seconds[_WARM_UP_STEPS:] or seconds)
        return ParityRow(name, verdict, trial.layout, loss, norm, weights, timed[len(timed) // 2], trial.bytes_a_step)

    def explained(self, rows: Sequence[ParityRow], *, device: str) -> tuple[list[ParityRow], list[str]]:
        """Return the rows, with what is rounding called so, and why others differ as far as the task tells."""
        trials = self._trials
        again = self.row("again", trials.train("again", made(REFERENCE, 1, device)), verdict="")
        causes = []
        if again.weights.value != 0.0:
            where = f"step {again.weights.step}, {again.weights.parameter}"
            causes.append(
                f"two equal runs of single differ by {again.weights.value:.1e} ({where}): the task or its data is not "
                "a function of samples and seed. Look for clocks and for generators of its own, or set "
                "trainer.deterministic=true."
            )
        causes += find_causes(trials.task(), trials.data(), seed=trials.seed)
        return (list(rows), causes) if causes else self._rounded(rows, device=device)

    def _rounded(self, rows: Sequence[ParityRow], *, device: str) -> tuple[list[ParityRow], list[str]]:
        """Hold the rows against what another order of additions does to `single` itself."""
        halves = made(REFERENCE, 1, device)
        halves.accumulate = 2
        floor = self.attempt("single in halves", halves)
        if floor.verdict == "failed":  # a batch that has no halves
            return list(rows), []
        limit = _ROUNDING_SLACK * floor.weights.value
        judged = [
            replace(row, verdict="rounding")
            if row.verdict == "different" and self._same_gradients(row) and row.weights.value <= limit
            else row
            for row in rows
        ]
        if all(row.verdict != "rounding" for row in judged):
            return judged, []
        cause = (
            f"losses and gradients agree, and single itself differs by {floor.weights.value:.1e} when it takes each "
            "batch in two halves: the optimizer enlarges rounding. Compare in trainer.precision=fp64 to see it vanish."
        )
        return judged, [cause]

    def _weights(self, ours: dict[str, Tensor], expected: dict[str, Tensor], step: int) -> Difference:
        sizes = {name: _size(expected[name]) for name in self._parameters}
        floor = _SMALLEST_SCALE * max(sizes.values(), default=0.0)
        largest = Difference()
        for name in self._parameters:
            scale = max(sizes[name], floor)
            apart = distance(ours[name], expected[name])
            largest = _larger(largest, Difference(_relative(apart, scale), step, name))
        return largest


def _numbers(ours: float, expected: float, scale: float, step: int) -> Difference:
    if math.isnan(ours) and math.isnan(expected):  # neither tells it
        return Difference(0.0, step)
    return Difference(_relative(abs(ours - expected), scale), step)


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
