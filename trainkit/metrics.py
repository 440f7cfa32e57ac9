"""Weighted means of what steps return, kept on the device until they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.step_output import StepOutput

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

_FOLD_AT = 512
"""Outputs that are kept one by one before they are summed up, which bounds memory."""
_NEVER = 2**62


class WeightedMeans:
    """Collects step outputs and gives the mean of each value over all samples of all ranks.

    Adding an output only appends it to a list: nothing is computed and nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._outputs: list[StepOutput] = []
        self._steps: list[int] = []
        self._first_bad: Tensor | None = None
        self._sums: dict[str, Tensor] = {}  # name -> (2,): weighted sum, sum of weights

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
        self._sums, self._first_bad = {}, None
        if not names:
            return {}
        totals, weights = sums.unbind(1)  # (names,) each
        means = (totals / weights).tolist()
        return dict(zip(names, means, strict=True))

    def first_nonfinite_step(self) -> int | None:
        """Return the first step since the last `reduce` whose loss was not finite here; waits for the device."""
        self._fold()
        step = _NEVER if self._first_bad is None else int(self._first_bad)
        return None if step == _NEVER else step

    def _fold(self) -> None:
        """Sum up the outputs kept one by one."""
        self._note_nonfinite()
        values: dict[str, list[Tensor | float]] = {}
        weights: dict[str, list[Tensor | float]] = {}
        for output in self._outputs:
            named = output.metrics.items() if output.loss is None else [("loss", output.loss), *output.metrics.items()]
            for name, value in named:
                values.setdefault(name, []).append(value)
                weights.setdefault(name, []).append(output.weight)
        self._outputs, self._steps = [], []
        for name, collected in values.items():
            weight = self._stack(weights[name])  # (outputs,)
            total = torch.stack([(self._stack(collected) * weight).sum(), weight.sum()])
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def _note_nonfinite(self) -> None:
        """Keep on the device the first step whose loss was not finite."""
        losses = [output.loss for output in self._outputs if output.loss is not None]
        if not losses:
            return
        pairs = zip(self._outputs, self._steps, strict=True)
        numbers = torch.tensor([step for output, step in pairs if output.loss is not None])
        numbers = numbers.to(self._device, non_blocking=True)
        bad = torch.where(torch.isfinite(torch.stack(losses)), _NEVER, numbers).min()
        self._first_bad = bad if self._first_bad is None else torch.minimum(self._first_bad, bad)

    def _stack(self, values: list[Tensor | float]) -> Tensor:
        """Return numbers or scalar tensors as one tensor on the device."""
        if all(isinstance(value, Tensor) for value in values):
            stacked = torch.stack([value.detach().reshape(()) for value in values if isinstance(value, Tensor)])
            return stacked.to(self._device, self._dtype)
        if not any(isinstance(value, Tensor) for value in values):
            return torch.tensor(values, dtype=self._dtype).to(self._device, non_blocking=True)
        return torch.stack([torch.as_tensor(v, dtype=self._dtype, device=self._device).reshape(()) for v in values])
