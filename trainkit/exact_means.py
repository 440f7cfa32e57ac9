"""Weighted means whose sums are not rounded: the same bits in whatever order, on however many ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.metrics import stack
from trainkit.step_output import StepOutput

_FRACTION_BITS = 1074
"""No double needs more bits after the point."""


@dataclass
class ExactSum:
    """A sum of doubles as one whole number of units of 2 ** -1074, and what was not finite by itself."""

    units: int = 0
    not_finite: float = 0.0

    def add(self, value: float) -> None:
        """Add a number, without rounding the sum."""
        if math.isfinite(value):
            numerator, denominator = value.as_integer_ratio()  # a power of two
            self.units += numerator << (_FRACTION_BITS + 1 - denominator.bit_length())
        else:
            self.not_finite += value

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

    def _sum(self, values: Sequence[Tensor | float], outputs: Sequence[StepOutput]) -> tuple[ExactSum, ExactSum]:
        total, weight = ExactSum(), ExactSum()
        weights = stack([output.weight for output in outputs], self._device).tolist()
        precision = _precision_of(values[0])
        for value, counted in zip(stack(values, self._device).tolist(), weights, strict=True):
            total.add(_product(value, counted, precision))
            weight.add(counted)
        return total, weight


def _precision_of(value: Tensor | float) -> float:
    """Return the relative distance of neighbouring numbers of a value's type."""
    is_known = isinstance(value, Tensor) and value.is_floating_point()
    return torch.finfo(value.dtype if is_known and isinstance(value, Tensor) else torch.float64).eps


def _product(mean: float, weight: float, precision: float) -> float:
    """Return what a batch adds to a sum: its mean times its weight.

    The share of right answers is a whole number again, as it was before the task divided it, and not the neighbour of
    one: so it does not depend on how samples are cut into batches.
    """
    product = mean * weight
    doubt = 2 * precision * abs(product)
    if doubt < 0.25 and abs(product - round(product)) <= doubt:  # false where it is not finite
        return float(round(product))
    return product


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
