"""Closure: the loss of a step batch as a function, which LBFGS evaluates several times in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.devices import widest_float
from trainkit.errors import UserError
from trainkit.loops.oom import state_snapshot
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.strategy import Strategy, metric_modules
from trainkit.task import TaskModule
from trainkit.tree import map_tensors


class Closure:
    """Returns the loss of the present step batch, and leaves its gradients.

        forward_backward    evaluation 1: the step's outputs, metrics, buffers and random numbers
        update              LBFGS takes evaluation 1, and asks for 2, 3, ...: losses and gradients, nothing else

    Each evaluation has the same micro-batches, and starts with the same buffers and random generators, so that all are
    of the same function. A loss has the same bits on all ranks, which therefore decide the same.
    """

    def __init__(self, task: TaskModule, strategy: Strategy, phase_optimizer: PhaseOptimizer) -> None:
        if strategy.auto_micro_batch:
            raise UserError(
                "micro_batch_size=auto does not work with LBFGS, which may run out of memory inside of its step; set "
                "strategy.micro_batch_size to a number."
            )
        if task.manual:
            raise UserError(
                f"{type(task).__name__}.manual_step may begin another phase before the step of LBFGS, which evaluates "
                "its own phase again; set manual = False, or use another optimizer, such as torch.optim.AdamW."
            )
        self._task, self._strategy, self._phase_optimizer = task, strategy, phase_optimizer
        self._batch = StepBatch([], 0, 0, False)
        self._restore_start: Callable[[], None] = lambda: None  # to the state before evaluation 1
        self._first: Tensor | None = None  # the loss of the first evaluation, until it is asked for

    def forward_backward(self, batch: StepBatch) -> list[StepOutput]:
        """Make the first evaluation of a step batch and return its outputs; collective."""
        # Before the forward: the other evaluations must draw the same dropout masks and see the same buffers.
        self._batch, self._restore_start = batch, self._snapshot()
        outputs = self._strategy.forward_backward(self._task, _copied(batch))
        self._first = self._global_loss(outputs)
        return outputs

    def __call__(self) -> Tensor:
        """Return the loss, and leave its gradients; collective."""
        if self._first is not None:
            loss, self._first = self._first, None
            return loss
        # The next step continues from the end of evaluation 1, however many evaluations the optimizer asks for.
        restore_end = self._snapshot()
        self._restore_start()
        self._phase_optimizer.zero_grad()
        outputs = self._strategy.forward_backward(self._task, _copied(self._batch))
        restore_end()
        return self._global_loss(outputs)

    def _snapshot(self) -> Callable[[], None]:
        return state_snapshot(self._task, metric_modules(self._strategy, self._task))

    def _global_loss(self, outputs: Sequence[StepOutput]) -> Tensor:
        """Return the weighted mean loss over the global batch; collective."""
        device, all_reduce = self._strategy.device, self._strategy.comm.all_reduce
        zero = torch.zeros((), dtype=widest_float(device), device=device)
        weights = [zero + output.weight for output in outputs]
        # Every rank calls both sums, also one without samples: it starts from `zero`.
        total = all_reduce(sum(weights, start=zero))
        losses = [
            output.loss * (weight / total)
            for output, weight in zip(outputs, weights, strict=True)
            if output.loss is not None
        ]
        return all_reduce(sum(losses, start=zero))


def _copied(batch: StepBatch) -> StepBatch:
    """Return a copy for one evaluation, whose step may change it."""
    copies = [
        MicroBatch(map_tensors(micro_batch.batch, Tensor.clone), micro_batch.num_samples)
        for micro_batch in batch.micro_batches
    ]
    return replace(batch, micro_batches=copies)
