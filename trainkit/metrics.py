"""Weighted means of what steps return, kept on the device until they are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.step_output import StepOutput

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

_FOLD_AT = 512
"""Outputs that are kept one by one before they are summed up, which bounds memory."""


@dataclass
class _Column:
    """One name's values, in the order in which they came."""

    values: list[Tensor | float] = field(default_factory=list)
    weights: list[Tensor | float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


class WeightedMeans:
    """Collects step outputs and gives the mean of each value over all samples of all ranks.

    Adding an output only appends it to a list: nothing is computed and nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss_was_finite = True
        """Whether every loss of every rank was, that went into the last `reduce`."""
        self._device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._outputs: list[StepOutput] = []
        self._steps: list[int] = []
        self._sums: dict[str, Tensor] = {}  # name -> (2,): weighted sum, sum of weights
        self._losses: list[tuple[Tensor, list[int]]] = []  # losses (outputs,) and the steps that they are of

    def add(self, outputs: Sequence[StepOutput], *, step: int = 0) -> None:
        """Count the outputs of one window, or of one evaluation batch."""
        self._outputs += outputs
        self._steps += [step] * len(outputs)
        if len(self._outputs) >= _FOLD_AT:
            self._fold()

    def reduce(self, strategy: Strategy) -> dict[str, float]:
        """Return the means over all ranks and start anew; collective, and the one place that waits for the device."""
        self._fold()
        names, sums = strategy.sum_named(self._sums, device=self._device, dtype=self._dtype)
        self._sums, self._losses = {}, []
        reduced = dict(zip(names, sums.tolist(), strict=True))  # name -> [weighted sum, sum of weights]
        self.loss_was_finite = math.isfinite(reduced["loss"][0]) if "loss" in reduced else True
        return {name: total / weight if weight else math.nan for name, (total, weight) in reduced.items()}

    def first_nonfinite_step(self) -> int | None:
        """Return the first step since the last `reduce` whose loss was not finite here; waits for the device."""
        self._fold()
        # A sum is finite only if all that was added is: one number to look at as long as nothing is wrong.
        if "loss" not in self._sums or math.isfinite(float(self._sums["loss"][0])):
            return None
        for losses, steps in self._losses:
            for step, finite in zip(steps, torch.isfinite(losses).tolist(), strict=True):
                if not finite:
                    return step
        return None

    def _fold(self) -> None:
        """Sum up the outputs kept one by one."""
        columns: dict[str, _Column] = {}
        for output, step in zip(self._outputs, self._steps, strict=True):
            named = output.metrics.items() if output.loss is None else (("loss", output.loss), *output.metrics.items())
            for name, value in named:
                column = columns[name] if name in columns else columns.setdefault(name, _Column())
                column.values.append(value)
                column.weights.append(output.weight)
                column.steps.append(step)
        self._outputs, self._steps = [], []
        for name, column in columns.items():
            values, weights = self._stack(column.values), self._stack(column.weights)  # (outputs,) each
            total = torch.stack([values @ weights, weights.sum()])
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            if name == "loss":
                self._losses.append((values, column.steps))

    def _stack(self, values: Sequence[Tensor | float]) -> Tensor:
        """Return numbers or scalar tensors as one tensor on the device."""
        if not any(isinstance(value, Tensor) for value in values):
            return torch.tensor(values, dtype=self._dtype).to(self._device, non_blocking=True)
        scalars = [value if isinstance(value, Tensor) else torch.tensor(value) for value in values]
        if any(scalar.dim() for scalar in scalars):
            scalars = [scalar.reshape(()) for scalar in scalars]
        if len({(scalar.device, scalar.dtype) for scalar in scalars}) > 1:
            scalars = [scalar.to(self._device, self._dtype) for scalar in scalars]
        return torch.stack(scalars).to(self._device, self._dtype)
