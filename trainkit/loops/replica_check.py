"""ReplicaCheck: the replicas of a task have the same weights, compared by checksums.

    rank 0   weights --> checksum c --+--> sum of c, sum of c*c --> equal on all ranks: ranks * sum(c*c) == sum(c) ** 2
    rank 1   weights --> checksum c --+    these travel with the metrics of a log point

What a step or a callback writes by itself, from its samples or from random numbers, no strategy averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from trainkit.data.batch import StepBatch
from trainkit.distributed.collectives import dense_parts
from trainkit.errors import UserError
from trainkit.loops.phases import PhaseStep
from trainkit.loops.run import Run
from trainkit.metrics.step_output import StepOutput

_MODULUS = 1_048_573  # a prime below 2**20: the sum of squares over 8,192 ranks is exact in float64
_FIRST_STEPS = 2  # compared before they are made: a step that writes to a parameter mostly does it from the beginning
_SMALL = 65_536  # elements: smaller tensors are joined, as calling a kernel costs more than what it reads


class ReplicaCheck:
    """Compares the replicas of the task in the first steps, at log points and before saves."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._has_replicas = run.strategy.comm.world_size > 1
        self._parameters = list(run.task.parameters())
        self._num_checked = 0

    def wrap(self, phase: PhaseStep) -> PhaseStep:
        """Return the phase with a check of its first steps, and of all steps in several micro-batches."""
        strategy = self._run.strategy
        if not self._has_replicas and strategy.num_micro_batches <= strategy.micro_batches_at_once:
            return phase
        return replace(phase, forward_backward=partial(self._forward_backward, phase.forward_backward))

    def _forward_backward(
        self, forward_backward: Callable[[StepBatch], list[StepOutput]], batch: StepBatch
    ) -> list[StepOutput]:
        if len(batch.micro_batches) > self._run.strategy.micro_batches_at_once:
            versions = [parameter._version for parameter in self._parameters]
            outputs = forward_backward(batch)
            for parameter, version in zip(self._parameters, versions, strict=True):
                if parameter._version != version:
                    self._refuse_write(parameter)
        else:
            outputs = forward_backward(batch)
        if self._num_checked < _FIRST_STEPS and self._has_replicas:
            self._num_checked += 1
            self.check()
        return outputs

    def sums(self, *, with_buffers: bool) -> Tensor | None:
        """Return this rank's summands of the comparison, shape (2,), without waiting for the device."""
        tensors = self._replicated(with_buffers=with_buffers)
        return _summands([checksum(tensors.values())])[0] if tensors else None

    def check_sums(self, sums: Iterable[float] | None, *, with_buffers: bool) -> None:
        """Raise UserError on every rank if the summands, added over ranks, show a difference; collective if they do."""
        if sums is not None and not self._are_equal(sums):
            self._raise_difference(with_buffers=with_buffers)

    def check(self) -> None:
        """Raise UserError on every rank if the parameters of the replicas differ; waits for the device. Collective."""
        sums = self.sums(with_buffers=False) if self._has_replicas else None
        if sums is not None:
            self.check_sums(self._run.strategy.comm.all_reduce(sums).tolist(), with_buffers=False)

    def _replicated(self, *, with_buffers: bool) -> dict[str, Tensor]:
        if not self._has_replicas:
            return {}
        tensors = self._run.strategy.replicated(self._run.task)
        return {name: each for name, each in tensors.items() if with_buffers or isinstance(each, nn.Parameter)}

    def _are_equal(self, sums: Iterable[float]) -> bool:
        """Return True if the numbers are equal, by the case of equality of Cauchy and Schwarz, in exact integers."""
        total, squares = map(int, sums)
        return self._run.strategy.comm.world_size * squares == total * total

    def _raise_difference(self, *, with_buffers: bool) -> None:
        run, tensors = self._run, self._replicated(with_buffers=with_buffers)
        rows = run.strategy.comm.all_reduce(_summands([checksum([tensor]) for tensor in tensors.values()])).tolist()
        names = [name for name, row in zip(tensors, rows, strict=True) if not self._are_equal(row)]
        name = names[0] if names else next(iter(tensors))
        raise UserError(
            f"{type(run.strategy).__name__}: {name} has other values on other ranks, by step {run.state.step + 1}. "
            f"{_cause(run.task, name)} No strategy averages such values. {_REMEDY}"
        )

    def _refuse_write(self, parameter: nn.Parameter) -> None:
        run = self._run
        name = next((name for name, each in run.task.named_parameters() if each is parameter), "a parameter")
        raise UserError(
            f"{type(run.strategy).__name__}: step {run.state.step + 1} changes {name} in place in each of its "
            f"micro-batches. {_cause(run.task, name)} The global batch as one would change it once. {_REMEDY}"
        )


_REMEDY = (
    "Let the gradient change it, or change it in a callback's on_step_end, from values that are the same on every rank "
    "(inside of run.whole_task() those of rank 0 count). As a plain loop does it, it runs with strategy=single and "
    "one micro-batch."
)


def _cause(task: nn.Module, name: str) -> str:
    """Return what has probably changed the parameter."""
    owner = task.get_submodule(name.rpartition(".")[0])
    if getattr(owner, "max_norm", None) is not None:
        return f"{type(owner).__name__}(max_norm={owner.max_norm}) renormalises the rows of the samples that it sees."
    return "A step or a callback writes to it, from its own samples or random numbers."


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return a number below 2**20 of all bits of the tensors, an int64 scalar on the device; waits for nothing."""
    sums: list[Tensor] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    device: torch.device | None = None
    with torch.no_grad():
        for tensor in tensors:
            for part in dense_parts(tensor.detach()):
                flat = (torch.view_as_real(part.resolve_conj()) if part.is_complex() else part).reshape(-1)
                device = flat.device if device is None else device
                if flat.numel() <= _SMALL and flat.device == device:
                    small.setdefault(flat.dtype, []).append(flat)
                elif not flat.is_meta:
                    sums += [each.to(device, non_blocking=True) for each in _bit_sums(flat)]
        for joined in small.values():
            sums += _bit_sums(torch.cat(joined))
        return torch.remainder(torch.stack(sums).sum(), _MODULUS) if sums else torch.zeros((), dtype=torch.int64)


def _bit_sums(flat: Tensor) -> list[Tensor]:
    """Return sums of the bits of a contiguous tensor as integers, of 64 bits as far as possible, which is faster."""
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    per_word = 8 // flat.itemsize
    words = flat.numel() // per_word * per_word
    narrow = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize]
    return [flat[:words].view(torch.int64).sum(), flat[words:].view(narrow).sum()]


def _summands(checksums: list[Tensor]) -> Tensor:
    """Return each checksum and its square, shape (checksums, 2)."""
    stacked = torch.stack(checksums).double()
    return torch.stack([stacked, stacked * stacked], dim=1)
