"""Weighted means of step outputs, and their metric objects, accumulated on the device until they are logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.devices import widest_float
from trainkit.distributed.collectives import Collectives
from trainkit.errors import UserError
from trainkit.metrics.latest import LatestLoss
from trainkit.metrics.step_output import StepOutput
from trainkit.metrics.sync import MetricShard, compute_synced, metrics_in, reset_all, states_on_host

_FOLD_AT = 512
"""Outputs that are kept one by one before they are summed up, which bounds memory."""
_NEAR = 8  # outputs with whose losses that of a small micro-batch is compared
_COMPARED = 64
"""Outputs whose losses are compared with their numbers of samples, unless there are more since the last log."""
_CHECKSUM = "checksum of replicas"
_FEW = 0.4  # of the samples of the largest micro-batch: a mean over so few is seldom as small as a sum over them
_HAS_OBJECTS = "metric objects"
"""A name among the sums where a rank has metric objects: all ranks then know, without another collective."""


class _Losses(NamedTuple):
    """Losses that were summed up together."""

    values: Tensor
    """Shape (outputs,), on the device."""
    weights: Tensor
    """Shape (outputs,)."""
    steps: list[int]
    sizes: list[float]
    """The samples of each; fewer numbers if the task gives weights."""


class WeightedMeans:
    """Means of each value that steps return, over all samples of all ranks, summed in float64.

    Adding an output only appends it to a list: nothing is computed and nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss_was_finite = True
        """Whether every loss of every rank in the last `reduce` was finite."""
        self.loss_grows_with_samples = False
        """Whether the losses of small and large micro-batches in the last `reduce` look like sums over samples."""
        self.latest: LatestLoss | None = None
        """Gets the losses, if a display shows them between log points."""
        self.checksum_sums: list[float] | None = None
        """The sums over ranks of what the last `reduce` got as its checksum."""
        self._device = device
        self._dtype = widest_float(device)
        self._outputs: list[StepOutput] = []
        self._steps: list[int] = []
        self._sums: dict[str, Tensor] = {}  # name -> (2,): weighted sum, sum of weights
        self._losses: list[_Losses] = []
        self._is_reduced = False  # `_losses` are those of the last `reduce`
        self._earlier_losses: list[_Losses] = []  # of the last few outputs before
        self._objects = MetricAccumulator()

    def add(self, outputs: Sequence[StepOutput], *, step: int = 0) -> None:
        """Count the outputs of one step, or of one evaluation batch."""
        self._outputs += outputs
        self._steps += [step] * len(outputs)
        if self.latest is not None:
            self.latest.offer(outputs, step)
        if len(self._outputs) >= _FOLD_AT:
            self._fold()

    def reduce(self, collectives: Collectives, *, checksum: Tensor | None = None) -> dict[str, float]:
        """Return the means over all ranks and clear them; collective, and the one place that waits for the device.

        The two numbers in `checksum` are summed over ranks along with them.
        """
        self._fold()
        if checksum is not None:
            self._sums[_CHECKSUM] = checksum.to(self._device, self._dtype)
        if self._objects:
            self._sums[_HAS_OBJECTS] = torch.ones(2, dtype=self._dtype, device=self._device)
        names, sums = collectives.all_reduce_metrics(self._sums, device=self._device, dtype=self._dtype)
        # With those before: a log point after each step sees micro-batches of one size only.
        earlier, new = self._earlier_losses, [] if self._is_reduced else self._losses
        while earlier and sum(len(losses.steps) for losses in (*earlier, *new)) > _COMPARED:
            earlier = earlier[1:]
        self._earlier_losses = [*earlier, *new]
        self.loss_grows_with_samples = _grow_with_samples(self._earlier_losses)
        self._sums, self._is_reduced = {}, True
        reduced = dict(zip(names, sums.tolist(), strict=True))  # name -> [weighted sum, sum of weights]
        self.checksum_sums = reduced.pop(_CHECKSUM, None)
        have_objects = reduced.pop(_HAS_OBJECTS, None) is not None
        self.loss_was_finite = math.isfinite(reduced["loss"][0]) if "loss" in reduced else True
        means = {name: total / weight if weight else math.nan for name, (total, weight) in reduced.items()}
        if have_objects:
            means.update(self._objects.reduce(collectives))
        return means

    def state_dict(self, collectives: Collectives) -> dict[str, list[float]]:
        """Return each name's weighted sum and sum of weights over all ranks, for a checkpoint; collective."""
        self._fold()
        names, sums = collectives.all_reduce_metrics(self._sums, device=self._device, dtype=self._dtype)
        return dict(zip(names, sums.tolist(), strict=True))

    def load_state_dict(self, saved: Mapping[str, list[float]], collectives: Collectives) -> None:
        """Replace the sums by those of a `state_dict`; rank 0 counts the samples of all ranks."""
        counted = saved if collectives.rank == 0 else {}
        self._outputs, self._steps, self._losses, self._is_reduced = [], [], [], False
        self._earlier_losses = []
        self._sums = {name: torch.tensor(s, dtype=self._dtype, device=self._device) for name, s in counted.items()}
        self._objects.reset()

    def first_nonfinite_step(self) -> int | None:
        """Return the first step since the last `reduce` whose loss was not finite here; waits for the device."""
        return next(iter(self.nonfinite_steps()), None)

    def nonfinite_steps(self) -> list[int]:
        """Return the steps since the last `reduce` whose loss was not finite here; waits for the device."""
        self._fold()
        # A sum is finite only if all its terms are: usually one number is read.
        if "loss" not in self._sums or math.isfinite(float(self._sums["loss"][0])):
            return []
        nonfinite = []
        for losses in self._losses:
            finite = torch.isfinite(losses.values).tolist()
            nonfinite += [step for step, is_finite in zip(losses.steps, finite, strict=True) if not is_finite]
        return list(dict.fromkeys(nonfinite))

    def losses_by_step(self) -> dict[int, float]:
        """Return the mean loss of this rank at each step since the last `reduce`, or up to it if none came since.

        Waits for the device.
        """
        self._fold()
        sums: dict[int, list[float]] = {}  # step -> weighted sum, sum of weights
        for losses in self._losses:
            for step, loss, weight in zip(losses.steps, losses.values.tolist(), losses.weights.tolist(), strict=True):
                of_step = sums.setdefault(step, [0.0, 0.0])
                of_step[0] += loss * weight
                of_step[1] += weight
        return {step: total / weight if weight else math.nan for step, (total, weight) in sums.items()}

    def _fold(self) -> None:
        """Sum up the outputs that are kept one by one."""
        outputs, steps = self._outputs, self._steps
        self._outputs, self._steps = [], []
        for output in outputs:
            if output.objects:
                self._objects.add(output)
        if not outputs:
            return
        if self._is_reduced:
            self._losses, self._is_reduced = [], False
        columns: dict[str, list[Tensor | float]] = {}
        columns["loss"] = [output.loss for output in outputs if output.loss is not None]
        for name in dict.fromkeys(chain.from_iterable(output.metrics for output in outputs)):
            columns[name] = [output.metrics[name] for output in outputs if name in output.metrics]
        weights = _stack([output.weight for output in outputs], self._device)  # (outputs,)
        for name, values in columns.items():
            if not values:  # no output has a loss
                continue
            stacked, weight = _stack(values, self._device), weights
            if len(values) < len(outputs):
                with_name = [o for o in outputs if (o.loss is not None if name == "loss" else name in o.metrics)]
                weight = _stack([output.weight for output in with_name], self._device)
            total = torch.stack([stacked @ weight, weight.sum()])
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            if name == "loss":
                of_loss = [step for step, output in zip(steps, outputs, strict=True) if output.loss is not None]
                sizes = [float(o.weight) for o in outputs if o.loss is not None and not o.own_weight]
                self._losses.append(_Losses(stacked, weight, of_loss, sizes))


class MetricAccumulator:
    """The metric objects that steps have returned, by name, until a pass ends."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, tuple[nn.Module, int]]] = {}  # name -> id -> object, samples
        self._is_elsewhere = False  # on another process that shares this one's samples

    def __bool__(self) -> bool:
        return bool(self._found) or self._is_elsewhere

    def add(self, output: StepOutput) -> None:
        """Keep the metric objects of one output."""
        for name, metric, num_samples in output.objects:
            if metric is None:
                self._is_elsewhere = True
                continue
            of_name = self._found.setdefault(name, {})
            # By id, which stays unique: the table holds the object. Each replica of dp has an object of the same name.
            of_name[id(metric)] = (metric, of_name.get(id(metric), (metric, 0))[1] + num_samples)

    def reduce(self, collectives: Collectives) -> dict[str, float]:
        """Return the metrics over the samples of all ranks and reset the objects; collective.

        Each name is computed by the first process that counted it, so every rank has the same number.
        """
        local_shards = {
            name: [MetricShard(states_on_host(metrics_in(metric)), samples) for metric, samples in of_name.values()]
            for name, of_name in self._found.items()
        }
        counted: dict[str, dict[int, list[MetricShard]]] = {}  # name -> rank -> shards
        owners: dict[str, int] = {}
        # Collective: every rank comes here, as `_HAS_OBJECTS` told all of them.
        for process, (rank, of_process) in enumerate(collectives.all_gather_object((collectives.rank, local_shards))):
            for name, shards in of_process.items():
                owners.setdefault(name, process)
                counted.setdefault(name, {}).setdefault(rank, shards)  # processes that share samples count once
        local_values: dict[str, float] = {}
        for name, of_rank in counted.items():
            if owners[name] == collectives.process:
                metric, _ = next(iter(self._found[name].values()))
                # Computed once and gathered again, as the results of several processes could differ by rounding.
                local_values |= _numbers(name, compute_synced(metric, list(chain.from_iterable(of_rank.values()))))
        self.reset()
        return {
            name: value for numbers in collectives.all_gather_object(local_values) for name, value in numbers.items()
        }

    def reset(self) -> None:
        """Reset every object to its initial state."""
        reset_all(metric for of_name in self._found.values() for metric, _ in of_name.values())
        self._found.clear()
        self._is_elsewhere = False


def _grow_with_samples(compared: Sequence[_Losses]) -> bool:
    """Return True if the losses of micro-batches with few samples are smaller in proportion; waits for the device."""
    sizes = [size for losses in compared for size in losses.sizes]
    largest = max(sizes, default=0)
    if not sizes or min(sizes) > _FEW * largest or sum(len(losses.steps) for losses in compared) != len(sizes):
        return False
    values = torch.cat([losses.values for losses in compared]).tolist()
    ratios = []
    for index, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if 0 < size <= _FEW * largest:
            # Those before it, as losses change in training; of an interval that begins with it those after.
            near = range(max(0, index - _NEAR), min(len(sizes), max(index, _NEAR) + 1))
            full = [values[other] for other in near if sizes[other] == largest]
            mean = sum(full) / len(full) if full else 0.0
            ratios.append(value / mean * largest / size if mean > 0 else math.nan)
    # A mean does not depend on the number of samples; a sum is smaller in proportion, give or take a third.
    return bool(ratios) and all(0.75 < ratio < 1.33 for ratio in ratios)


def _numbers(name: str, computed: Any) -> dict[str, float]:
    """Return a metric's result as numbers by name; a dict's entries lie below its name."""
    if isinstance(computed, Mapping):
        return {f"{name}/{key}": _number(f"{name}/{key}", value) for key, value in computed.items()}
    return {name: _number(name, computed)}


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserError(
            f"the metric {name!r} computed a tensor of shape {tuple(value.shape)}; what is logged is a number. Let "
            "compute return a scalar or a dict of scalars, for example {'class_0': value[0], 'class_1': value[1]}."
        )
    return float(value)


def _stack(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return numbers or scalar tensors as one tensor on the device, in double precision where there is one."""
    dtype = widest_float(device)
    kinds = set(map(type, values))
    if kinds == {Tensor}:
        with suppress(RuntimeError):  # of different shapes, or on different devices
            stacked = torch.stack(values)  # type: ignore[arg-type] # all are tensors
            if stacked.dim() == 1 and stacked.device == device:
                return stacked.to(dtype)
    elif not any(issubclass(kind, Tensor) for kind in kinds):
        # From the host without waiting for the device.
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
    return torch.stack([torch.as_tensor(value).to(device, dtype).reshape(()) for value in values])
