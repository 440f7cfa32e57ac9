"""The largest micro-batch that fits into memory, found while training by halving it when it does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.batches import rows
from trainkit.before_step import BeforeStep
from trainkit.errors import UserError
from trainkit.run import Run
from trainkit.step_output import StepOutput
from trainkit.strategy import metric_modules
from trainkit.task import TaskModule
from trainkit.window import MicroBatch, Window

logger = logging.getLogger(__name__)


class MemoryFit:
    """Computes windows with `micro_batch_size=auto`.

        window 1    [ 0 1 2 3 4 5 6 7 ]  out of memory on some rank: all forget what they have of this window
        again       [ 0 1 2 3 | 4 5 6 7 ]  the same samples and random numbers, in halves
        window 2    [ 8 9 10 11 | 12 13 14 15 ]

    The global batch stays what it is, so the weights are those of a run that began with the size that was found.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        if run.optimizations and run.optimizations[0].phase:
            raise UserError(
                f"{type(run.task).__name__} has phases, in which a step cannot be made again with smaller "
                "micro-batches; give strategy.micro_batch_size as a number."
            )

    def forward_backward(self, task: TaskModule, window: Window) -> list[StepOutput]:
        """Leave the gradients of the window as the strategy does, in micro-batches that fit; collective."""
        strategy = self._run.strategy
        while True:
            window = recut(window, strategy.micro_batch_size)
            before = BeforeStep(task, metric_modules(strategy, task))
            try:
                return strategy.forward_backward(task, window)
            except torch.OutOfMemoryError as error:
                reason = str(error)
            # Not above: the error holds the frames of the step, and they what did not fit.
            task.zero_grad(set_to_none=True)
            before.put_back()
            if strategy.device.type == "cuda":
                torch.cuda.empty_cache()
            self._halve(self._largest(window), reason)

    def resume(self) -> None:
        """Begin with the size that an earlier part of the run has found."""
        if self._run.state.micro_batch_size is not None:
            self._use(self._run.state.micro_batch_size)

    def _halve(self, size: int, reason: str) -> None:
        run = self._run
        if size == 1:
            raise UserError(
                f"the task does not fit into memory with one sample at a time ({_first_line(reason)}). Make the task "
                "or its samples smaller, set trainer.precision=bf16-mixed, or cut the task: strategy=pipeline."
            )
        self._use((size + 1) // 2)
        if run.is_main:
            logger.warning(
                "micro_batch_size=auto: %d samples at once do not fit into memory (%s); going on with %d%s. Set "
                "strategy.micro_batch_size=%d to begin with it.",
                size,
                _first_line(reason),
                (size + 1) // 2,
                "" if run.plan is None else f": {run.plan}",
                (size + 1) // 2,
            )

    def _largest(self, window: Window) -> int:
        """Return the samples of the largest micro-batch that any rank has computed; collective."""
        own = max((micro_batch.num_samples for micro_batch in window.micro_batches), default=0)
        return max(self._run.strategy.comm.all_gather_object(own))

    def _use(self, size: int) -> None:
        run = self._run
        run.strategy.micro_batch_size = run.state.micro_batch_size = size
        if run.plan is not None:
            run.plan = run.strategy.plan(run.plan.batch_size)
        if run.feed is not None:
            run.feed.cut_anew(run.strategy)


def recut(window: Window, size: int | None) -> Window:
    """Return the window with no micro-batch of more than `size` samples, the same samples in the same order."""
    if size is None or all(micro_batch.num_samples <= size for micro_batch in window.micro_batches):
        return window
    return replace(window, micro_batches=[part for whole in window.micro_batches for part in _cut(whole, size)])


def _cut(whole: MicroBatch, size: int) -> Iterator[MicroBatch]:
    count = whole.num_samples
    if count <= size:
        yield whole
        return
    _check_rows(whole.batch, count)
    for start in range(0, count, size):
        yield MicroBatch(rows(whole.batch, slice(start, start + size), of=count), min(size, count - start))


def _check_rows(batch: Any, count: int) -> None:
    """Raise UserError for a batch that is not made of tensors with a row for each sample, and so cannot be cut."""
    for leaf in _leaves(batch):
        if not isinstance(leaf, (Tensor, int, float, type(None))) or (
            isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] != count
        ):
            found = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise UserError(
                f"micro_batch_size=auto cannot cut a batch of {count} samples that holds {found}: only tensors with a "
                "row for each sample can be cut. Give strategy.micro_batch_size as a number."
            )


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, dict):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    else:
        yield batch


def _first_line(reason: str) -> str:
    return reason.strip().partition("\n")[0].rstrip(".") or "no reason given"
