"""Causes of a difference: what a step computes, in its order, and the first of it that is not that of `single`.

    samples -> random numbers -> outputs of modules -> loss -> gradients -> update

Observed when `single` and the strategy train again up to the step that differs; equal strategies are not observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.callback import Callback
from trainkit.data.batch import StepBatch
from trainkit.devices import generator_state
from trainkit.distributed.checksum import checksum
from trainkit.rng import python_rng_state
from trainkit.run import Run
from trainkit.strategy import has_full_gradients
from trainkit.tree import tensors_in, to_device

_SMALLEST_SCALE = 0.01  # of an output or gradient, relative to the largest: some are zero except for rounding
Records = Sequence[Mapping[str, Any]]
"""What each rank that reads samples of its own has observed; without copies such as the stages of a pipeline."""


@dataclass(frozen=True)
class Cause:
    """What makes a strategy differ from `single`."""

    kind: str
    """`weights`, `data`, `shapes`, `draws`, `output`, `loss`, `gradient`, `update`, `norm`, `rounding` or `unknown`."""
    text: str
    """The cause in words, and what to do."""


class StepObserver(Callback):
    """Writes what a step computes on each rank to a file, and ends the run after this step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self.is_watching = False
        self.record: dict[str, Any] = {"samples": [], "shapes": {}, "draws": [], "outputs": {}, "gradients": {}}

    def on_fit_start(self, run: Run) -> None:
        strategy = run.strategy
        self.record |= {"rank": strategy.comm.rank, "has_outputs": strategy.supports_module_hooks}
        # The loop takes the method from the object after this hook.
        vars(strategy)["forward_backward"] = partial(self._forward_backward, run, strategy.forward_backward)
        if not strategy.supports_module_hooks:
            return
        for name, module in run.task.named_modules():
            label = f"{name or 'the task'} ({type(module).__name__})"
            module.register_forward_hook(partial(self._see_output, label))
        if strategy.shards_parameters or not has_full_gradients(strategy):
            return
        for phase_optimizer in run.phase_optimizers:
            phase_optimizer.pre_clip_hooks.append(partial(self._see_gradients, run))
        # For the order of backward, which is read from `single`: strategies of several ranks have hooks of their own.
        for name, parameter in run.task.named_parameters() if strategy.comm.num_processes == 1 else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note_order, name))

    def on_step_complete(self, run: Run) -> None:
        if run.state.step == self.step:
            by_rank = {record["rank"]: record for record in run.strategy.comm.all_gather_object(self.record)}
            if run.is_main:
                torch.save(list(by_rank.values()), self.path)
            run.request_stop("the step that differs is observed")

    def _forward_backward(self, run: Run, compute: Callable[..., Any], task: nn.Module, batch: StepBatch) -> Any:
        if run.state.step + 1 != self.step:
            return compute(task, batch)
        if not self.record["draws"]:  # the first phase of the step: the others have the same batch
            for micro_batch in batch.micro_batches:
                # A list: some batches of a type of their own move in place.
                tensors = list(tensors_in(micro_batch.batch))
                tensors = to_device(tensors, torch.device("cpu"), dtype=run.precision.batch_type)
                self._see_samples(tensors, micro_batch.num_samples)
        states_before = _generators(run.strategy.devices_of_rank)
        self.is_watching = True
        try:
            return compute(task, batch)
        finally:
            self.is_watching = False
            self.record["draws"].append([states_before, _generators(run.strategy.devices_of_rank)])

    def _see_samples(self, tensors: Sequence[Tensor], count: int) -> None:
        rows = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.shape[:1] == (count,)]
        sums = [int(checksum(tensor[row] for tensor in rows)) for row in range(count)] if rows else None
        self.record["samples"].append(sums)
        self.record["shapes"][str([list(tensor.shape[1:]) for tensor in rows])] = True

    def _see_output(self, label: str, module: nn.Module, arguments: Any, output: Any) -> None:
        for index, tensor in enumerate(tensors_in(output)) if self.is_watching else ():
            if tensor.dim() and tensor.layout is torch.strided:
                name = label if index == 0 else f"{label}, part {index + 1},"
                self.record["outputs"].setdefault(name, []).append(_projected(tensor))

    def _note_order(self, name: str, parameter: Tensor) -> None:
        if self.is_watching:
            self.record["gradients"].setdefault(name, torch.empty(0))

    def _see_gradients(self, run: Run) -> None:
        for name, parameter in run.task.named_parameters() if run.state.step + 1 == self.step else ():
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                self.record["gradients"][name] = _projected(gradient.reshape(1, -1))


def explain(
    single: Records, other: Records, *, strategy: str, limit: float, differ: Mapping[str, bool], parameter: str
) -> Cause:
    """Return the first part of a step that is not that of `single`, and what to do.

    `differ` says if the loss and the weights differ after the step, most of them `parameter`, and by `grown` if weights
    did nearly as much before it.
    """
    samples, expected_samples = _samples(other), _samples(single)
    is_known = samples is not None and expected_samples is not None
    if is_known and samples != expected_samples:
        return _DATA if set().union(*(record["shapes"] for record in other)) == set(single[0]["shapes"]) else _SHAPES
    output = _first(_outputs(other), _outputs(single), limit)
    drawn = sorted({name for before, after in single[0]["draws"] for name in before if before[name] != after[name]})
    # One micro-batch with the generators of `single`: the same numbers are drawn.
    is_whole = [len(record["samples"]) for record in other] == [1]
    if drawn and not (is_whole and other[0]["draws"][0] == single[0]["draws"][0]):
        where = f", and the output of {output} differs first" if output else ""
        return Cause("draws", f"the step draws random numbers ({', '.join(drawn)}), {_DRAWS.format(where)}")
    same = "the same samples" if is_known else "perhaps the same samples (no tensor of the batch has a row for each)"
    same += " and random numbers" if drawn else " and no random numbers"
    if differ["grown"]:
        return Cause("rounding", f"{same}, but differences below the tolerance have grown. {_ROUNDING}")
    if not other[0]["has_outputs"]:
        return Cause("unknown", f"{same}. More is not told under {strategy}, {_PARTS}")
    gradient = _first(other[0]["gradients"], single[0]["gradients"], limit)
    if output:
        kind, text = "output", f"but the output of {output} differs first."
        hint = _STATISTICS if "BatchNorm" in output else "It depends on the samples or the size of a micro-batch."
    elif differ["loss"]:
        where = f", and of the gradients first that of {gradient}" if gradient else ""
        kind, text, hint = "loss", f"and modules have the same outputs, but the loss differs{where}.", _LOSS
    elif gradient:
        kind, hint = "gradient", _SETTINGS
        text = (
            f"and outputs and loss agree, but the gradient of {gradient} differs, the first in the order of backward."
        )
    elif not other[0]["gradients"]:
        kind, hint = "update", _SETTINGS
        text = f"and outputs and loss agree, but {parameter} after the step differs; no rank has its whole gradient."
    elif differ["weights"]:
        kind, hint = "update", _ROUNDING
        text = f"and outputs, loss and gradients agree, but the optimizer's update of {parameter} differs."
    else:
        kind, text, hint = "norm", "and outputs, loss, gradients and weights agree, but the logged norm differs.", ""
    # Without a split there is nothing in the task to change.
    hint = "The batch is not split either: the strategy computes something else." if is_whole else hint
    return Cause(kind, f"{same}, {text} {hint}".strip())


_DATA = Cause(
    "data",
    "the samples of the global batch are not the same. Let an item of the dataset depend on its index and on the "
    "global generators of python, numpy and torch alone, which are seeded for each sample; draw nothing in a collate.",
)
_SHAPES = Cause(
    "shapes",
    "the collate gives samples other shapes in micro-batches of other samples, such as padding to the longest, so that "
    "it is not told if they are the same. Pad all to one length to compare.",
)
_DRAWS = (
    "which are others if the batch is split{}. Draw them in the dataset, where they belong to a sample, or set p=0 of "
    "dropout, to compare."
)
_PARTS = "whose ranks run parts of modules: type strategies=[single,dp], which splits a batch too."
_STATISTICS = (
    "Its statistics are those of a micro-batch: use GroupNorm or LayerNorm to compare, or on CUDA type "
    "trainer.sync_batch_norm=true with one micro-batch on each rank."
)
_SETTINGS = "Omit settings that change gradients, such as comm_hook and reduce_dtype, to compare."
_LOSS = (
    "It depends on the split: return the mean over samples, with `weight` if they have unequal weights, or set "
    "loss_reduction = 'sum' in the task. A loss that compares samples has those of one micro-batch."
)
_ROUNDING = (
    "An optimizer that divides by gradients, such as Adam, makes rounding of those near zero as large as a step: "
    "compare in fp64, the default, or type a larger tolerance, such as tolerance=1e-3."
)


def _samples(records: Records) -> list[int] | None:
    """Return the checksums of the samples of all ranks, sorted, as their order is that of the split."""
    parts = [part for record in records for part in record["samples"]]
    return None if None in parts else sorted(number for part in parts for number in part)


def _outputs(records: Records) -> dict[str, Tensor]:
    """Return the numbers of all rows of each output, sorted; in the order of the calls."""
    parts: dict[str, list[Tensor]] = {}
    for record in records:
        for name, rows in record["outputs"].items():
            parts.setdefault(name, []).extend(rows)
    return {name: torch.cat(rows).sort().values for name, rows in parts.items()}


def _first(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float) -> str:
    """Return the first name whose numbers differ by more than the limit, relative to their scale; "" if none does."""
    finite = {name: rows[rows.isfinite()] for name, rows in expected.items()}
    scales = {name: float(rows.abs().max()) if len(rows) else 0.0 for name, rows in finite.items()}
    floor = _SMALLEST_SCALE * max(scales.values(), default=0.0)
    for name, rows in expected.items():
        # Another number of rows: they are not those of samples.
        if name in actual and actual[name].shape == rows.shape:
            atol = limit * max(scales[name], floor)
            if not torch.allclose(actual[name], rows, rtol=0.0, atol=atol, equal_nan=True):
                return name
    return ""


def _projected(tensor: Tensor) -> Tensor:
    """Return one number for each row, as a sum over its elements with weights that look random."""
    rows = tensor.detach().cpu()
    rows = (torch.view_as_real(rows) if rows.is_complex() else rows).double()
    rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    # Not drawn: a draw in the step would be taken for one of the task. Not checksums: rounding depends on the split.
    return rows @ torch.arange(1, rows.shape[1] + 1, dtype=torch.float64).square().cos()


def _generators(devices: Sequence[torch.device]) -> dict[str, str]:
    """Return a hash of the state of each global generator."""
    states: dict[str, Any] = dict(zip(("python", "numpy"), python_rng_state(), strict=False))
    states["torch"] = torch.get_rng_state().numpy().tobytes()
    for device in devices:
        if (state := generator_state(device)) is not None:
            states[f"torch on {device.type}"] = state.numpy().tobytes()
    return {name: sha256(repr(state).encode()).hexdigest() for name, state in states.items()}
