"""`micro_batch_size=auto`: the micro-batch is halved when a step runs out of memory, or grows while memory allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.devices import accelerators_in_use, free_cached, is_out_of_memory
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput
from trainkit.metrics.sync import preserve_state, restore
from trainkit.phases import PhaseStep
from trainkit.rng import rng_state, set_rng_state
from trainkit.run import Run
from trainkit.strategy import metric_modules
from trainkit.tree import rows, tree_leaves

logger = logging.getLogger(__name__)

_MARGIN = 1.1  # of the memory that a step is predicted to need


class AutoMicroBatch:
    """Computes step batches with `micro_batch_size=auto`.

        step 1    [ 0 1 2 3 4 5 6 7 ]    out of memory on some rank: all ranks drop this step
        again     [ 0 1 2 3 | 4 5 6 7 ]  the same samples and random numbers, in halves
        step 2    [ 8 9 10 11 | 12 13 14 15 ]

    The global batch does not change, so the weights are those of a run with the final size from the start.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        if run.phase_optimizers and run.phase_optimizers[0].phase:
            raise UserError(
                f"{type(run.task).__name__} has phases, for which micro_batch_size=auto finds no size; set "
                "strategy.micro_batch_size to a number."
            )

    def wrap(self, step: PhaseStep) -> PhaseStep:
        """Return the step with gradients computed in micro-batches that fit."""
        return replace(step, forward_backward=partial(self._forward_backward, step.forward_backward))

    def _forward_backward(
        self, forward_backward: Callable[[StepBatch], list[StepOutput]], batch: StepBatch
    ) -> list[StepOutput]:
        strategy, task = self._run.strategy, self._run.task
        while True:
            batch = resplit(batch, strategy.micro_batch_size)
            # Before each try: a step that fails has counted in buffers and drawn random numbers, as its repeat will.
            restore_state = state_snapshot(task, metric_modules(strategy, task))
            try:
                return forward_backward(batch)
            # The strategy has made sure that it is raised on every rank, so all of them halve and repeat together.
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            # Outside the handler: the error keeps the frames of the step, and they the memory to free.
            task.zero_grad(set_to_none=True)
            restore_state()
            # The allocator would keep the blocks of the larger micro-batch, beside those of the smaller one.
            free_cached(strategy.device)
            self._halve(batch, reason)

    def resume(self) -> None:
        """Use the size that the resumed run found."""
        if self._run.state.micro_batch_size is not None:
            self._use(self._run.state.micro_batch_size)

    def _halve(self, batch: StepBatch, reason: str) -> None:
        """Use half of the largest micro-batch on any rank; collective."""
        run = self._run
        largest = max((micro_batch.num_samples for micro_batch in batch.micro_batches), default=0)
        # Of any rank, so that all use the same size: a short last batch may give this one fewer samples.
        size = max(run.strategy.comm.all_gather_object(largest))
        half = (size + 1) // 2
        if size == 1:
            raise UserError(
                f"the task does not fit into memory with one sample at a time ({_first_line(reason)}). Make the task "
                "or its samples smaller, set trainer.precision=bf16-mixed, or partition the task: strategy=pipeline."
            )
        self._use(half)
        if run.is_main:
            plan = "" if run.plan is None else f": {run.plan}"
            message = (
                "micro_batch_size=auto: %d samples at once do not fit into memory (%s); continuing with %d%s. Set "
                "strategy.micro_batch_size=%d to start with it."
            )
            logger.warning(message, size, _first_line(reason), half, plan, half)

    def _use(self, size: int) -> None:
        run = self._run
        # In the state too: checkpoints save it, and a resumed run does not search again.
        run.strategy.micro_batch_size = run.state.micro_batch_size = size
        if run.plan is not None:
            run.plan = run.strategy.plan(run.plan.batch_size)
        if run.loader is not None:
            # Batches that are read from here on; the present one was split already.
            run.loader.resplit(run.strategy)


class GrowingMicroBatch(AutoMicroBatch):
    """Finds the size of micro-batches on ranks that cannot compute a step again.

        step 1    [ 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 ]            peak memory is measured
        step 2    [ 8 9 | 10 11 | 12 13 | 14 15 ]              and again
        step 3    [ 16 17 18 19 | 20 21 22 23 ]                8 would not fit on some rank: 4 is the size

    The next size is tried only if the memory that it will need is free on every rank, by the last two measurements.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._size = 1  # of this step
        self._needed = 0  # bytes of this rank in the last step, beyond those in use before it
        self._needed_before = 0  # with the size before this one, on the rank that needed most
        self._is_measured = False  # some rank had as many samples in the last step

    def _forward_backward(
        self, forward_backward: Callable[[StepBatch], list[StepOutput]], batch: StepBatch
    ) -> list[StepOutput]:
        strategy, memory = self._run.strategy, self._run.peak_memory
        if strategy.micro_batch_size is not None:
            return forward_backward(resplit(batch, strategy.micro_batch_size))
        memory_before = memory.measure()
        largest = max((micro_batch.num_samples for micro_batch in batch.micro_batches), default=0)
        self._grow(largest, memory_before.free)
        outputs = forward_backward(resplit(batch, self._size))
        self._needed = memory.measure().peak - memory_before.used
        return outputs

    def _grow(self, num_samples: int, free: int) -> None:
        """Choose the size of a step in which this rank has so many samples, and so many bytes are free; collective."""
        run, size = self._run, self._size
        # Collective: all ranks see the same numbers, and so choose the same size.
        gathered = run.strategy.comm.all_gather_object((num_samples, self._needed, free))
        samples, bytes_needed, bytes_free = zip(*gathered, strict=True)
        largest, needed = max(samples), max(bytes_needed)
        fits = True  # 2 * size, in constant + slope * 2 * size bytes
        if self._is_measured:
            # By the last two sizes, which differ by size - size // 2; before the size 1 it is 0, with 0 bytes.
            slope = max(needed - self._needed_before, 0) / (size - size // 2)
            fits = (needed + slope * size) * _MARGIN <= min(bytes_free)
            self._size, self._needed_before = 2 * size if fits else size, needed
        # A short batch does not show what the size needs.
        self._is_measured = largest >= self._size
        if not fits or self._size >= (largest if run.plan is None else run.plan.micro_batch_size):
            self._use(self._size)
            if run.is_main:
                why = "all samples of a rank fit" if fits else f"{2 * size} would not fit"
                plan = "" if run.plan is None else f": {run.plan}"
                logger.info(
                    "micro_batch_size=auto: %d samples at once, as %s into memory%s. Set strategy.micro_batch_size=%d "
                    "to start with it.",
                    self._size,
                    why,
                    plan,
                    self._size,
                )


def state_snapshot(task: nn.Module, metrics: Sequence[nn.Module]) -> Callable[[], None]:
    """Copy what a step changes besides parameters: random generators, buffers and metrics; return what restores it."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in task.buffers()]
    # Also of the metrics: what a step has counted in them would be counted again.
    devices = accelerators_in_use()
    metric_states, generators = preserve_state(metrics), rng_state(devices)

    def restore_state() -> None:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        restore(metric_states)
        set_rng_state(generators, devices)

    return restore_state


def resplit(batch: StepBatch, size: int | None) -> StepBatch:
    """Return the step batch in micro-batches of at most `size` samples, the same samples in the same order."""
    if size is None or all(micro_batch.num_samples <= size for micro_batch in batch.micro_batches):
        return batch
    return replace(
        batch, micro_batches=[item for micro_batch in batch.micro_batches for item in _split(micro_batch, size)]
    )


def _split(micro_batch: MicroBatch, size: int) -> Iterator[MicroBatch]:
    count = micro_batch.num_samples
    if count <= size:
        yield micro_batch
        return
    for leaf in tree_leaves(micro_batch.batch):
        # A number or None is the same for every part; a list or text may have an item for each sample.
        if not isinstance(leaf, (Tensor, int, float, type(None))) or (
            isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] != count
        ):
            kind = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise UserError(
                f"micro_batch_size=auto cannot split a batch of {count} samples that holds {kind}: only tensors with "
                "a row for each sample can be split. Set strategy.micro_batch_size to a number."
            )
    for start in range(0, count, size):
        yield MicroBatch(rows(micro_batch.batch, slice(start, start + size), of=count), min(size, count - start))


def _first_line(reason: str) -> str:
    return reason.strip().partition("\n")[0].rstrip(".") or "no reason given"
