"""Weighted means of what steps return, kept on the device until they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainkit.distributed.collectives import Collectives
from trainkit.metric_objects import MetricObjects
from trainkit.step_output import StepOutput

_FOLD_AT = 512
"""Outputs that are kept one by one before they are summed up, which bounds memory."""
_COUNTING = "metric objects"
"""Stands among the names where a rank has metric objects: all ranks then know, without another collective."""


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
        self._objects = MetricObjects()

    def add(self, outputs: Sequence[StepOutput], *, step: int = 0) -> None:
        """Count the outputs of one window, or of one evaluation batch."""
        self._outputs += outputs
        self._steps += [step] * len(outputs)
        if len(self._outputs) >= _FOLD_AT:
            self._fold()

    def reduce(self, comm: Collectives) -> dict[str, float]:
        """Return the means over all ranks and start anew; collective, and the one place that waits for the device."""
        self._fold()
        if self._objects:
            self._sums[_COUNTING] = torch.ones(2, dtype=self._dtype, device=self._device)
        names, sums = comm.all_reduce_metrics(self._sums, device=self._device, dtype=self._dtype)
        self._sums, self._losses = {}, []
        reduced = dict(zip(names, sums.tolist(), strict=True))  # name -> [weighted sum, sum of weights]
        have_objects = reduced.pop(_COUNTING, None) is not None
        self.loss_was_finite = math.isfinite(reduced["loss"][0]) if "loss" in reduced else True
        means = {name: total / weight if weight else math.nan for name, (total, weight) in reduced.items()}
        if have_objects:
            means.update(self._objects.reduce(comm))
        return means

    def state_dict(self, comm: Collectives) -> dict[str, list[float]]:
        """Return what a checkpoint keeps: each name's weighted sum and sum of weights over all ranks; collective."""
        self._fold()
        names, sums = comm.all_reduce_metrics(self._sums, device=self._device, dtype=self._dtype)
        return dict(zip(names, sums.tolist(), strict=True))

    def load_state_dict(self, saved: Mapping[str, list[float]], comm: Collectives) -> None:
        """Go on from sums that `state_dict` returned, and from nothing else; rank 0 counts the samples of all."""
        own = saved if comm.rank == 0 else {}
        self._outputs, self._steps, self._losses = [], [], []
        self._sums = {name: torch.tensor(s, dtype=self._dtype, device=self._device) for name, s in own.items()}
        self._objects.reset()

    def first_nonfinite_step(self) -> int | None:
        """Return the first step since the last `reduce` whose loss was not finite here; waits for the device."""
        return next(iter(self.nonfinite_steps()), None)

    def nonfinite_steps(self) -> list[int]:
        """Return the steps since the last `reduce` whose loss was not finite here; waits for the device."""
        self._fold()
        # A sum is finite only if all that was added is: one number to look at as long as nothing is wrong.
        if "loss" not in self._sums or math.isfinite(float(self._sums["loss"][0])):
            return []
        found = []
        for losses, steps in self._losses:
            finite = torch.isfinite(losses).tolist()
            found += [step for step, is_finite in zip(steps, finite, strict=True) if not is_finite]
        return list(dict.fromkeys(found))

    def _fold(self) -> None:
        """Sum up the outputs kept one by one."""
        outputs, steps = self._outputs, self._steps
        self._outputs, self._steps = [], []
        for output in outputs:
            if output.objects:
                self._objects.add(output)
        losses = [output.loss for output in outputs if output.loss is not None]
        if losses:
            having = [step for step, output in zip(steps, outputs, strict=True) if output.loss is not None]
            values = self._add("loss", losses, [output.weight for output in outputs if output.loss is not None])
            self._losses.append((values, having))
        for name in dict.fromkeys(name for output in outputs for name in output.metrics):
            with_name = [output for output in outputs if name in output.metrics]
            self._add(name, [output.metrics[name] for output in with_name], [output.weight for output in with_name])

    def _add(self, name: str, values: Sequence[Tensor | float], weights: Sequence[Tensor | float]) -> Tensor:
        """Add to a name's sums, and return the values as one tensor."""
        stacked, weight = stack(values, self._device), stack(weights, self._device)  # (outputs,) each
        total = torch.stack([stacked @ weight, weight.sum()])
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        return stacked


def stack(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return numbers or scalar tensors as one tensor on the device, in double precision where there is one."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
    if len(tensors) < len(values) or any(tensor.dim() or tensor.device != device for tensor in tensors):
        tensors = [torch.as_tensor(value).to(device, dtype).reshape(()) for value in values]
    return torch.stack(tensors).to(dtype)
