"""Batches that go through the stages of a pipeline forward only."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from trainkit.batches import to_device
from trainkit.metrics.step_output import StepOutput, read_evaluation_output
from trainkit.precision import Precision
from trainkit.task import TaskModule
from trainkit.window import MicroBatch

from .messages import Messages
from .runtime import Runtime
from .schedules import forward_only
from .sharing import OutputSharing
from .staged_state import StagedState
from .staged_step import StagedStep


class EvaluationPass(StagedState):
    """Evaluates and predicts: replicas each for themselves, the stages of one together."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._runtime: Runtime | None = None
        self._sharing: OutputSharing | None = None

    def setup(self, precision: Precision) -> None:
        """Join the other ranks, with what carries values from stage to stage; collective."""
        super().setup(precision)
        assert self._failures is not None
        self._runtime = Runtime(
            Messages(self._stage_group, rank=self.stage, device=self.device),
            device=self.device,
            failures=self._failures,
        )
        self._sharing = OutputSharing(self._stage_group, rank=self.stage, device=self.device)

    def evaluate(
        self,
        task: TaskModule,
        micro_batch: MicroBatch,
        step_name: Literal["validation_step", "test_step"],
    ) -> StepOutput:
        """Return the metrics of one batch, on every stage of this replica; collective over its stages."""

        def read(returned: Any) -> StepOutput:
            return read_evaluation_output(returned, micro_batch.num_samples, task, step_name)

        if self._must_evaluate_whole:
            return super().evaluate(task, micro_batch, step_name)
        with self._told():
            staged, returned = self._forward(task, step_name, micro_batch)
            outputs = [read(value) for value in returned]
            return self._share(outputs, staged, step_name)[0]

    def predict(self, task: TaskModule, micro_batch: MicroBatch) -> Any:
        """Return the predictions for one batch, on every stage of this replica; collective over its stages."""
        if self._must_evaluate_whole:
            return super().predict(task, micro_batch)
        with self._told():
            staged, returned = self._forward(task, "predict_step", micro_batch)
            box = returned or [None]
            dist.broadcast_object_list(box, group=self._stage_group, group_src=staged.segments[-1].rank)
            return box[0]

    @property
    def _must_evaluate_whole(self) -> bool:
        """Whether training will cut the task but has not shown its first step: an evaluation must not cut it."""
        return bool(self._optimizations) and not self._is_placed

    def _move_for_evaluation(self, batch: Any) -> Any:
        if self._must_evaluate_whole:
            return to_device(batch, torch.device("cpu"), dtype=self.precision.batch_type)
        return super()._move_for_evaluation(batch)

    def _forward(self, task: TaskModule, step_name: str, micro_batch: MicroBatch) -> tuple[StagedStep, list[Any]]:
        assert self._runtime is not None
        step = partial(self._call, getattr(task, step_name))
        batch = self._move_for_evaluation(micro_batch.batch)
        name = f"{step_name} in training mode" if task.training else step_name
        staged = self._staged_evaluation(task, name, step, batch)
        own = [segment.index for segment in staged.segments if segment.rank == self.stage]
        actions = forward_only(own, 1)
        returned = self._runtime.forward(staged, step, [batch], actions=actions, seed=draw_seed())
        return staged, list(returned.values())

    def _share(self, outputs: list[StepOutput], staged: StagedStep, kind: str) -> list[StepOutput]:
        assert self._sharing is not None
        source = staged.segments[-1].rank
        return self._sharing.share(outputs if source == self.stage else None, source=source, kind=kind)


def draw_seed() -> int:
    """Return the seed of a window, drawn from torch's generator, which advances equally on all stages."""
    return int(torch.randint(2**62, ()).item())
