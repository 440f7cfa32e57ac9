"""A task in a pipeline: cut by what it is trained by, with this stage's part of it on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from trainkit.distributed.collectives import broadcast, check_same_model, tensors_of
from trainkit.errors import UserError
from trainkit.optimization import Optimization
from trainkit.precision import Precision
from trainkit.task import TaskModule
from trainkit.window import Window

from ..shared_buffers import SharedBuffers
from .arguments import checked_balance, checked_count, checked_name, refuse_compiled
from .partition import Shared
from .planning import Cuts
from .report import write_plan
from .schedules import SCHEDULES, Schedule
from .stage_gradients import StageGradients
from .staged_ranks import StagedRanks
from .staged_step import StagedStep
from .staging import Act, Staging, act_name, only_act
from .table import PartitionPlan
from .whole_state import WholeState

logger = logging.getLogger(__name__)

TRAINING = "training_step"
RECORDINGS = ("auto", "real", "fake")


class StagedTask(StagedRanks):
    """Cuts the task by its first step, or those of its phases, and knows each step's stages from then on.

    Args:
        schedule: The order of micro-batches.
        stages_per_rank: Stages on each rank, for `interleaved_virtual`.
        cuts: The user's wish, or none.
        shared: Where a parameter is that several places of the step use.
        balance: Share of memory against time.
        record: How the step is recorded.
        settings: Those of the ranks.

    """

    def __init__(
        self,
        *,
        schedule: str,
        stages_per_rank: int,
        cuts: Cuts | None,
        shared: Shared,
        balance: str | float,
        record: str,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        checked_count("stages_per_rank", stages_per_rank)
        self.schedule = checked_name("schedule", schedule, SCHEDULES)
        self.stages_per_rank = stages_per_rank if schedule == "interleaved_virtual" else 1
        self._schedule = Schedule(schedule, self.stages, self.stages_per_rank)
        self.cuts = cuts
        self.shared = checked_name("shared", shared, get_args(Shared))
        self.balance = checked_balance(balance)
        self.record = checked_name("record", record, RECORDINGS)
        self.partition_plan: PartitionPlan | None = None
        """The stages, once the first step has been planned."""
        self._staging: Staging | None = None
        self._gradients: dict[str, StageGradients] = {}  # by phase
        self._state = WholeState()
        self._optimizations: dict[str, Optimization] = {}  # by phase
        self._phase = ""
        self._begun: Iterator[Window] | None = None  # the windows of training, of which the first was looked at

    # ---- Before the first step

    def check_phases(self, task: TaskModule) -> None:
        """Raise UserError for copies of parameters in several stages, which phases cannot have."""
        if self.shared == "replicated":
            raise UserError(
                f"{type(task).__name__} has phases, and strategy.shared=replicated would give stages copies of what "
                "several of them use. Each parameter is in one stage there: type strategy.shared=together."
            )

    def setup(self, precision: Precision) -> None:
        """Join the other ranks, with nothing planned; collective."""
        super().setup(precision)
        self._optimizations, self._gradients, self._phase, self._begun = {}, {}, "", None
        self._state = WholeState()
        self._staging = Staging(
            num_ranks=self.stages,
            stages_per_rank=self.stages_per_rank,
            group=self._stage_group,
            cuts=self.cuts,
            shared=self.shared,
            balance=self.balance,
            record=self.record,
            device=self.device,
        )

    def prepare(self, task: TaskModule) -> None:
        """Leave rank 0's parameters and buffers on every rank; they stay in host memory until the first step is cut.

        What lies on the meta device stays there until then, and is made only where it is needed.
        """
        self.precision.prepare(task)
        check_same_model(tensors_of(task), self._all_ranks)  # or the broadcasts that follow might crash or hang
        everything = [tensor for tensor in (*task.parameters(), *task.buffers()) if not tensor.is_meta]
        for tensor in everything:
            tensor.data = tensor.data.cpu()
        self._trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        self._all_trained = self._trained
        if self.stage == 0:
            broadcast(everything, self.comm.group)
        broadcast(everything, self._stage_group)

    def prepare_optimizer(self, task: TaskModule, optimization: Optimization) -> None:
        """Remember an optimizer, whose state follows the parameters to their stages."""
        if not callable(getattr(task, optimization.step_name, None)):
            raise UserError(
                f"{type(task).__name__} has no method {optimization.step_name}, by which a pipeline would cut it for "
                f"the phase '{optimization.phase}'. Define {optimization.step_name}(self, batch), which returns the "
                "loss, or type strategy=ddp."
            )
        self._optimizations[optimization.phase] = optimization

    def prepare_steps(self, task: TaskModule, batches: Iterator[Window]) -> None:
        """Record training's first micro-batch, cut the task by it, and leave each stage its part; collective."""
        first = next(batches, None)
        if first is None:
            return
        self._begun = chain([first], batches)
        task.train()
        shown = [self._move_for_evaluation(micro_batch.batch) for micro_batch in first.micro_batches[:1]]
        with self._told():
            self._cut(task, shown, len(first.micro_batches))

    def step_batches(self, batches: Iterator[Window], *, pin_memory: bool) -> Iterator[Window]:
        """Return the batches with their micro-batches on the device, those that were begun first."""
        begun, self._begun = self._begun, None
        return super().step_batches(batches if begun is None else begun, pin_memory=pin_memory)

    def begin_phase(self, optimization: Optimization, *, step_name: str) -> None:
        """Let the next `forward_backward` train a phase's parameters alone, by the task's method `step_name`."""
        super().begin_phase(optimization, step_name=step_name)
        self._phase = optimization.phase

    def end_phases(self) -> None:
        """Let every parameter require a gradient again that some phase trains."""
        super().end_phases()
        self._phase = ""

    def teardown(self) -> None:
        """Leave the other ranks and release what was acquired; may be called twice."""
        for gradients in self._gradients.values():
            gradients.close()
        self._gradients = {}
        self._staging = self._begun = None
        super().teardown()

    # ---- Stages

    def _staged_training(self, task: TaskModule, batches: Sequence[Any]) -> StagedStep:
        """Return the step that is trained by now, cut into stages; all ranks plan it where it is met first."""
        if not self._is_placed:
            self._cut(task, batches, len(batches))
        assert self._staging is not None
        staged = self._staging.steps.get(act_name(self._phase, self._step_name))
        if staged is None:
            own = self._optimizations[self._phase].step_name
            raise UserError(
                f"{type(task).__name__} trains the phase '{self._phase}' by {self._step_name}, but a pipeline cuts the "
                f"task by {own}, the phase's own step. Leave step={self._step_name!r} out of control.backward, or type "
                "strategy=ddp."
            )
        return staged

    def _staged_evaluation(self, task: TaskModule, name: str, step: Callable[[Any], Any], batch: Any) -> StagedStep:
        """Return a step cut into stages; where it is met first, the stages of this replica do that together."""
        staging = self._staging
        assert staging is not None
        if name not in staging.steps:  # replicas each evaluate as many batches as they have
            refuse_compiled(task)
            if self._is_placed:
                staging.add(name, task, step, batch, everywhere=False)
            else:
                staging.cut(task, {name: only_act(step)}, batch, everywhere=False)
                self._settle(task, 1)
        return staging.steps[name]

    @property
    def _is_placed(self) -> bool:
        """Whether the task has been cut, so that this rank holds only a part."""
        return self._staging is not None and self._staging.placement is not None

    def _cut(self, task: TaskModule, batches: Sequence[Any], num_micro_batches: int) -> None:
        """Cut what the task is trained by, and leave each stage its part; collective."""
        assert self._staging is not None
        refuse_compiled(task)
        phase, step_name = self._phase, self._step_name
        self._staging.cut(task, self._acts(task), batches[0] if batches else None, everywhere=True)
        if any(self._optimizations):  # named ones: without phases, what is frozen stays so
            self.end_phases()
        self._settle(task, num_micro_batches)
        self._gradients = {name: self._gradients_of(task, name) for name in self._optimizations or [""]}
        if self.broadcast_buffers:
            placement = self._staging.placement
            assert placement is not None
            self._buffers = SharedBuffers(task, is_shared=lambda name: placement.is_held(name, self.stage))
        if phase:
            self.begin_phase(self._optimizations[phase], step_name=step_name)

    def _acts(self, task: TaskModule) -> dict[str, Act]:
        """Return what the task is trained by: its step, or those of its phases."""
        if not any(self._optimizations):
            return {TRAINING: only_act(partial(self._call, task.training_step))}
        return {
            act_name(phase, optimization.step_name): Act(
                partial(self._call, getattr(task, optimization.step_name)),
                partial(self.begin_phase, optimization, step_name=optimization.step_name),
                1.0 / optimization.every,
            )
            for phase, optimization in self._optimizations.items()
        }

    def _gradients_of(self, task: TaskModule, phase: str) -> StageGradients:
        """Return what reduces the gradients of a phase, or of a task that has none; collective."""
        assert self._staging is not None and self._staging.placement is not None and self._grid is not None
        own: dict[str, torch.nn.Parameter] | None = None
        if phase:
            optimization = self._optimizations[phase]
            trained = {id(parameter) for parameter in optimization.parameters}
            users = self._staging.steps[act_name(phase, optimization.step_name)].recording.parameter_users
            named = task.named_parameters()
            own = {name: parameter for name, parameter in named if id(parameter) in trained and name in users}
        return StageGradients(
            task, self._staging.placement, self._grid, limit=self._limit, board=self.comm.failure_store, phase=own
        )

    def _settle(self, task: TaskModule, num_micro_batches: int) -> None:
        """Keep this stage's part of the task on the device, and tell of the plan; collective."""
        assert self._staging is not None and self._staging.planned is not None
        placement, planned = self._staging.placement, self._staging.planned
        assert placement is not None
        optimizers = [optimization.optimizer for optimization in self._optimizations.values()]
        self._state.settle(task, optimizers, placement, group=self._stage_group, device=self.device)
        state = torch.get_rng_state()  # all stages of a pipeline draw the same numbers from here on
        dist.broadcast(state, group=self._stage_group, group_src=0)
        torch.set_rng_state(state)
        share = self._schedule.bubble(num_micro_batches)
        self.partition_plan = PartitionPlan.of(planned.whole, planned.partition, bubble=share)
        if self.comm.is_main:
            self._report_plan(self.partition_plan)

    def _report_plan(self, plan: PartitionPlan) -> None:
        if not self._optimizations or self.log_dir is None:
            logger.info("pipeline:\n%s", plan)
            return
        print(f"Pipeline of {len(plan.stages)} stages\n{plan}", flush=True)
        write_plan(plan, Path(self.log_dir))

    def _call(self, step: Callable[[Any], Any], batch: Any) -> Any:
        with self.precision.forward():
            return step(batch)
