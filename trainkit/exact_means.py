"""Weighted means without rounding until the end: the same bits in whatever order, on however many ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.metrics import stack
from trainkit.step_output import StepOutput

if TYPE_CHECKING:
    import torch

_FRACTION_BITS = 2 * 1074
"""No product of two doubles needs more bits after the point."""


@dataclass
class ExactSum:
    """A sum of doubles as one whole number of units of 2 ** -2148, and what was not finite by itself."""

    units: int = 0
    not_finite: float = 0.0

    def add(self, value: float, times: float = 1.0) -> None:
        """Add a product, without rounding it."""
        if not (math.isfinite(value) and math.isfinite(times)):
            self.not_finite += value * times
            return
        first, below = value.as_integer_ratio()
        second, below_second = times.as_integer_ratio()
        # Denominators are powers of two.
        self.units += (first * second) << (_FRACTION_BITS + 2 - below.bit_length() - below_second.bit_length())

    def include(self, other: ExactSum) -> None:
        """Add another sum."""
        self.units += other.units
        self.not_finite += other.not_finite


Sums = dict[str, tuple[ExactSum, ExactSum]]
"""Name -> sum of weighted values, sum of weights."""


class ExactMeans:
    """Collects what the batches of an evaluation gave; nothing is computed or waits for the device before the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outputs: list[StepOutput] = []

    def add(self, output: StepOutput) -> None:
        """Count the output of one batch."""
        self._outputs.append(output)

    def sums(self) -> Sums:
        """Return the sums over this rank's batches; waits for the device."""
        outputs = self._outputs
        losses = [output for output in outputs if output.loss is not None]
        sums = {"loss": self._sum([o.loss for o in losses if o.loss is not None], losses)} if losses else {}
        for name in dict.fromkeys(name for output in outputs for name in output.metrics):
            having = [output for output in outputs if name in output.metrics]
            sums[name] = self._sum([output.metrics[name] for output in having], having)
        return sums

    def _sum(self, values: Sequence[torch.Tensor | float], outputs: Sequence[StepOutput]) -> tuple[ExactSum, ExactSum]:
        total, weight = ExactSum(), ExactSum()
        weights = stack([output.weight for output in outputs], self._device).tolist()
        for value, counted in zip(stack(values, self._device).tolist(), weights, strict=True):
            total.add(value, counted)
            weight.add(counted)
        return total, weight


def means_over(ranks: Mapping[int, Sums]) -> dict[str, float]:
    """Return the means over what all ranks have summed up, each rounded once."""
    together: Sums = {}
    for sums in ranks.values():
        for name, (total, weight) in sums.items():
            own = together.setdefault(name, (ExactSum(), ExactSum()))
            own[0].include(total)
            own[1].include(weight)
    return {name: _quotient(total, weight) for name, (total, weight) in together.items()}


def _quotient(total: ExactSum, weight: ExactSum) -> float:
    if not math.isfinite(total.not_finite) or not math.isfinite(weight.not_finite):
        return total.not_finite / (weight.not_finite or 1.0)
    return total.units / weight.units if weight.units else math.nan
