"""Pipeline strategy: one task over several devices, partitioned into stages, with replicas if asked."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from math import ceil
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge, Unit
from torch import Tensor, nn

from trainkit.checkpoint.sharded_state import ShardedState
from trainkit.data.batch import BatchPlan, MicroBatch, StepBatch
from trainkit.data.data import StageData
from trainkit.data.loader import open_loader
from trainkit.devices import has_streams, pick, uuid_of
from trainkit.distributed.collectives import Collectives, broadcast, check_same_model, tensors_of
from trainkit.distributed.failure_store import FailureStore
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput, read_evaluation_output, read_training_output
from trainkit.model.carried_state import shared_by_micro_batches
from trainkit.model.deferred_init import make_real
from trainkit.model.references import references_to
from trainkit.optim.optimizer import GradientClipping, PhaseOptimizer, configure_optimizers
from trainkit.optim.precision import Precision
from trainkit.optim.separable import coupled_by, step_hooks
from trainkit.profiling import NO_COMMUNICATION, Overlap
from trainkit.settings import check_choice
from trainkit.strategy import Strategy, loss_weight, named_state
from trainkit.task import TaskModule, begin_training, has_phases, is_deferred
from trainkit.tree import map_tensors, to_device

from ..merged_buffers import MergedBuffers
from ..multiprocess import MultiProcessStrategy
from .plan.memory import TrainingMemory
from .plan.partition import SharedParameters
from .plan.plan_report import PlanReport, StepTimelines, draw_stages, write_plan
from .plan.planner import TrainingStep
from .plan.schedules import SCHEDULES, SEVERAL_STAGES, SYNONYMS, Schedule, most_in_flight
from .plan.stage import Placement
from .plan.traffic import Placing
from .run.communication import lane_backend
from .run.gradients import StageGradients
from .run.mesh import PipelineCollectives, PipelineErrors, PipelineMesh
from .run.optimizer_shards import OptimizerShards
from .run.runtime import PipelineRuntime, ReadLoss, lanes_of
from .run.stage_executor import StageExecutor, in_precision
from .run.staged_model import StagedModel, step_key
from .run.state import PipelineState
from .run.verification import Verification, fits_in_memory
from .trace.graph import Step
from .trace.step_state import copy_batch

logger = logging.getLogger(__name__)

MICRO_BATCHES_PER_STAGE = 2  # by default; more of them would make a larger share of the time busy


@dataclass(kw_only=True, eq=False, repr=False)
class PipelineStrategy(MultiProcessStrategy):
    """Partitions the task into stages, one a process, and passes the micro-batches of each step through them.

    Four ranks as two stages and two replicas; replicas read different samples, stages the same::

                    stage 0    stage 1
        replica 0   rank 0 --> rank 1
        replica 1   rank 2 --> rank 3

    The task needs no change: its step is traced on the first batch and partitioned; then each rank runs the step,
    but executes only the nodes of its stage.

    Further settings are those of `MultiProcessStrategy`.

    Args:
        stages: Number of pipeline stages (processes per replica).
        replicas: Copies of the task, which train on different samples.
        placement: What each of several hosts has: `cluster` (the stages of a replica), `spread` (the replicas of a
            stage), or `auto` (what sends fewer bytes between hosts in a step).
        schedule: `gpipe` or `simple` (all forwards first), `1f1b` or `interleaved` (each backward as soon as
            possible), `interleaved_1f1b` (`1f1b` with several stages per rank).
        stages_per_rank: Stages on each rank, for `interleaved_1f1b`.
        max_in_flight: Most micro-batches that a rank keeps between forward and backward, for less memory and more idle
            time; by default as many as the schedule has. With `1f1b` and more of them than stages, up to twice as many,
            ranks run ahead, and hide the time of messages between hosts.
        split_points: Names of the modules that begin the second and later stages; by default found from the cost of
            each module.
        shared_parameters: Placement of a parameter that several nodes of the step use, such as tied embeddings:
            `same_stage` (all its users are in one stage), `replicated` (each stage that uses it has a copy, and
            gradients are summed), `auto` (`same_stage`, unless that is much slower).
        balance: `speed`, `memory`, or a share between 0 and 1 of memory against time.
        trace: `eager` (run and time one step on the CPU), `fake` (FakeTensor, no compute; times are estimated) or
            `auto` (`fake` for a task on the meta device).
        accumulate: Micro-batches of a step on each replica; by default two for each stage.
        micro_batch_size: Largest number of samples of a micro-batch, in place of `accumulate`.
        broadcast_buffers: Give all replicas the buffers (batch-norm statistics) of the first one after every step.
        shard_optimizer: Divide the optimizer of a stage over its replicas: each keeps the state of some parameters, and
            updates these for all.
        verify: Number of steps at the beginning of a run that are compared with the same steps in one process, which
            the first stage runs before: `auto` (one, if the whole task takes a small share of its memory), `off`, or
            a number. A difference ends the run with the name of the first call that differs.
        record_timeline: Write the actions of all ranks in a step of median length to the run folder, for the report.
        backend: Backend between ranks: `auto` (gloo on the CPU, nccl on CUDA), or one of torch.distributed. With nccl
            and a CUDA device for each rank, stages use it too; otherwise they send by gloo, through host memory.
        launcher: Starts the ranks: `local` (this process, on this machine) or `ray` (a Ray cluster).

    """

    supports_module_hooks = False  # each stage runs a part of the modules
    supports_scripts = False
    initializes_modules = True
    stages: Annotated[int, Ge(1)] = 2
    replicas: Annotated[int, Ge(1)] = 1
    placement: Literal["auto", "cluster", "spread"] = "auto"
    schedule: str = "1f1b"
    stages_per_rank: Annotated[int, Ge(1)] = 2
    max_in_flight: Annotated[int, Ge(1)] | None = None
    split_points: Sequence[str] | None = None
    shared_parameters: SharedParameters = "auto"
    balance: str | float = "speed"
    trace: str = "auto"
    shard_optimizer: bool = False
    verify: Annotated[int, Ge(0), Unit("steps")] | Literal["auto", "off"] = "auto"
    record_timeline: bool = False
    # No settings of a pipeline, whose ranks are stages x replicas, and all of those that were started.
    devices: int | str = field(default="auto", init=False)
    process_group: dist.ProcessGroup | None = field(default=None, init=False)
    runtime: PipelineRuntime = field(init=False)  # from `setup` on

    def __post_init__(self, device: str, micro_batch_size: int | Literal["auto"] | None) -> None:
        check_choice("schedule", self.schedule, [*SCHEDULES, *SEVERAL_STAGES, *SYNONYMS])
        super().__post_init__(device, micro_batch_size)
        if self.shard_optimizer and self.replicas == 1:
            raise UserError(
                "shard_optimizer=true divides the optimizer of a stage over its replicas, and there is one. Type "
                "strategy.replicas=2, or strategy.shard_optimizer=false."
            )
        name, limit = SYNONYMS.get(self.schedule, self.schedule), self.max_in_flight
        if limit is not None:
            _check_in_flight(name, limit, needed=most_in_flight(self.stages, self.stages_per_rank))
        self._schedule = Schedule(name, self.stages, self.stages_per_rank if name in SEVERAL_STAGES else 1, limit)
        self.mesh = PipelineMesh(stages=self.stages, replicas=self.replicas, placement=self.placement)
        self.staged_model = StagedModel(
            schedule=self._schedule,
            split_points=self.split_points,
            shared_parameters=self.shared_parameters,
            balance=self.balance,
            trace=self.trace,
        )
        self.state = PipelineState()
        self.plan_report: PlanReport | None = None
        """The stages, once the task is partitioned."""
        self._gradients: dict[str, StageGradients] = {}  # by phase
        self._phase_optimizers: dict[str, PhaseOptimizer] = {}  # by phase
        self._tried_hooks: dict[str, list[Callable[..., Any]]] = {}  # of optimizers' steps, by phase
        self._phase = ""
        self._to_verify: dict[str, int] = {}  # by step key: the number of steps that are still to be verified
        self._begun: Iterator[StepBatch] | None = None  # training's batches; the first one has been traced
        self._waited_before: float | None = None  # at the start of the overlap profile

    # ---- Ranks

    @property
    def keeps_num_ranks(self) -> bool:
        return True

    def num_ranks(self) -> int:
        return self.mesh.stages * self.mesh.replicas

    def rank_name(self, process: int) -> str:
        replica, stage = self.mesh.position(process)
        return f"rank {process}, stage {stage} of replica {replica}"

    def setup(self, precision: Precision) -> None:
        """Join the other ranks, with nothing partitioned; collective."""
        super().setup(precision)
        self.staged_model.dtype = precision.compute_type
        self.mesh.join(timeout=timedelta(seconds=self.timeout_seconds))
        self._of_all_ranks = self.comm  # the collectives below are made of it, again when ranks are placed otherwise
        self._take_place()

    def _take_place(self) -> None:
        """Take this rank's place in the mesh, with nothing partitioned."""
        self._end_runtime()
        self._timelines = StepTimelines()
        mesh = self.mesh
        self.comm = PipelineCollectives(self._of_all_ranks, mesh, step=lambda: self._steps)
        # A single rank has no failure store, and nobody reads its errors in the one that is made here.
        errors = PipelineErrors(
            self.comm.failure_store or FailureStore(mesh.stage_group, token="pipeline"),
            name=f"stage {mesh.stage} of replica {mesh.replica}",
            step=lambda: max(self._steps - 1, 0),  # messages count steps from 0, and some errors come before the first
        )
        self.runtime = PipelineRuntime(mesh, device=self.device, errors=errors)
        self.staged_model.clear()
        self.state = PipelineState()
        self._phase_optimizers, self._gradients, self._phase, self._begun = {}, {}, "", None
        self._tried_hooks = {}

    def place_ranks(self, task: TaskModule, source: StageData, saved: Mapping[str, Any]) -> bool:
        """Place ranks as in the `saved` state of a resumed run, or so that a step sends fewer bytes between hosts.

        Returns True if ranks have moved. Collective. The main rank plans the first batch of `source`.
        """
        mesh, saved_grid, placed = self.mesh, saved.get("grid"), self.mesh.placed
        # Every rank has the same `saved` and knows the same hosts, so that all of them come to the collectives here.
        if mesh.placement == "auto" and mesh.has_choice:
            placed = mesh.placement_of(saved_grid) or self._cheaper_placement(task, source)
        moves = placed != mesh.placed
        if moves:
            mesh.place(placed)
            self._take_place()
        # With another number of stages or replicas random numbers are others in any case.
        has_same_shape = saved_grid is not None and list(map(len, saved_grid)) == [mesh.stages] * mesh.replicas
        if has_same_shape and saved_grid != mesh.grid and self.comm.is_main:
            logger.warning(
                "ranks are placed as %s, but were %s in the run that is resumed: random numbers continue from new "
                "seeds. Resume on the same hosts%s to repeat them.",
                mesh.grid,
                saved_grid,
                "" if mesh.placement == "auto" else " and set strategy.placement=auto",
            )
        return moves

    def _cheaper_placement(self, task: TaskModule, source: StageData) -> Placing:
        """Return the placement with which a step sends fewer bytes between hosts. Collective."""
        if is_deferred(task):
            make_real(task)  # as `prepare` would
        best: Placing = "cluster"
        if self.comm.is_main:
            with suppress(UserError):  # which training will raise
                best = min(self._plan_alone(task, source).traffic, key=lambda row: row.total).placement
        return self.comm.broadcast_object(best)

    def places(self) -> list[list[int]]:
        """Return the rank of each stage of each replica."""
        return self.mesh.grid

    def publish_failure(self, why: str) -> None:
        if hasattr(self, "runtime"):  # an error may come before `setup` has made it
            self.runtime.errors.publish(why)

    def _end_runtime(self) -> None:
        if hasattr(self, "runtime"):  # an error may come before `setup` has made it
            self.runtime.close()

    def _release(self) -> None:
        self._end_runtime()
        # Reducers first: they use the process groups that `leave` destroys.
        for gradients in self._gradients.values():
            gradients.close()
        self._gradients, self._begun = {}, None
        self.staged_model.clear()
        # While an exception ends this rank, others may wait in the groups, and destroying one could block.
        self.mesh.leave(destroy=sys.exc_info()[1] is None)

    # ---- Preparation

    def plan(self, batch_size: int, *, even: bool = True) -> BatchPlan:
        """Return the split of a global batch; by default into enough micro-batches for all stages."""
        if self.accumulate is not None or self.micro_batch_size is not None:
            return super().plan(batch_size, even=even)
        per_replica = ceil(batch_size / self.comm.world_size)
        size = ceil(per_replica / min(MICRO_BATCHES_PER_STAGE * self.mesh.stages, per_replica))
        return BatchPlan(batch_size, self.comm.world_size, ceil(per_replica / size), size)

    def prepare(self, task: TaskModule) -> None:
        """Copy rank 0's parameters and buffers to every rank, in host memory until the task is partitioned. Collective.

        Tensors on the meta device stay there until then, and are created only on the ranks that hold them; a task that
        was built in `deferred_init` is made whole here.
        """
        if is_deferred(task):
            make_real(task)
        self.precision.prepare(task)
        check_same_model(tensors_of(task), self._all_ranks)  # or the broadcasts below could crash or hang
        if self.mesh.stages > 1:
            references_to(task, list(task.parameters()), moved="which lies on one stage only")
        # In host memory, as a device may not have room for the whole task. By `.data`, as optimizers have the objects.
        everything = [tensor for tensor in named_state(task).values() if not tensor.is_meta]
        for tensor in everything:
            tensor.data = tensor.data.cpu()
        self._all_trained = self._trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        # First to the other replicas, then in each of them to the other stages.
        if self.mesh.stage == 0:
            broadcast(everything, self.comm.group)
        broadcast(everything, self.mesh.stage_group)

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Register an optimizer; its state will follow the parameters to their stages."""
        if phase_optimizer.needs_closure:
            raise UserError(
                "LBFGS needs the gradients of all parameters together, and strategy=pipeline divides them over the "
                "stages. Set strategy=ddp, or use another optimizer, such as torch.optim.AdamW."
            )
        step_name = phase_optimizer.step_name
        if not callable(getattr(task, step_name, None)):
            raise UserError(
                f"{type(task).__name__} has no method {step_name}, by which a pipeline would partition it for the "
                f"phase '{phase_optimizer.phase}'. Define {step_name}(self, batch), which returns the loss, or type "
                "strategy=ddp."
            )
        self._check_separable(phase_optimizer)
        if self.shard_optimizer and phase_optimizer.has_mode:
            raise UserError(
                f"{type(phase_optimizer.optimizer).__name__} evaluates with other weights than it trains, of which "
                "shard_optimizer=true gives each replica a part. Set strategy.shard_optimizer=false."
            )
        # Gradients that overflow on one stage make all of them skip the step.
        phase_optimizer.max_over_ranks = self.mesh.max_over_stages
        self._phase_optimizers[phase_optimizer.phase] = phase_optimizer

    def _check_separable(self, phase_optimizer: PhaseOptimizer) -> None:
        """Raise UserError if the optimizer or its present hooks use several parameters together, which ranks divide."""
        hooks = step_hooks(phase_optimizer.optimizer)
        # Asked before every step, as hooks may come during the run; steps are tried only when the hooks are others.
        if self.comm.num_processes == 1 or self._tried_hooks.get(phase_optimizer.phase) == hooks:
            return
        self._tried_hooks[phase_optimizer.phase] = hooks
        culprit = coupled_by(phase_optimizer.optimizer)
        if culprit is not None:
            raise UserError(
                f"{culprit} may use several parameters or gradients together, and strategy=pipeline leaves each rank "
                "some of them. To clip gradients type trainer.max_grad_norm=1.0; otherwise set strategy=ddp."
            )

    def prepare_steps(self, task: TaskModule, batches: Iterator[StepBatch]) -> None:
        """Trace training's first micro-batch, partition the task, and keep the local part of it. Collective."""
        first = next(batches, None)
        if first is None:
            return
        self._begun = chain([first], batches)  # a stream cannot be read twice, and the first batch is trained on too
        begin_training(task)
        batch = first.micro_batches[0].batch if first.micro_batches else None
        # A replica may have no samples of a short batch; all ranks know that, so that all join the exchange.
        traced = self._move_for_evaluation(batch if first.is_even else self._batch_of_any_rank(batch))
        with self.runtime.errors.published():
            self._partition(task, traced, len(first.micro_batches))

    def step_batches(self, batches: Iterator[StepBatch], *, pin_memory: bool) -> Iterator[StepBatch]:
        """Yield the batches with their micro-batches on the device, beginning with the traced one."""
        begun, self._begun = self._begun, None
        return super().step_batches(batches if begun is None else begun, pin_memory=pin_memory)

    def _partition(self, task: TaskModule, batch: Any, num_micro_batches: int) -> None:
        """Partition the task by its training steps, and keep the local part on the device. Collective."""
        phase, step_name = self._phase, self._step_name  # tracing begins and ends the phases of the task
        # Before the partition drops most of the task. One rank decides for all: free memory differs, and to verify is
        # collective.
        fits = self.comm.broadcast_object(fits_in_memory(task, self.device))
        placement = self._partition_by(task, self._training_steps(task), batch, num_micro_batches, all_replicas=True)
        # Each micro-batch would read what the one before has left: results would depend on their number.
        carried = [name for executor in self.staged_model.steps.values() for name in executor.graph.handed_on]
        if carried and self.num_micro_batches > 1:
            raise UserError(shared_by_micro_batches(type(self).__name__, task, carried[0]))
        # Collective: every rank has the same phases in the same order.
        self._gradients = {
            name: StageGradients(
                task,
                placement,
                self.mesh,
                failure_store=self.comm.failure_store,
                phase=self.staged_model.phase_parameters(task, self._phase_optimizers[name]) if name else None,
            )
            for name in self._phase_optimizers or [""]
        }
        backend = self._lane_backend()
        if backend is not None:
            lanes = set().union(*(lanes_of(executor) for executor in self.staged_model.steps.values()))
            self.runtime.connect(self.mesh.lane_groups(lanes, backend=backend))
        if self.broadcast_buffers:
            # Replicas have equal buffers of this stage; the others are placeholders here.
            self._buffers = MergedBuffers(task, is_shared=lambda name: placement.is_held(name, self.mesh.stage))
            self._buffers.remember(self._merged_names)
        verify = int(fits) if self.verify == "auto" else 0 if self.verify == "off" else int(self.verify)
        self._to_verify = dict.fromkeys(self.staged_model.steps, verify)
        if phase:
            self.begin_phase(self._phase_optimizers[phase], step_name=step_name)

    def _lane_backend(self) -> str | None:
        """Return the backend of groups between stages; `None` if messages go through host memory. Collective."""
        if not has_streams(self.device):
            return None
        # By UUID: each process may see its GPU as the first one, and NCCL refuses two ranks on one.
        devices = self.comm.all_gather_object(uuid_of(self.device))
        asked = self.backend
        return lane_backend(dist.get_backend_config(self._all_ranks) if asked == "auto" else asked, devices)

    def _training_steps(self, task: TaskModule) -> dict[str, TrainingStep]:
        """Return the training steps by step key: one for each phase, or a single one for a task without phases."""
        if not any(self._phase_optimizers):
            return {step_key("", "training_step"): TrainingStep(in_precision(self.precision, task.training_step))}
        return {
            step_key(phase, phase_optimizer.step_name): TrainingStep(
                in_precision(self.precision, getattr(task, phase_optimizer.step_name)),
                partial(self.begin_phase, phase_optimizer, step_name=phase_optimizer.step_name),
                1.0 / phase_optimizer.every,
            )
            for phase, phase_optimizer in self._phase_optimizers.items()
        }

    def _partition_by(
        self,
        task: TaskModule,
        steps: dict[str, TrainingStep],
        batch: Any,
        num_micro_batches: int,
        *,
        all_replicas: bool,
    ) -> Placement:
        """Partition the task by `steps`, and keep the local part on the device. Collective."""
        mesh, device = self.mesh, self.device
        training = self._training_memory(task, num_micro_batches)
        placement = self.staged_model.partition(
            task, steps, batch, training=training, mesh=mesh, device=device, all_replicas=all_replicas
        )
        if any(self._phase_optimizers):  # phases; otherwise frozen parameters must stay frozen
            self.end_phases()
        optimizers = [phase_optimizer.optimizer for phase_optimizer in self._phase_optimizers.values()]
        optimizer_shards = None
        if self.shard_optimizer and optimizers:
            trained = {id(item) for phase in self._phase_optimizers.values() for item in phase.parameters}
            held = {
                name: parameter
                for name, parameter in task.named_parameters()
                if id(parameter) in trained and placement.is_held(name, mesh.stage)
            }
            optimizer_shards = OptimizerShards(held, mesh)
        self.state.keep_local(
            task,
            optimizers,
            placement,
            group=mesh.stage_group,
            device=device,
            optimizer_shards=optimizer_shards,
            replaced=self.staged_model.replaced,
        )
        mesh.sync_rng()  # one stage has traced, and each has made its parameters: they may have drawn different numbers
        self.plan_report = report = self.staged_model.report(
            task, steps, training, mesh, broadcast_buffers=self.broadcast_buffers
        )
        if self.comm.is_main and self._phase_optimizers and self.log_dir is not None:
            print(f"Pipeline of {len(report.stages)} stages\n{report}", flush=True)
            write_plan(report, self.log_dir)
        elif self.comm.is_main:
            logger.info("pipeline:\n%s", report)
        return placement

    def _training_memory(self, task: TaskModule, num_micro_batches: int) -> TrainingMemory:
        optimizers = {
            step_key(phase, phase_optimizer.step_name): phase_optimizer
            for phase, phase_optimizer in self._phase_optimizers.items()
        }
        return TrainingMemory.of(
            task,
            optimizers,
            num_micro_batches=num_micro_batches,
            replicas=self.mesh.replicas,
            shard_optimizer=self.shard_optimizer,
        )

    # ---- Phases

    def check_phases(self, task: TaskModule) -> None:
        """Raise UserError for phases with replicated parameters, which are not supported together."""
        if self.staged_model.shared_parameters == "replicated":
            raise UserError(
                f"{type(task).__name__} has phases, and strategy.shared_parameters=replicated would copy parameters "
                "that several stages use. With phases each parameter is in one stage: type "
                "strategy.shared_parameters=same_stage."
            )

    def begin_phase(self, phase_optimizer: PhaseOptimizer, *, step_name: str) -> None:
        """Restrict the next `forward_backward` to the parameters of a phase and its method `step_name`."""
        # By identity: `in` with tensors would compare their elements.
        trained = {id(parameter) for parameter in phase_optimizer.parameters}
        for parameter in self._all_trained:
            parameter.requires_grad_(id(parameter) in trained)
        self._trained = phase_optimizer.parameters
        self._phase, self._step_name = phase_optimizer.phase, step_name
        self.precision.begin_phase(phase_optimizer.phase)

    def end_phases(self) -> None:
        """Make every parameter that some phase trains require a gradient again."""
        # Only after a phase: what the user has frozen since the last step must stay so.
        for parameter in self._all_trained if self._phase else ():
            parameter.requires_grad_(True)
        self._trained, self._phase, self._step_name = self._all_trained, "", "training_step"

    # ---- Training

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Compute in every `.grad` of this stage the gradient of the weighted mean loss over the global batch.

        Returns the outputs of this replica's micro-batches, on every stage. Collective.
        """
        self._steps += 1
        with self.runtime.errors.published():
            outputs = self._forward_backward(task, batch)
            if self.record_timeline and batch.micro_batches:
                spans = self.runtime.timeline()
                if self.comm.is_main and self.log_dir is not None:
                    self._timelines.add(spans, self.log_dir, expected=self._schedule.bubble(len(batch.micro_batches)))
            return outputs

    def _forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        batches = [micro_batch.batch for micro_batch in batch.micro_batches]
        if self.staged_model.placement is None:  # the caller has not called `prepare_steps`
            self._partition(task, batches[0] if batches else None, len(batches))
        self._begin_buffers()
        executor = self.staged_model.training_step(task, self._phase, self._step_name)
        key = step_key(self._phase, self._step_name)
        step = in_precision(self.precision, getattr(task, self._step_name))
        outputs: dict[int, StepOutput] = {}

        def read_loss(index: int, returned: Any) -> Tensor:
            micro_batch = batch.micro_batches[index]
            output = read_training_output(
                returned, micro_batch.num_samples, task, self._step_name, of=batch.num_samples
            )
            loss = output.loss
            assert loss is not None
            output.loss = loss.detach()  # or the graph of every micro-batch would live until the end of the step
            outputs[index] = output
            return self.precision.scale(loss * loss_weight(output, micro_batch, batch))

        self.precision.scale(torch.zeros((), device=self.device))  # on every stage the scaler must have seen a loss
        gradients = self._gradients[self._phase]
        # The user may freeze and unfreeze parameters between steps; phases set what they train themselves.
        if gradients.follow_trained() and not self._phase:
            self._all_trained = self._trained = [item for item in task.parameters() if item.requires_grad]
        # Those of every rank: from the message of another one follows what it has received.
        actions = [self._schedule.actions(rank, len(batches)) for rank in range(self.mesh.stages)]
        with self.state.absent.readable():
            verification = self._verification(task, executor, step, batches, read_loss)
        check = None
        if batches:
            elsewhere = self.state.assigned_elsewhere
            check = self.staged_model.first_step_check(key, task, self.local_state, elsewhere=elsewhere)
        # Readable, as hooks of modules of other stages, and copies of attributes for each stage, read the zeros.
        recorded = nullcontext() if verification is None else verification.recorded()
        with self.state.absent.readable(), recorded:
            around = gradients.reduce_around(actions[self.mesh.stage])
            self.runtime.train(executor, step, batches, actions=actions, read_loss=read_loss, around=around)
        if check is not None:
            check.finish()
        self.state.hide_assigned()
        if not actions[self.mesh.stage]:  # or the other replicas would wait in their reduction forever
            gradients.reduce_zeros()
        # From here on every stage needs the outputs: for logs, and for the weights that gradients are divided by.
        ordered = [outputs[index] for index in sorted(outputs)]
        shared = self.runtime.broadcast_outputs(ordered, executor, key)
        gradients.sum_shared()  # after the sums over replicas, which have ended with the last backward
        if verification is not None:
            assert self.staged_model.placement is not None
            verification.finish(self.staged_model.placement, self.comm, name=self.rank_name(self.comm.process))
        # After the verification, whose step in one process is not divided by the sum of weights.
        self._normalize_gradients(shared, batch)
        if self.mesh.replicas > 1:
            self._synchronize_buffers()
            # No rank updates before all have their gradients: after a loss the step can be taken back. The first stage
            # comes last, and the others would wait for it in the next step.
            if self.handover is not None and self.hands_over:
                self.comm.should_stop_now(False)  # in shared memory: a barrier of the group takes longer
        return shared

    def _verification(
        self, task: TaskModule, executor: StageExecutor, step: Step, batches: Sequence[Any], read_loss: ReadLoss
    ) -> Verification | None:
        """Return the comparison of this step with one process, or `None` if it is not to be verified. Collective."""
        key = step_key(self._phase, self._step_name)
        if not self._to_verify[key]:
            return None
        self._to_verify[key] -= 1  # on every rank, as what follows is collective

        def run(whole_executor: StageExecutor) -> None:
            # Copies, as the step may write to its batch, which the pipeline needs afterwards.
            actions, copies = [Schedule("1f1b", 1).actions(0, len(batches))], [copy_batch(batch) for batch in batches]
            self.runtime.train(whole_executor, step, copies, actions=actions, read_loss=read_loss)

        verification = Verification(task, executor, self.mesh, step=self._steps)
        verification.run_in_one_process(run, self.state, self._gradients[self._phase])
        return verification

    def _update(self, phase_optimizer: PhaseOptimizer, norm: Tensor | None) -> None:
        self._check_separable(phase_optimizer)
        if self.state.optimizer_shards is None:
            super()._update(phase_optimizer, norm)
        else:
            self.state.optimizer_shards.update(phase_optimizer, norm=norm)

    def _grad_norm(self, phase_optimizer: PhaseOptimizer) -> Tensor:
        """Return the 2-norm of all stages' gradients, those of shared parameters counted once; collective."""
        return self._gradients[phase_optimizer.phase].norm(self.mesh, self.device, phase_optimizer.parameters)

    # ---- Evaluation

    def evaluate(
        self, task: TaskModule, micro_batch: MicroBatch, step_name: Literal["validation_step", "test_step"]
    ) -> StepOutput:
        """Return the metrics of one batch, on every stage of this replica; collective over its stages."""
        if self._evaluates_whole:
            return super().evaluate(task, micro_batch, step_name)
        with self.runtime.errors.published():
            executor, returned = self._forward(task, step_name, micro_batch)
            outputs = [read_evaluation_output(value, micro_batch.num_samples, task, step_name) for value in returned]
            return self.runtime.broadcast_outputs(outputs, executor, step_name)[0]

    def predict(self, task: TaskModule, micro_batch: MicroBatch) -> Any:
        """Return the predictions for one batch, on every stage of this replica; collective over its stages."""
        if self._evaluates_whole:
            return super().predict(task, micro_batch)
        with self.runtime.errors.published():
            executor, returned = self._forward(task, "predict_step", micro_batch)
            box = returned or [None]  # predictions may be any object, so they are pickled
            source = executor.stage_graphs[-1].rank
            dist.broadcast_object_list(box, group=self.mesh.stage_group, group_src=source)
            return box[0]

    def _forward(self, task: TaskModule, step_name: str, micro_batch: MicroBatch) -> tuple[StageExecutor, list[Any]]:
        """Return the executor of the step and, on the last stage alone, what the step returned, in a list."""
        model, mesh = self.staged_model, self.mesh
        step = in_precision(self.precision, getattr(task, step_name))
        batch = self._move_for_evaluation(micro_batch.batch)
        # In training mode the step makes other calls, such as those of dropout: it is another graph.
        key = f"{step_name} in training mode" if task.training else step_name
        if key not in model.steps:  # by this replica alone, as replicas have unequal numbers of batches
            if model.placement is None:
                self._partition_by(task, {key: TrainingStep(step)}, batch, 1, all_replicas=False)
            else:
                with self.state.absent.readable():
                    model.add_step(key, task, step, batch, mesh=mesh, device=self.device)
        executor = model.steps[key]
        returned = self.runtime.forward(executor, step, batch)
        self.state.hide_assigned()  # a callback must not read what the step has left of other stages
        return executor, returned

    @property
    def _evaluates_whole(self) -> bool:
        """True if training will partition the task but has not begun: an evaluation must not partition it."""
        return bool(self._phase_optimizers) and self.staged_model.placement is None

    def _move_for_evaluation(self, batch: Any) -> Any:
        if self._evaluates_whole:  # the task is still in host memory
            return to_device(batch, torch.device("cpu"), dtype=self.precision.batch_type)
        return super()._move_for_evaluation(batch)

    # ---- Outside of the step

    @contextmanager
    def whole_task(self, task: TaskModule) -> Iterator[TaskModule]:
        """Give every rank all values of the task in the block, and then those that rank 0 has left. Collective."""
        with self.state.whole(task, self.device, self.mesh):
            yield task

    # ---- State, whole and under the names of the bare task; every method is collective except `local_state`

    def final_state_dict(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained weights on the main rank if the caller is in another process.

        Ranks started by another launcher (torchrun) all have the whole task afterwards, in host memory.
        """
        # The caller goes on in this process, and may use the whole task.
        if self._environment is None:
            self.state.make_whole(task)
            return None
        weights = map_tensors(dict(self.state_dict(task)), lambda tensor: tensor.cpu())
        return weights if self.comm.is_main else None

    def state_dict(self, task: TaskModule) -> dict[str, Any]:
        # The replicas are equal: only the first one gathers its stages.
        if self.comm.rank == 0:
            return self.state.gather_task(task)
        with self.state.absent.readable():
            return task.state_dict()

    def load_state_dict(self, task: TaskModule, saved: dict[str, Any]) -> None:
        self.state.load_task(task, saved)

    def local_state(self, task: TaskModule) -> dict[str, Tensor]:
        """Return the parameters and buffers of this stage by name, all of them before the task is partitioned."""
        placement, stage, named = self.staged_model.placement, self.mesh.stage, named_state(task).items()
        return {name: tensor for name, tensor in named if placement is None or placement.is_held(name, stage)}

    def replicated(self, task: TaskModule) -> dict[str, Tensor]:
        """Return the parameters of this stage, and its buffers that are made equal, by name."""
        # Parameters of other stages are placeholders, which have nothing to compare.
        held, tensors = self.local_state(task), super().replicated(task)
        return {name: item for name, item in tensors.items() if name in held or not isinstance(item, nn.Parameter)}

    def optimizer_state_dict(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> dict[str, Any]:
        # With shards of the optimizer every replica has a part, so that all of them join.
        if self.staged_model.placement is None or (self.comm.rank != 0 and self.state.optimizer_shards is None):
            return super().optimizer_state_dict(task, phase_optimizer)
        return self.state.gather_optimizer(phase_optimizer.optimizer)

    def load_optimizer_state_dict(
        self, task: TaskModule, phase_optimizer: PhaseOptimizer, saved: dict[str, Any]
    ) -> None:
        self.state.load_optimizer(task, phase_optimizer.optimizer, saved)

    def shards(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> ShardedState | None:
        optimizers = [phase_optimizer.optimizer for phase_optimizer in phase_optimizers]

        def all_gather(value: Any) -> list[Any]:
            if self.comm.num_processes == 1:
                return [value]
            # First this replica's stages, in their order; then all the others, each rank once.
            values, replica_ranks = self.comm.all_gather_object(value), self.mesh.grid[self.mesh.replica]
            return [values[rank] for rank in dict.fromkeys([*replica_ranks, *range(len(values))])]

        return self.state.shards(task, optimizers, writes=self.comm.rank == 0, all_gather=all_gather)

    @property
    def is_replicated(self) -> bool:
        return self.replicas > 1

    @property
    def state_part(self) -> tuple[int, int]:
        return self.mesh.stage, self.mesh.stages

    def readable(self) -> AbstractContextManager[Any]:
        return self.state.absent.readable()

    def strategy_state(self) -> dict[str, Any]:
        """Return the partition and the places of ranks, which a resumed run repeats."""
        return {**super().strategy_state(), **self.staged_model.state(), "grid": self.mesh.grid}

    def load_strategy_state(self, saved: Mapping[str, Any]) -> None:
        super().load_strategy_state(saved)
        self.staged_model.load_state(saved)

    # ---- Profiles

    @property
    def waited_seconds(self) -> float | None:
        """Seconds for which this stage has waited for others; `None` before `setup`."""
        return self.runtime.waited_seconds if hasattr(self, "runtime") else None

    def start_overlap_profile(self) -> None:
        self._waited_before = self.waited_seconds

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Return the mean waiting time of this stage since `start_overlap_profile`; other messages are hidden."""
        start, end, self._waited_before = self._waited_before, self.waited_seconds, None
        if self.comm.num_processes == 1:
            return NO_COMMUNICATION
        if start is None or end is None or not steps:
            return None
        return Overlap((end - start) / steps, steps=steps, note="messages and the schedule's bubble, on this stage")

    def preview(self, task: TaskModule, source: StageData, *, precision: Precision) -> str:
        """Return the number of stages for training on `source`, their table and a drawing; the task stays whole.

        Costs are those of the requested device.
        """
        self.device, self.precision = pick(self._requested_device), precision
        precision.setup(self.device)
        self.staged_model.dtype = precision.compute_type
        report = self._plan_alone(task, source)
        return f"{len(report.stages)} stages\n{report}\n\n{draw_stages(report)}"

    def _plan_alone(self, task: TaskModule, source: StageData) -> PlanReport:
        """Return the plan for training on `source`, without other ranks; the task stays whole."""
        alone: Strategy = self  # whose type allows other collectives: those of a process that reads one replica's shard
        comm, alone.comm = self.comm, Collectives(world_size=self.mesh.replicas)
        self.precision.prepare(task)
        self._all_trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        if has_phases(task):
            self.check_phases(task)
        phases = configure_optimizers(  # the partition does not depend on clipping and steps
            task, clip=GradientClipping(), precision=self.precision, total_steps=1000, fused=False, skip=False
        )
        self._phase_optimizers = {phase_optimizer.phase: phase_optimizer for phase_optimizer in phases}
        try:
            step_batches = open_loader(source, alone, seed=0).step_batches(0, 0)
            first = next(self.step_batches(step_batches, pin_memory=source.pin_memory))
            steps, batch = self._training_steps(task), to_device(first.micro_batches[0].batch, torch.device("cpu"))
            training = self._training_memory(task, len(first.micro_batches))
            begin_training(task)
            self.staged_model.plan = self.staged_model.make_plan(task, steps, batch, self.device, training)
            return self.staged_model.report(task, steps, training, self.mesh, broadcast_buffers=self.broadcast_buffers)
        finally:  # training makes its own optimizers, and ranks go on with their collectives
            self.end_phases()
            self._phase_optimizers = {}
            self.comm = comm


def _check_in_flight(schedule: str, limit: int, *, needed: int) -> None:
    """Raise UserError for a limit of micro-batches with which the schedule cannot be run."""
    if schedule in SEVERAL_STAGES and limit < needed:
        raise UserError(
            f"strategy.max_in_flight={limit} is too few for strategy.schedule={schedule}, whose first rank has "
            f"up to {needed} micro-batches in flight. Type strategy.max_in_flight={needed}, or strategy.schedule=1f1b, "
            "which can be run with 1."
        )
