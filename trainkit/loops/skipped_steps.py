"""Skipped steps, which change nothing: their gradient is not finite or a spike, or a rollback has listed them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from trainkit.data.batch import StepBatch
from trainkit.data.loader import BatchLoader
from trainkit.loops.rollback import list_samples
from trainkit.metrics.step_output import StepOutput
from trainkit.phases import PhaseStep, TrainStep
from trainkit.run import Run
from trainkit.state import TrainState
from trainkit.strategy import local_state

logger = logging.getLogger(__name__)

STEPS_SHOWN = 5
"""Steps that a warning names."""
_FOLD_AT = 512
"""Flags on the device after which they are read, which waits for the device."""


class SkippedSteps:
    """Restores buffers after each step that an optimizer skips; nothing waits for the device before a log point.

    buffers    before ---- forward, backward ---> after
    gradient                                      not finite, or a spike: a flag on the device
    buffers    where(flag, before, after)         batch-norm statistics are as if there had been no such batch
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: dict[str, BufferSnapshot] = {}  # of each phase between its first backward and its update
        self._flags: list[tuple[int, Tensor]] = []  # step, a scalar on the device
        self._steps: list[int] = []

    def wrap(self, step: PhaseStep) -> PhaseStep:
        """Return the step with the buffers copied before its first backward, and restored if it is skipped."""
        phase, forward_backward, update = step.phase, step.forward_backward, step.update
        phase_optimizer = next(item for item in self._run.phase_optimizers if item.phase == phase)

        def snapshot_first(batch: StepBatch) -> list[StepOutput]:
            # The phase's first backward of the step: later ones add to the same gradient, and are skipped with it.
            if phase not in self._before:
                self._before[phase] = BufferSnapshot(_held_buffers(self._run))
            return forward_backward(batch)

        def then_restore() -> Tensor | None:
            norm = update()
            snapshot, flag = self._before.pop(phase, None), phase_optimizer.skipped
            if flag is not None:
                if snapshot is not None:
                    snapshot.restore_where(flag)
                # Kept on the device: reading it here would make the CPU wait in every step.
                self._flags.append((self._run.state.step + 1, flag))
                if len(self._flags) >= _FOLD_AT:
                    self._fold()
            return norm

        return replace(step, forward_backward=snapshot_first, update=then_restore)

    def warn(self, bad: Sequence[int], loader: BatchLoader) -> None:
        """Warn about the steps skipped since the last call; `bad`: those with a bad loss on this rank. Collective."""
        self._fold()
        # A step may be there twice, if several of its phases were skipped.
        steps, self._steps = list(dict.fromkeys(self._steps)), []
        shown = steps[:STEPS_SHOWN]
        # The same on every rank, since the flags are decided by reduced gradients: all ranks gather, or none does.
        if not shown:
            return
        run = self._run
        here = {step: (step in bad, loader.sample_indices(step, run.state)) for step in shown}
        # By rank: the message names the first rank with a bad loss.
        of_ranks = dict(sorted(run.strategy.comm.all_gather_object((run.strategy.comm.rank, here)), key=itemgetter(0)))
        if run.is_main:
            causes = [_cause(step, {rank: reasons[step] for rank, reasons in of_ranks.items()}) for step in shown]
            if len(steps) > len(shown):
                causes.append(f"and {len(steps) - len(shown)} more")
            message = "skipped since the last log: %s. Set trainer.detect_anomaly=true to find the operation."
            logger.warning(message, "; ".join(causes))

    def _fold(self) -> None:
        """Add the steps whose flag is set; waits for the device."""
        flags, self._flags = self._flags, []
        if flags:
            skipped = torch.stack([flag for _, flag in flags]).tolist()
            self._steps += [step for (step, _), was_skipped in zip(flags, skipped, strict=True) if was_skipped]


def skip_listed_steps(step: TrainStep, state: TrainState, skip: Callable[[], None]) -> TrainStep:
    """Return the step with `skip` in its place where a rollback has listed it in `state.skipped_steps`."""
    skips = False

    def begin(batch: StepBatch) -> list[StepOutput]:
        nonlocal skips
        # Decided once for both calls, between which the count of steps must not move the answer.
        skips = state.step + 1 in state.skipped_steps
        if skips:
            skip()
            return []
        return step.begin(batch)

    def finish() -> None:
        if not skips:
            step.finish()

    return replace(step, begin=begin, finish=finish)


class BufferSnapshot:
    """A copy of buffers, one flat tensor for each device and type."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        buffers = sorted((buffer for buffer in held if _has_values(buffer)), key=_kind)
        self._groups = [list(group) for _, group in groupby(buffers, key=_kind)]
        self._before = [_flat(group) for group in self._groups]

    def restore_where(self, flag: Tensor) -> None:
        """Restore the buffers if the flag is set, without waiting for the device."""
        with torch.no_grad():
            for group, saved_values in zip(self._groups, self._before, strict=True):
                # On the device in both cases: an `if` would have to read the flag.
                chosen = torch.where(flag.to(saved_values.device), saved_values, _flat(group))
                values = chosen.split([buffer.numel() for buffer in group])
                # Private: torch has no public call that copies a list of tensors; one `copy_` each is one launch each.
                torch._foreach_copy_(
                    group, [value.view_as(buffer) for value, buffer in zip(values, group, strict=True)]
                )


def _cause(step: int, of_ranks: Mapping[int, tuple[bool, list[int]]]) -> str:
    """Return the cause of a skipped step: the first rank with a bad loss and its samples, else those of all ranks."""
    bad = next((rank for rank, (loss_was_bad, _) in of_ranks.items() if loss_was_bad), None)
    samples = of_ranks[bad][1] if bad is not None else [index for _, indices in of_ranks.values() for index in indices]
    cause = "its gradient was not finite, or a spike" if bad is None else "its loss was NaN or infinite"
    on_rank = f" on rank {bad}" if bad is not None and len(of_ranks) > 1 else ""
    return f"step {step}, since {cause}{on_rank}" + (f" (samples {list_samples(samples)})" if samples else "")


def _held_buffers(run: Run) -> list[Tensor]:
    """Return the buffers of which this rank has the values: none of another stage."""
    held = local_state(run.strategy, run.task)
    return [buffer for name, buffer in run.task.named_buffers() if name in held]


def _flat(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])  # a copy, also of one buffer


def _has_values(buffer: Tensor) -> bool:
    """Return True if a step may write to the buffer: not to a placeholder for one of another stage."""
    if buffer.is_meta or buffer.layout != torch.strided or buffer.numel() == 0:
        return False
    # An expanded tensor, whose elements share memory, as placeholders do.
    return all(stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def _kind(buffer: Tensor) -> tuple[str, str]:
    return str(buffer.device), str(buffer.dtype)
