"""Why a task trains to other weights when its batch is cut in another way: what its modules and its losses show."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trainkit import registry
from trainkit.batches import to_device
from trainkit.data import Data
from trainkit.feed import make_feed
from trainkit.rng import rng_state, set_rng_state
from trainkit.step_output import read_training_output
from trainkit.strategy import Strategy
from trainkit.task import TaskModule
from trainkit.window import MicroBatch

_ROUNDING = 1e-8  # relative, in fp64
_MAX_NAMES = 4


def find_causes(task: TaskModule, data: Any, *, seed: int) -> list[str]:
    """Return in words what in the task depends on how a batch is cut, with the modules' names."""
    task = copy.deepcopy(task).double().train()
    norms = [name for name, module in task.named_modules() if _looks_at_all_samples(module)]
    drops = [name for name, module in task.named_modules() if _drops(module)]
    causes = []
    if norms:
        causes.append(
            f"batch norm ({_listed(norms)}) takes its statistics from the samples of one micro-batch, so that other "
            "micro-batches give other gradients. Use GroupNorm or LayerNorm, or compare layouts of equal micro-batches."
        )
    if drops:
        causes.append(
            f"dropout ({_listed(drops)}) draws other random numbers for each rank and micro-batch. Set p=0 to compare."
        )
    if not isinstance(data, Data):
        return causes
    whole, halves = _first_batch(data, 1, seed=seed), _first_batch(data, 2, seed=seed)
    before = rng_state()
    gradients, loss = _gradients(task, whole)
    draws = not _same_torch_state(before)
    set_rng_state(before)
    if draws and not drops:
        causes.append(
            "training_step draws random numbers: each rank and micro-batch has its own. Draw them in the dataset, from "
            "a seed of the sample, or leave them out to compare."
        )
    if not draws:
        for module in task.modules():
            if _looks_at_all_samples(module):
                module.eval()  # what is known already
        if norms:
            gradients, loss = _gradients(task, whole)
        causes += _not_a_mean(task, gradients, loss, halves)
    return causes


def _not_a_mean(
    task: TaskModule, gradients: dict[str, Tensor], loss: Tensor, halves: Sequence[MicroBatch]
) -> list[str]:
    """Return the cause that a batch's loss is not the mean of its halves' losses, if it is not."""
    if len(halves) < 2:
        return []
    of_halves, loss_of_halves = _gradients(task, halves)
    worst, largest = "loss", _relative(loss, loss_of_halves)
    for name, gradient in gradients.items():
        difference = _relative(of_halves[name], gradient) if name in of_halves else 1.0
        if difference > largest:
            worst, largest = name, difference
    if largest <= _ROUNDING:
        return []
    return [
        f"the loss of a batch is not the weighted mean of the losses of its halves (they differ by {largest:.1e}, most "
        f"in {worst}): return the mean over samples, not their sum; where samples weigh unequally (tokens) return "
        "their sum of weights as 'weight'. A loss that compares samples with each other cannot be cut at all."
    ]


def _gradients(task: TaskModule, micro_batches: Sequence[MicroBatch]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients and the loss of the weighted mean over micro-batches."""
    task.zero_grad()
    outputs = []
    for micro_batch in micro_batches:
        batch = to_device(micro_batch.batch, torch.device("cpu"), dtype=torch.float64)
        outputs.append(read_training_output(task.training_step(batch), micro_batch.num_samples, task))
    weights = [torch.as_tensor(output.weight, dtype=torch.float64) for output in outputs]
    losses = [output.loss for output in outputs if output.loss is not None]
    loss = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum() / sum(weights)
    loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in task.named_parameters() if p.grad is not None}
    return gradients, loss.detach()


def _first_batch(data: Data, parts: int, *, seed: int) -> list[MicroBatch]:
    """Return the first global batch in one or two micro-batches; empty where it cannot be cut."""
    strategy: Strategy = registry.make("strategy", "single")
    source = data.source("train")
    if parts > 1:
        if source.batch_size == 1:
            return []
        strategy.micro_batch_size = None if source.batch_size is None else -(-source.batch_size // parts)
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


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
