"""FollowedState: the state that steps leave in a task for the next one, found in the second and third step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainkit.data.batch import StepBatch
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput
from trainkit.model.attribute_watch import outline
from trainkit.model.carried_state import (
    CarriedAttributes,
    can_be_followed,
    changed_elements,
    shared_by_micro_batches,
    unsaved_buffers,
)
from trainkit.phases import PhaseStep
from trainkit.run import Run
from trainkit.tree import dense_parts

logger = logging.getLogger(__name__)

Begin = Callable[[StepBatch], list[StepOutput]]


class FollowedState:
    """Follows the second and third step, and says what is wrong with the state that both of them carry.

    The first step may fill caches. A step that micro-batches share with each other is refused if the state has tensors.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps = 0
        self._left: dict[str, str] = {}  # attributes with tensors, and the phase that has left them
        self._carried: dict[str, Any] = {}  # attributes and buffers that are not saved
        self._has_compared = False

    def next_begin(self, begin: Begin) -> Begin:
        """Return the function that computes the next step; called after each of the first three."""
        self._steps += 1
        return self._following(begin) if self._follows else begin

    @property
    def _follows(self) -> bool:
        """True in the second and third step, if it runs the task's modules and may change their classes."""
        return self._steps in (1, 2) and self._run.strategy.supports_module_hooks and can_be_followed(self._run.task)

    def wrap(self, phase: PhaseStep) -> PhaseStep:
        """Return a phase that is refused if its micro-batches use what those of another phase have left."""
        # A single micro-batch leaves to the next phase what a plain loop would.
        if not phase.phase or self._run.strategy.num_micro_batches < 2:
            return phase
        return replace(phase, forward_backward=partial(self._forward_backward, phase.phase, phase.forward_backward))

    def _forward_backward(self, phase: str, forward_backward: Begin, batch: StepBatch) -> list[StepOutput]:
        task = self._run.task
        if not self._follows or len(batch.micro_batches) < 2:
            return forward_backward(batch)
        attributes = CarriedAttributes(task)
        with attributes.recorded():
            outputs = forward_backward(batch)
        for name, other in self._left.items():
            if other != phase and attributes.reads(name):
                raise UserError(
                    f"{type(self._run.strategy).__name__}: the phase {phase} of {type(task).__name__} uses {name}, "
                    f"which the phase {other} has left: with several micro-batches or replicas it is that of one of "
                    "them. Compute it again in each phase that uses it."
                )
        self._left |= {name: phase for name, value in attributes.changed().items() if attributes.tensors_in(value)}
        return outputs

    def _following(self, begin: Begin) -> Begin:
        def follow(batch: StepBatch) -> list[StepOutput]:
            task = self._run.task
            # Made before the step, of whose changes it takes a snapshot to compare with.
            attributes = CarriedAttributes(task)
            last = {name: _values(buffer) for name, buffer in unsaved_buffers(task)}
            with attributes.recorded():
                outputs = begin(batch)
            # By values, not by counts of writes: a strategy writes to each buffer that it makes equal over ranks.
            carried = attributes.carried() | {
                name: buffer for name, buffer in unsaved_buffers(task) if not _has_values(buffer, last.get(name, []))
            }
            first = self._steps == 1
            # State is what both steps carry: what changes once may be a cache.
            self._carried = {name: value for name, value in carried.items() if first or name in self._carried}
            # The checkpointer warns of these at the next save.
            self._run.carried_state = [] if first else [n for n in self._carried if not _saves_itself(task, n)]
            if not first and len(batch.micro_batches) > self._run.strategy.micro_batches_at_once:
                self._refuse_shared(attributes)
            return outputs

        return follow

    def warn_of_differences(self) -> None:
        """Warn once, after the third step, of numbers in attributes that ranks change by their samples; collective."""
        run = self._run
        # The count of steps is the same on all ranks, so they skip the collective together.
        if self._has_compared or self._steps < 3 or run.strategy.comm.num_processes == 1:
            return
        self._has_compared = True
        of_ranks = run.strategy.comm.all_gather_object({n: outline(value) for n, value in self._carried.items()})
        names = sorted({name for state in of_ranks for name in state if state[name] != of_ranks[0].get(name)})
        if names and run.is_main:
            logger.warning(
                "%s changes %s by the samples of each rank, and so to other values than on one process. If the loss "
                "depends on it, change it in a callback's on_step_end, from values that are the same on every rank.",
                type(run.task).__name__,
                ", ".join(names),
            )

    def _refuse_shared(self, attributes: CarriedAttributes) -> None:
        run = self._run
        for name, value in self._carried.items():
            if attributes.tensors_in(value):
                raise UserError(shared_by_micro_batches(type(run.strategy).__name__, run.task, name))
        if self._carried and run.is_main:
            logger.warning(
                "%s changes %s in each micro-batch, and so more often than once a step. If the loss depends on it, "
                "change it in a callback's on_step_end.",
                type(run.task).__name__,
                ", ".join(self._carried),
            )


def _values(buffer: Tensor) -> list[Tensor]:
    return [part.clone() for part in dense_parts(buffer.detach())]


def _has_values(buffer: Tensor, values: list[Tensor]) -> bool:
    """Return True if a buffer has these values; waits for the device."""
    parts = list(dense_parts(buffer.detach()))
    return [part.shape for part in parts] == [part.shape for part in values] and not any(
        bool(changed_elements(part, last).any()) for part, last in zip(parts, values, strict=True)
    )


def _saves_itself(task: nn.Module, name: str) -> bool:
    """Return True for an attribute of a module that puts what it likes into the state dict."""
    owner = task.get_submodule(name.rpartition(".")[0])
    return type(owner).get_extra_state is not nn.Module.get_extra_state
