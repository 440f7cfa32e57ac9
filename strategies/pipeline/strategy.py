"""The strategy `pipeline`: one task over several devices, cut into stages, with copies of the whole if asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.batches import to_device
from trainkit.checkpoints.shards import Shards
from trainkit.data import Source
from trainkit.errors import UserError
from trainkit.feed import make_feed
from trainkit.optimization import Clip, Optimization, configure
from trainkit.overlap import Overlap
from trainkit.phases import check_phases_run, has_phases
from trainkit.precision import Precision
from trainkit.step_output import StepOutput, read_evaluation_output, read_training_output
from trainkit.strategy import BatchPlan
from trainkit.task import TaskModule
from trainkit.window import MicroBatch, Window

from ..ddp.agreement import broadcast, check_same_model, gather, tensors_of
from ..ddp.failure import StoreBoard
from ..process_group import ProcessGroupStrategy
from ..shared_buffers import SharedBuffers
from .arguments import checked_balance, checked_count, checked_name, refuse_compiled
from .choice import Choice
from .failures import Failures
from .grid import Grid
from .messages import Messages
from .partition import Shared
from .planning import Costs
from .preview import preview
from .report import write_plan, write_timeline
from .runtime import Runtime
from .scaled_together import ScaledTogether
from .schedules import SCHEDULES, Schedule, Span, forward_only
from .sharing import OutputSharing
from .stage_gradients import StageGradients
from .staged_step import StagedStep
from .staging import Act, Staging, act_name, costs_of, only_act, rehearsals
from .table import PartitionPlan
from .whole_state import WholeState

logger = logging.getLogger(__name__)

T = TypeVar("T")
TRAINING = "training_step"
RECORDINGS = ("auto", "real", "fake")
MICRO_BATCHES_PER_STAGE = 2
"""Micro-batches for each stage where the user says nothing: a third of the time is idle with so many."""


class Pipeline(ProcessGroupStrategy):
    """Cuts the task into stages, one a process, and leads the micro-batches of each step through them.

    Four ranks as two stages and two copies (replicas); replicas read different samples, stages the same::

                    stage 0    stage 1
        replica 0   rank 0 --> rank 1
        replica 1   rank 2 --> rank 3

    The task needs no change: its step is recorded on the first batch, cut, and run again on every rank, which
    executes only its own part.

    Args:
        stages: Processes that share one copy of the task.
        replicas: Copies that train on different samples.
        schedule: `interleaved` (a backward as soon as it is possible), `simple` (all forwards, then all
            backwards), `interleaved_virtual` (`interleaved`, with several stages on each rank).
        stages_per_rank: Stages on each rank, for `interleaved_virtual`.
        cuts: Names of the modules that begin the second and later stages, or a stage for each pattern of names;
            by default found from what each module costs.
        shared: Where a parameter is that several places of the step use, as tied embeddings: `together` (these are in
            one stage), `replicated` (each stage that uses it has a copy, and gradients are added up), `auto`
            (together, unless that is much slower; cuts of your own must not come between).
        balance: `speed`, `memory`, or a share between 0 and 1 of memory against time.
        record: How the step is recorded: `real` (run on the CPU, and timed there if that is where it trains), `fake`
            (nothing is computed; times follow from operations), `auto` (`fake` for a task on the meta device).
        device: `auto`, `cpu` or `cuda`.
        accumulate: Micro-batches of a step on each replica; by default two for each stage.
        micro_batch_size: Samples of a micro-batch, at most; another way to say it.
        broadcast_buffers: Whether buffers (batch-norm statistics) are those of the first replica after every step.
        timeline: Whether each step leaves a picture of who did which micro-batch when in the run's folder.
        timeout: Seconds to wait for another rank.
        backend: `auto` (gloo on the CPU, nccl on CUDA), or a backend of torch.distributed, for what replicas say
            to each other; between stages it is always gloo.
        launch: Who starts the ranks: `local` (this process, on this machine) or `ray` (a Ray cluster).

    """

    shows_modules = False

    def __init__(
        self,
        *,
        stages: int = 2,
        replicas: int = 1,
        schedule: str = "interleaved",
        stages_per_rank: int = 2,
        cuts: Sequence[str] | Mapping[str, int] | None = None,
        shared: Shared = "auto",
        balance: str | float = "speed",
        record: str = "auto",
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        broadcast_buffers: bool = True,
        timeline: bool = False,
        timeout: float = 1800.0,
        backend: str = "auto",
        launch: str = "local",
    ) -> None:
        super().__init__(
            device=device,
            accumulate=accumulate,
            micro_batch_size=micro_batch_size,
            broadcast_buffers=broadcast_buffers,
            timeout=timeout,
            backend=backend,
            launch=launch,
        )
        for name, value in (("stages", stages), ("replicas", replicas), ("stages_per_rank", stages_per_rank)):
            checked_count(name, value)
        self.stages = stages
        self.replicas = replicas
        self.schedule = checked_name("schedule", schedule, SCHEDULES)
        self.stages_per_rank = stages_per_rank if schedule == "interleaved_virtual" else 1
        self._schedule = Schedule(schedule, stages, self.stages_per_rank)
        self.cuts = cuts
        self.shared = checked_name("shared", shared, get_args(Shared))
        self.balance = checked_balance(balance)
        self.record = checked_name("record", record, RECORDINGS)
        self.draws_timeline = timeline
        self._waited_before: float | None = None  # when overlap was asked for
        self.stage = 0
        self.partition_plan: PartitionPlan | None = None
        """The stages, once the first step has been planned."""
        self._grid: Grid | None = None
        self._staging: Staging | None = None
        self._runtime: Runtime | None = None
        self._sharing: OutputSharing | None = None
        self._failures: Failures | None = None
        self._gradients: dict[str, StageGradients] = {}  # by phase
        self._state = WholeState()
        self._optimizations: dict[str, Optimization] = {}  # by phase
        self._phase = ""
        self._begun: Iterator[Window] | None = None  # the windows of training, of which the first was looked at

    # ---- Where the ranks are

    def num_ranks(self) -> int:
        """Return the number of processes: one for each stage of each replica."""
        return self.stages * self.replicas

    def name_of_process(self, process: int) -> str:
        """Return what to call a process in messages: its stage says more than its rank."""
        replica, stage = divmod(process, self.stages)
        return f"rank {process}, stage {stage} of replica {replica}"

    def check_phases(self, task: TaskModule) -> None:
        """Raise UserError for copies of parameters in several stages, which phases cannot have."""
        if self.shared == "replicated":
            raise UserError(
                f"{type(task).__name__} has phases, and strategy.shared=replicated would give stages copies of what "
                "several of them use. Each parameter is in one stage there: type strategy.shared=together."
            )

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that have copies of this rank's part: the same stage of every replica."""
        return super().group if self._grid is None else self._grid.copies

    @property
    def process(self) -> int:
        """Stages of one replica are neighbours."""
        return self.rank * self.stages + self.stage

    @property
    def num_processes(self) -> int:
        return self.replicas * self.stages

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user: the first stage of the first replica."""
        return self.rank == 0 and self.stage == 0

    def setup(self, precision: Precision) -> None:
        """Join the other ranks, and find this rank's stage and replica; collective."""
        super().setup(precision)
        grid = Grid.join(stages=self.stages, replicas=self.replicas, limit=self._limit)
        self._grid, self.rank, self.stage, self.world_size = grid, grid.replica, grid.stage, self.replicas
        self._optimizations, self._gradients, self._phase, self._begun = {}, {}, "", None
        self._state = WholeState()
        self._staging = Staging(
            num_ranks=self.stages,
            stages_per_rank=self.stages_per_rank,
            group=grid.pipeline,
            cuts=self.cuts,
            shared=self.shared,
            balance=self.balance,
            record=self.record,
            device=self.device,
        )
        self._failures = Failures(
            self._board or StoreBoard(grid.pipeline, token="pipeline"),
            name=f"stage {self.stage} of replica {self.rank}",
            step=lambda: max(self._steps - 1, 0),
        )
        self._runtime = Runtime(
            Messages(grid.pipeline, rank=self.stage, device=self.device), device=self.device, failures=self._failures
        )
        self._sharing = OutputSharing(grid.pipeline, rank=self.stage, device=self.device)

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout_seconds)

    def prepare(self, task: TaskModule) -> None:
        """Leave rank 0's parameters and buffers on every rank; they stay in host memory until the first step is cut.

        What lies on the meta device stays there until then, and is made only where it is needed.
        """
        self.precision.prepare(task)
        check_same_model(tensors_of(task), super().group)  # or the broadcasts that follow might crash or hang
        everything = [tensor for tensor in (*task.parameters(), *task.buffers()) if not tensor.is_meta]
        for tensor in everything:
            tensor.data = tensor.data.cpu()
        self._trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        self._all_trained = self._trained
        if self.stage == 0:
            broadcast(everything, self.group)
        broadcast(everything, self._stage_group)

    def prepare_optimization(self, task: TaskModule, optimization: Optimization) -> None:
        """Remember an optimizer, whose state follows the parameters to their stages."""
        if not callable(getattr(task, optimization.step_name, None)):
            raise UserError(
                f"{type(task).__name__} has no method {optimization.step_name}, by which a pipeline would cut it for "
                f"the phase '{optimization.phase}'. Define {optimization.step_name}(self, batch), which returns the "
                "loss, or type strategy=ddp."
            )
        self._optimizations[optimization.phase] = optimization

    def prepare_steps(self, task: TaskModule, windows: Iterator[Window]) -> None:
        """Record training's first micro-batch, cut the task by it, and leave each stage its part; collective."""
        first = next(windows, None)
        if first is None:
            return
        self._begun = chain([first], windows)
        task.train()
        batches = [self._move_for_evaluation(micro_batch.batch) for micro_batch in first.micro_batches[:1]]
        with self._told():
            self._cut(task, batches, len(first.micro_batches))

    def windows(self, windows: Iterator[Window], source: Source) -> Iterator[Window]:
        """Return the windows with their micro-batches on the device, those that were begun first."""
        begun, self._begun = self._begun, None
        return super().windows(windows if begun is None else begun, source)

    def weights_for_caller(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained weights on the main rank if the caller is in another process; collective.

        Where the ranks were there before (torchrun), every one has the whole task again, in host memory.
        """
        if self._environment is None:
            self._state.make_whole(task)
            return None
        weights = {name: tensor.cpu() for name, tensor in self.state_dict(task).items()}
        return weights if self.is_main else None

    def _told(self) -> AbstractContextManager[None]:
        assert self._failures is not None
        return self._failures.told()

    def tell_failure(self, why: str) -> None:
        """Let the other ranks know that this one stops."""
        if self._failures is not None:
            self._failures.tell(why)

    def teardown(self) -> None:
        """Leave the other ranks and release what was acquired; may be called twice."""
        for gradients in self._gradients.values():
            gradients.close()
        self._gradients = {}
        self._staging = self._grid = self._begun = None
        super().teardown()

    # ---- Who reads what

    @property
    def micro_batches_of_a_step(self) -> int:
        """Micro-batches in which each replica takes its part of a step."""
        return self.accumulate or MICRO_BATCHES_PER_STAGE * self.stages

    def plan(self, batch_size: int, *, even: bool = True) -> BatchPlan:
        """Return how a global batch is cut; without a wish of the user's into enough micro-batches for all stages."""
        if self.accumulate is not None or self.micro_batch_size is not None:
            return super().plan(batch_size, even=even)
        share = -(-batch_size // self.world_size)
        size = -(-share // min(self.micro_batches_of_a_step, share))
        return BatchPlan(batch_size, self.world_size, -(-share // size), size)

    # ---- A step

    @property
    def waited_seconds(self) -> float | None:
        """Seconds in which this stage has waited for others."""
        return None if self._runtime is None else self._runtime.waited_seconds

    def watch_overlap(self) -> None:
        """Note what has been waited so far."""
        self._waited_before = self.waited_seconds

    def take_overlap(self, steps: int) -> Overlap | None:
        """Return what this stage has waited since `watch_overlap`; messages that nobody waits for are hidden."""
        before, after = self._waited_before, self.waited_seconds
        if self.num_processes == 1 or before is None or after is None or not steps:
            return super().take_overlap(steps)
        return Overlap((after - before) / steps, steps=steps, note="messages and the schedule's bubble, on this stage")

    def forward_backward(self, task: TaskModule, window: Window) -> list[StepOutput]:
        """Leave in every `.grad` of this stage the gradient of the weighted mean loss over the global batch.

        Returns the outputs of this replica's micro-batches, on every stage. Collective.
        """
        self._steps += 1
        with self._told():
            return self._forward_backward(task, window)

    def begin_phase(self, optimization: Optimization, *, step_name: str) -> None:
        """Let the next `forward_backward` train a phase's parameters alone, by the task's method `step_name`."""
        super().begin_phase(optimization, step_name=step_name)
        self._phase = optimization.phase

    def end_phases(self) -> None:
        """Let every parameter require a gradient again that some phase trains."""
        super().end_phases()
        self._phase = ""

    def _forward_backward(self, task: TaskModule, window: Window) -> list[StepOutput]:
        step = partial(self._call, getattr(task, self._step_name))
        batches = [micro_batch.batch for micro_batch in window.micro_batches]
        staged = self._staged_training(task, batches)
        outputs: dict[int, StepOutput] = {}

        def read_loss(index: int, returned: Any) -> Tensor:
            micro_batch = window.micro_batches[index]
            output = read_training_output(returned, micro_batch.num_samples, task, self._step_name)
            loss = output.loss
            assert loss is not None
            output.loss = loss.detach()
            outputs[index] = output
            return self.precision.scale(loss * self.share_of(output, micro_batch, window))

        self.precision.scale(torch.zeros((), device=self.device))  # a scaler must have seen a loss, on every stage
        gradients = self._gradients[self._phase]
        assert self._runtime is not None
        actions = self._schedule.actions(self.stage, len(batches))
        around, seed = gradients.session_around(actions), _draw_seed()
        self._runtime.train(staged, step, batches, actions=actions, seed=seed, read_loss=read_loss, around=around)
        if not actions:
            gradients.reduce_nothing()
        shared = self._share(
            [outputs[index] for index in sorted(outputs)], staged, act_name(self._phase, self._step_name)
        )
        gradients.add_up_shared()
        self.finish_gradients(shared, window)
        if self._buffers is not None and self.replicas > 1:
            broadcast(self._buffers.now(), self.group)
        if self.draws_timeline and batches:
            self._draw_timeline(len(batches))
        return shared

    def _call(self, step: Callable[[Any], Any], batch: Any) -> Any:
        with self.precision.forward():
            return step(batch)

    def gradient_norm(self, optimization: Optimization) -> Tensor:
        """Return the 2-norm of all stages' gradients, those of shared parameters counted once; collective."""
        assert self._grid is not None
        return self._gradients[optimization.phase].norm(self._grid, self.device)

    def optimizer_step(self, optimization: Optimization) -> Tensor | None:
        """Update this stage's parameters; a step that fp16 skips on one stage is skipped on all. Collective."""
        if self.precision.scaler is None:
            return super().optimizer_step(optimization)
        return super().optimizer_step(ScaledTogether(optimization, self._agree_on_overflow))

    # ---- Evaluation

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

    def stop_evaluating(self, requested: bool) -> bool:
        """Return whether a stage of this replica was asked to stop, so that none leaves the others in a batch."""
        found = torch.tensor([int(requested)])
        with self._waiting(self._after("the agreement whether to go on evaluating")):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._stage_group)
        return bool(found.item())

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
        returned = self._runtime.forward(staged, step, [batch], actions=actions, seed=_draw_seed())
        return staged, list(returned.values())

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

    def _cut(self, task: TaskModule, batches: Sequence[Any], num_micro_batches: int) -> None:
        """Cut what the task is trained by, and leave each stage its part; collective."""
        assert self._staging is not None
        refuse_compiled(task)
        phase, step_name = self._phase, self._step_name
        self._staging.cut(task, self._acts(task), batches[0] if batches else None, everywhere=True)
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
            task, self._staging.placement, self._grid, limit=self._limit, board=self._board, phase=own
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
        if self.is_main:
            self._report_plan(self.partition_plan)

    def _report_plan(self, plan: PartitionPlan) -> None:
        if not self._optimizations or self.log_dir is None:
            logger.info("pipeline:\n%s", plan)
            return
        print(f"Pipeline of {len(plan.stages)} stages\n{plan}", flush=True)
        write_plan(plan, Path(self.log_dir))

    @property
    def _is_placed(self) -> bool:
        """Whether the task has been cut, so that this rank holds only a part."""
        return self._staging is not None and self._staging.placement is not None

    # ---- Talking to the other ranks: those of other replicas, unless it says otherwise

    def _share(self, outputs: list[StepOutput], staged: StagedStep, kind: str) -> list[StepOutput]:
        assert self._sharing is not None
        source = staged.segments[-1].rank
        return self._sharing.share(outputs if source == self.stage else None, source=source, kind=kind)

    @property
    def _stage_group(self) -> dist.ProcessGroup:
        """The stages of this rank's replica."""
        assert self._grid is not None
        return self._grid.pipeline

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Return the reduction of `tensor` over replicas; collective."""
        return tensor.detach().clone() if self.replicas == 1 else super().all_reduce(tensor, op)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the value of each process, of any stage and replica; collective."""
        with self._waiting(self._after("an all_gather")):
            return gather(value, super().group)

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value, on every stage of every replica; collective."""
        box: list[Any] = [value]
        with self._waiting(self._after("a broadcast")):
            dist.broadcast_object_list(box, src=0)
        received: T = box[0]
        return received

    def barrier(self) -> None:
        """Return when every rank, of any stage and replica, has come here; collective."""
        with self._waiting(self._after("a barrier")):
            dist.barrier()

    def agree(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank, of any stage and replica; collective."""
        found = torch.tensor([int(flag)], device=self.device)
        with self._waiting(self._after("an agreement")):
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def _agree_on_overflow(self, found: Tensor) -> Tensor:
        on_host = found.cpu()
        dist.all_reduce(on_host, dist.ReduceOp.MAX, group=self._stage_group)
        return on_host.to(found.device)

    # ---- State, whole and under the bare task's names

    def state_dict(self, task: TaskModule) -> dict[str, Any]:
        """Return the task's parameters and buffers, complete on the main rank."""
        return self._state.gather_task(task) if self.rank == 0 else task.state_dict()

    def load_state_dict(self, task: TaskModule, saved: dict[str, Any]) -> None:
        """Give each stage its part of the parameters and buffers in `saved`."""
        self._state.load_task(task, saved)

    def held(self, task: TaskModule) -> dict[str, Tensor]:
        """Return the parameters and buffers of this stage, themselves and by name; all of them before the cut."""
        everything = super().held(task)
        placement = None if self._staging is None else self._staging.placement
        if placement is None:
            return everything
        return {name: tensor for name, tensor in everything.items() if placement.is_held(name, self.stage)}

    def optimizer_state_dict(self, task: TaskModule, optimization: Optimization) -> dict[str, Any]:
        """Return the optimizer's state, complete on the main rank."""
        if not self._is_placed or self.rank != 0:
            return super().optimizer_state_dict(task, optimization)
        return self._state.gather_optimizer(optimization.optimizer)

    def shards(self, task: TaskModule, optimizations: Sequence[Optimization]) -> Shards | None:
        """Return the state with this stage's pieces of it, once the task has been cut."""
        optimizers = [optimization.optimizer for optimization in optimizations]
        return self._state.shards(task, optimizers, writes=self.rank == 0, all_gather=self.all_gather_object)

    def load_optimizer_state_dict(self, task: TaskModule, optimization: Optimization, saved: dict[str, Any]) -> None:
        """Give this stage's optimizer the state of its own parameters in `saved`."""
        self._state.load_optimizer(task, optimization.optimizer, saved)

    def choices(self) -> dict[str, Any]:
        """Return how the task is cut, so that a resumed run is cut the same way."""
        choice = None if self._staging is None else self._staging.choice
        return {} if choice is None else {"pipeline": choice.saved()}

    def take_choices(self, saved: Mapping[str, Any]) -> None:
        """Cut the task as in the run that is resumed, if it has as many stages."""
        if "pipeline" in saved and self._staging is not None and not self._is_placed:
            self._staging.known = Choice.loaded(saved["pipeline"])

    # ---- What happened when

    def timeline(self) -> list[list[Span]]:
        """Return what each stage of this replica did in the last window, and when; collective over its stages."""
        assert self._runtime is not None
        answers = gather((self._runtime.began, self._runtime.spans), self._stage_group)
        first = min(began for began, _ in answers)
        return [
            [Span(span.action, span.start + began - first, span.end + began - first) for span in spans]
            for began, spans in answers
        ]

    def _draw_timeline(self, num_micro_batches: int) -> None:
        spans = self.timeline()
        if self.is_main and self.log_dir is not None:
            write_timeline(spans, Path(self.log_dir), expected=self._schedule.bubble(num_micro_batches))

    # ---- The plan without training

    def preview(self, task: TaskModule, source: Source, *, precision: Precision) -> tuple[PartitionPlan, str]:
        """Return the plan for training on `source`, and its drawing; nothing is started, and the task stays whole."""
        check_phases_run(task, self)
        self.world_size = self.replicas
        self.precision = precision
        precision.setup(self.device)
        precision.prepare(task)
        self._all_trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        if has_phases(task):
            clip, steps = Clip(), 1000  # of which no plan depends
            phases = configure(task, clip=clip, precision=precision, total_steps=steps, fused=False, skip=False)
            self._optimizations = {optimization.phase: optimization for optimization in phases}
        window = next(self.windows(make_feed(source, self, seed=0).windows(0, 0), source))
        try:
            return preview(
                rehearsals(self._acts(task), task.train(), window.micro_batches[0].batch, self._costs(task)),
                len(window.micro_batches),
                schedule=self._schedule,
                balance=self.balance,
                cuts=self.cuts,
                shared=self.shared,
            )
        finally:
            self.end_phases()
            self._optimizations = {}

    def _costs(self, task: TaskModule) -> Costs:
        return costs_of(self.record, task, self.device)


def _draw_seed() -> int:
    """Return the seed of a window, drawn from torch's generator, which advances equally on all stages."""
    return int(torch.randint(2**62, ()).item())
