"""Why a task trains to other weights when its batch is cut in another way: what its modules and its losses show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trainkit import registry
from trainkit.batches import to_device
from trainkit.data import Source
from trainkit.feed import make_feed
from trainkit.optimization import Clip, configure
from trainkit.precision import Precision
from trainkit.rng import rng_state, set_rng_state
from trainkit.settings import as_data
from trainkit.step_output import read_training_output
from trainkit.strategy import Strategy
from trainkit.task import TaskModule, has_phases
from trainkit.window import MicroBatch

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}  # relative; the second where the task insists on fp32
_MAX_NAMES = 4


@dataclass(frozen=True)
class Causes:
    """What was found."""

    found: list[str]
    not_looked_for: list[str]
    """What could not be looked at, and why."""


def find_causes(task: TaskModule, data: Any, *, seed: int, total_steps: int) -> Causes:
    """Return in words what in the task depends on how a batch is cut, with the modules' names.

    Changes the task, and raises nothing: where it cannot be looked at, that is said.
    """
    causes = Causes(_named_causes(task), [])
    try:
        steps, source = _steps(task, total_steps), as_data(data, "train").source("train")
        if source.batch_size is None:
            causes.not_looked_for.append("how losses depend on cuts, as ready-made batches are not cut")
            return causes
        whole, halves = _first_batch(source, 1, seed=seed), _first_batch(source, 2, seed=seed)
    except Exception as error:
        causes.not_looked_for.append(f"how losses depend on cuts, because of {_told(error)}")
        return causes
    for step in steps:
        try:
            causes.found.extend(_causes_of(step, task, whole, halves))
        except Exception as error:
            causes.not_looked_for.append(f"how the loss of {step.name} depends on cuts, because of {_told(error)}")
    return causes


def _named_causes(task: TaskModule) -> list[str]:
    """Return the causes that modules tell by what they are, and leave these modules without effect."""
    causes = []
    norms = _leave_out(task.train(), _looks_at_all_samples)
    if norms:
        causes.append(
            f"batch norm ({_listed(norms)}) takes its statistics from the samples of one micro-batch, so that other "
            "micro-batches give other gradients. Use GroupNorm or LayerNorm, or compare layouts of equal micro-batches."
        )
    drops = _leave_out(task, _drops)
    if drops:
        causes.append(
            f"dropout ({_listed(drops)}) draws other random numbers for each rank and micro-batch. Set p=0 to compare."
        )
    return causes


def _leave_out(task: TaskModule, is_meant: Callable[[nn.Module], bool]) -> list[str]:
    """Return the names of some modules, which evaluate from now on."""
    modules = {name: module for name, module in task.named_modules() if is_meant(module)}
    for module in modules.values():
        module.eval()
    return list(modules)


@dataclass(frozen=True)
class _Step:
    """A method of the task that returns a loss."""

    name: str
    phase: str
    parameters: list[nn.Parameter]
    """What it trains."""


def _steps(task: TaskModule, total_steps: int) -> list[_Step]:
    if not has_phases(task):
        return [_Step("training_step", "", [p for p in task.parameters() if p.requires_grad])]
    optimizations = configure(
        task, clip=Clip(), precision=Precision(), total_steps=total_steps, fused=False, skip=False
    )
    return [_Step(part.step_name, part.phase, part.parameters) for part in optimizations]


def _causes_of(step: _Step, task: TaskModule, whole: Sequence[MicroBatch], halves: Sequence[MicroBatch]) -> list[str]:
    """Return the causes that a step shows, in fp64 where it can be."""
    for parameter in task.parameters():
        parameter.requires_grad_(any(parameter is own for own in step.parameters))
    before = rng_state()
    try:
        return _causes_in(torch.float64, step, task, whole, halves)
    except Exception:  # a step may bring its inputs to fp32 by itself
        set_rng_state(before)
        return _causes_in(torch.float32, step, task, whole, halves)


def _causes_in(
    dtype: torch.dtype, step: _Step, task: TaskModule, whole: Sequence[MicroBatch], halves: Sequence[MicroBatch]
) -> list[str]:
    task.to(dtype)
    before = rng_state()
    gradients, loss = _gradients(step, task, whole, dtype)
    draws = not _same_torch_state(before)
    set_rng_state(before)
    if draws:
        return [
            f"{step.name} draws random numbers: each rank and micro-batch has its own. Draw them in the dataset, from "
            "a seed of the sample, or leave them out to compare."
        ]
    if len(halves) < 2:
        return []
    of_halves, loss_of_halves = _gradients(step, task, halves, dtype)
    worst, largest = "loss", _relative(loss, loss_of_halves)
    for name, gradient in gradients.items():
        difference = _relative(of_halves[name], gradient) if name in of_halves else 1.0
        if difference > largest:
            worst, largest = name, difference
    if largest <= _ROUNDING[loss.dtype]:
        return []
    where = f" in {step.name}" if step.phase else ""
    return [
        f"the loss of a batch{where} is not the weighted mean of the losses of its halves (they differ by "
        f"{largest:.1e}, most in {worst}): return the mean over samples, not their sum; where samples weigh unequally "
        "(tokens) return their sum of weights as 'weight'. A loss that compares samples with each other cannot be cut "
        "at all."
    ]


def _gradients(
    step: _Step, task: TaskModule, micro_batches: Sequence[MicroBatch], dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients and the loss of the weighted mean over micro-batches, in what the step computes it in."""
    task.zero_grad()
    outputs = []
    for micro_batch in micro_batches:
        batch = to_device(micro_batch.batch, torch.device("cpu"), dtype=dtype)
        returned = getattr(task, step.name)(batch)
        outputs.append(read_training_output(returned, micro_batch.num_samples, task, step.name))
    weights = [torch.as_tensor(output.weight, dtype=dtype) for output in outputs]
    losses = [output.loss for output in outputs if output.loss is not None]
    loss = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum() / sum(weights)
    loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in task.named_parameters() if p.grad is not None}
    return gradients, loss.detach().to(losses[0].dtype)


def _first_batch(source: Source, parts: int, *, seed: int) -> list[MicroBatch]:
    """Return the first global batch in one or two micro-batches; empty where it cannot be cut."""
    strategy: Strategy = registry.make("strategy", "single")
    assert source.batch_size is not None
    if parts > 1:
        if source.batch_size == 1:
            return []
        strategy.micro_batch_size = -(-source.batch_size // parts)
    window = next(iter(make_feed(source, strategy, seed=seed).windows(0, 0)))
    return window.micro_batches


def _looks_at_all_samples(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0


def _relative(left: Tensor, right: Tensor) -> float:
    scale = float(right.abs().max()) if right.numel() else 0.0
    difference = float((left - right).abs().max()) if right.numel() else 0.0
    return difference / scale if scale > 0 else difference


def _same_torch_state(before: dict[str, Any]) -> bool:
    now = rng_state()
    numpy_same = torch.equal(before["numpy"]["keys"], now["numpy"]["keys"])
    numpy_same = numpy_same and before["numpy"]["position"] == now["numpy"]["position"]
    return torch.equal(before["torch"], now["torch"]) and before["python"] == now["python"] and numpy_same


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
