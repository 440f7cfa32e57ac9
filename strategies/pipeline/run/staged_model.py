"""Staged model: the steps of a task, traced and partitioned into stages that hold its parameters."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.metrics.sync import detach_metrics, metrics_in
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.settings import check_choice
from trainkit.task import TaskModule
from trainkit.tree import tensors_in, to_device

from ..plan.memory import RankMemory, TrainingMemory, rank_memories
from ..plan.partition import MemoryCosts, SharedParameters
from ..plan.plan_report import PlanReport
from ..plan.planner import Costs, PartitionPlan, TraceInput, TrainingStep, plan_steps, restore_plan, saved_partition
from ..plan.profile import rates_of
from ..plan.schedules import Schedule
from ..plan.stage import (
    Placement,
    has_meta,
    owners,
    owners_of,
    place_parameters,
    stage_bounds,
    stage_graphs,
    transferred_bytes,
)
from ..plan.traffic import HostTraffic, Placing, StepMessages, traffic_of
from ..trace.attributes import StageAttributes
from ..trace.graph import Signature, Step, TracedGraph, num_bytes, signature
from ..trace.tracer import trace
from .mesh import PipelineMesh
from .stage_executor import StageExecutor
from .verification import FirstStepCheck

logger = logging.getLogger(__name__)

T = TypeVar("T")

BALANCES = {"speed": 0.0, "memory": 1.0}
TRACE_MODES = ("auto", "eager", "fake")


def step_key(phase: str, step_name: str) -> str:
    """Return the key of a phase's step, or of the only step of a task."""
    return f"{phase}: {step_name}" if phase else step_name


class StagedModel:
    """Partitioned steps of a task, and the stages that hold its parameters; the settings are those of the strategy."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        split_points: Sequence[str] | None,
        shared_parameters: SharedParameters,
        balance: str | float,
        trace: str,
    ) -> None:
        self.schedule = schedule
        self.split_points = split_points
        self.shared_parameters = shared_parameters
        self.balance = _memory_share(balance)
        check_choice("trace", trace, TRACE_MODES)
        self.trace_mode = trace
        self.dtype = torch.float32
        """Of products of matrices in the precision of the run."""
        self.clear()

    def clear(self) -> None:
        """Drop all steps and their partition."""
        self.steps: dict[str, StageExecutor] = {}
        self._checked: set[str] = set()  # the steps that have run
        self.placement: Placement | None = None
        """The stages of each parameter, once the task has been partitioned."""
        self.plan: PartitionPlan | None = None
        self._restored: Mapping[str, Any] | None = None  # the partition of the run that is resumed

    @property
    def replaced(self) -> frozenset[str]:
        """The attributes and buffers that the training steps assign."""
        assert self.plan is not None
        return frozenset().union(*(graph.replaced for graph in self.plan.steps))

    # ---- State of the partition

    def state(self) -> dict[str, Any]:
        """Return the partition as plain values; empty before there is one."""
        saved = self._restored if self.plan is None else saved_partition(self.plan, self._settings)
        return {} if saved is None else {"pipeline": saved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Repeat the partition in `state` if its settings are those of this run; ignored after `partition`."""
        if self.placement is None:
            self._restored = state.get("pipeline", self._restored)

    def report(
        self,
        task: nn.Module,
        steps: Iterable[str],
        training: TrainingMemory,
        mesh: PipelineMesh,
        *,
        broadcast_buffers: bool,
    ) -> PlanReport:
        """Return the stages with their costs, the memory of the ranks, and the idle share of the schedule."""
        assert self.plan is not None
        parts = zip(self.plan.steps, self.plan.partitions, strict=True)
        memory = rank_memories(task, dict(zip(steps, parts, strict=True)), self.schedule, training)
        bubble = self.schedule.bubble(training.num_micro_batches)
        traffic: list[HostTraffic] = []
        if mesh.has_choice:  # first the present placement
            messages = self._messages(task, training, mesh, memory, broadcast_buffers=broadcast_buffers)
            others: tuple[Placing, ...] = ("cluster", "spread")
            placements = sorted(others, key=lambda placement: placement != mesh.placed)
            traffic = [
                traffic_of(mesh.hosts, placement, messages, stages=mesh.stages, replicas=mesh.replicas)
                for placement in placements
            ]
        return PlanReport.of(self.plan.whole, self.plan.partition, bubble=bubble, memory=memory, traffic=traffic)

    def _messages(
        self,
        task: nn.Module,
        training: TrainingMemory,
        mesh: PipelineMesh,
        memory: Sequence[RankMemory],
        *,
        broadcast_buffers: bool,
    ) -> StepMessages:
        """Return what the ranks send in one step."""
        assert self.plan is not None
        parts = list(zip(self.plan.steps, self.plan.partitions, strict=True))
        placement = place_parameters(task, parts, num_ranks=mesh.stages)
        trained = training.of_gradients()
        shared = {
            stages: sum(trained.get(name, 0) for name in names) for stages, names in placement.shared_by().items()
        }
        named, broadcast = dict(task.named_parameters()), []
        for stage in range(mesh.stages):
            sent = [0] * mesh.replicas
            if training.optimizer_shards > 1:
                held = {name: named[name] for name in training.optimizer if placement.is_held(name, stage)}
                sizes = {name: parameter.numel() for name, parameter in held.items()}
                for name, replica in owners_of(sizes, mesh.replicas).items():
                    sent[replica] += num_bytes(held[name])
            if broadcast_buffers:
                buffers = task.named_buffers()
                sent[0] += sum(num_bytes(buffer) for name, buffer in buffers if placement.is_held(name, stage))
            broadcast.append(sent)
        activations = transferred_bytes(parts, num_ranks=mesh.stages, num_micro_batches=training.num_micro_batches)
        return StepMessages(activations, [rank.gradients for rank in memory], shared, broadcast)

    @property
    def _settings(self) -> str:
        points = self.split_points and list(self.split_points)
        stages = f"{self.schedule.num_ranks} x {self.schedule.stages_per_rank} stages"
        return f"{stages}, {points}, {self.shared_parameters}, {self.balance}"

    # ---- Partitioning

    def partition(
        self,
        task: nn.Module,
        steps: Mapping[str, TrainingStep],
        batch: Any,
        *,
        training: TrainingMemory,
        mesh: PipelineMesh,
        device: torch.device,
        all_replicas: bool,
    ) -> Placement:
        """Trace the steps on one rank, and partition the task by them on all ranks.

        Collective over the stages of this replica, or over `all_replicas`. Raises on every rank the error of the
        tracing one.
        """

        def planned() -> tuple[PartitionPlan, Signature]:
            # Where the parameters still are: ranks move those of their stages to the device after this.
            on_host = batch if device.type == "cpu" else to_device(batch, torch.device("cpu"))
            return self.make_plan(task, steps, on_host, device, training), signature(tensors_in(batch))

        self.plan, traced = _on_one_rank(task, planned, mesh, all_replicas=all_replicas)
        parts = list(zip(self.plan.steps, self.plan.partitions, strict=True))
        num_ranks = self.schedule.num_ranks
        self.placement = place_parameters(task, parts, num_ranks=num_ranks)
        local_stages = range(mesh.stage, self.schedule.num_stages, num_ranks)
        # Where a rank has one stage, the attributes of the modules are that stage's already.
        attributes = StageAttributes(task, owners(parts), local_stages) if len(local_stages) > 1 else None
        for name, (graph, partition) in zip(steps, parts, strict=True):
            bounds = partition.bounds(len(graph.nodes))
            ranks = [index % num_ranks for index in range(len(bounds))]
            stages = stage_graphs(graph, bounds, ranks)
            self.steps[name] = StageExecutor(
                graph,
                task,
                stages,
                traced=traced,
                device=device,
                attributes=attributes,
                trains_all=name == step_key("", "training_step"),
            )
        return self.placement

    def add_step(
        self, name: str, task: nn.Module, step: Step, batch: Any, *, mesh: PipelineMesh, device: torch.device
    ) -> None:
        """Trace `step` on one rank, and partition it on all ranks so that it follows the parameters.

        Collective over the stages of this replica. Raises on every rank the error of the tracing one.
        """
        assert self.plan is not None and self.placement is not None
        leaf_modules = frozenset().union(*(graph.leaf_modules for graph in self.plan.steps))
        written_in_training = frozenset().union(*(graph.written for graph in self.plan.steps))
        fake = self.trace_mode == "fake"

        def traced() -> tuple[TracedGraph, Signature]:
            result = trace(
                task,
                step,
                batch,
                leaf_modules=leaf_modules,
                fake=fake,
                changed=written_in_training,
                rates=rates_of(device, self.dtype),
            )
            return result.graph, signature(tensors_in(batch))

        graph, batch_signature = _on_one_rank(task, traced, mesh, all_replicas=False)
        bounds, ranks = stage_bounds(graph, self.placement, num_ranks=self.schedule.num_ranks)
        stages = stage_graphs(graph, bounds, ranks)
        self.steps[name] = StageExecutor(graph, task, stages, traced=batch_signature, device=device)

    def training_step(self, task: nn.Module, phase: str, step_name: str) -> StageExecutor:
        """Return the executor of a phase's step; raises UserError for another step of the task."""
        partitioned = self.steps.get(step_key(phase, step_name))
        if partitioned is None:
            prefix = step_key(phase, "")
            phase_step = next(key for key in self.steps if key.startswith(prefix)).removeprefix(prefix)
            raise UserError(
                f"{type(task).__name__} trains the phase '{phase}' by {step_name}, but a pipeline partitions the "
                f"task by {phase_step}, the phase's own step. Remove step={step_name!r} from control.backward, or type "
                "strategy=ddp."
            )
        return partitioned

    def first_step_check(
        self,
        key: str,
        task: TaskModule,
        local_state: Callable[[TaskModule], Mapping[str, Tensor]],
        *,
        elsewhere: Collection[str],
    ) -> FirstStepCheck | None:
        """Return the check of a step that runs for the first time.

        `local_state` returns the state of this rank, and `elsewhere` are the attributes that have placeholders here.
        """
        if key in self._checked:
            return None
        self._checked.add(key)
        graph = self.steps[key].graph
        # A step exchanges the placeholders that another phase has left: the rank that has the values checks them.
        expected = graph.written | graph.replaced | graph.reset | set(elsewhere)
        return FirstStepCheck(task, expected, local_state(task), metrics_in(task))

    def phase_parameters(self, task: nn.Module, phase_optimizer: PhaseOptimizer) -> dict[str, nn.Parameter]:
        """Return by name the parameters that a phase trains and its step uses."""
        trained = {id(parameter) for parameter in phase_optimizer.parameters}
        users = self.steps[step_key(phase_optimizer.phase, phase_optimizer.step_name)].graph.parameter_users
        named = task.named_parameters()
        return {name: parameter for name, parameter in named if id(parameter) in trained and name in users}

    def make_plan(
        self,
        task: nn.Module,
        steps: Mapping[str, TrainingStep],
        batch: Any,
        device: torch.device,
        training: TrainingMemory | None = None,
    ) -> PartitionPlan:
        """Return the partition of the task by its steps, with nothing placed; not collective."""
        costs = cost_source(self.trace_mode, task)
        rates = rates_of(device, self.dtype)
        trace_inputs = [TraceInput(task, step, batch, costs, device=device, rates=rates) for step in steps.values()]
        # Not planned again, as other measured times may make other stages.
        if self._restored is not None and self._restored["settings"] == self._settings:
            restored = restore_plan(trace_inputs, self._restored)
            if restored is not None:
                return restored
            logger.info("the traced step changed since the checkpoint; the model is partitioned again")
        memory = None
        if training is not None:
            names = [name for name, _ in task.named_parameters()]
            in_flight = self.schedule.in_flight(training.num_micro_batches)
            memory = MemoryCosts(in_flight, training.of_parameters(names))
        return plan_steps(
            trace_inputs,
            num_stages=self.schedule.num_stages,
            balance=self.balance,
            split_points=self.split_points,
            shared_parameters=self.shared_parameters,
            memory=memory,
        )


def cost_source(trace_mode: str, task: nn.Module) -> Costs:
    """Return the source of the nodes' costs: measured only for an eager trace."""
    if trace_mode == "fake" or (trace_mode == "auto" and has_meta(task)):
        return "fake"
    if has_meta(task):
        raise UserError("strategy.trace=eager needs a task with real parameters, not on the meta device.")
    return "measured"


def _memory_share(balance: str | float) -> float:
    share = BALANCES.get(balance) if isinstance(balance, str) else balance
    if share is None or isinstance(share, bool) or not 0.0 <= share <= 1.0:
        raise UserError(f"balance must be speed, memory or a number from 0 to 1, got {balance!r}.")
    return float(share)


def _on_one_rank(task: nn.Module, compute: Callable[[], T], mesh: PipelineMesh, *, all_replicas: bool) -> T:
    """Return on every rank the result of one of them, or raise its error. Collective.

    Raises UserError for a compiled task.
    """
    # Private: torch has no public way to ask whether `Module.compile` was called.
    if task._compiled_call_impl is not None:
        raise UserError(
            f"{type(task).__name__}'s forward is compiled as one piece, which cannot be partitioned. Set "
            "trainer.compile=false, or compile modules, each of which is a node: trainer.compile={blocks: [names]}."
        )
    group = None if all_replicas else mesh.stage_group
    # A global rank, as `broadcast_object_list` takes it also for a group.
    source = 0 if all_replicas else dist.get_global_rank(mesh.stage_group, 0)
    box: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank() == source:
        try:
            # Detached, or the traced batch would count twice.
            with detach_metrics(metrics_in(task)):
                box = [compute()]
        # Any error is sent, or the other ranks would wait in the broadcast until it times out.
        except Exception as error:
            box, failure = [error], error
    packed = [_pickled(box)]
    dist.broadcast_object_list(packed, source, group=group)
    box = pickle.loads(packed[0])
    # The original on the rank that raised it, as the copy has no traceback.
    if failure is not None:
        raise failure
    if isinstance(box[0], Exception):
        raise box[0]
    result: T = box[0]
    return result


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _PlanPickler(file).dump(value)
    return file.getvalue()


class _PlanPickler(pickle.Pickler):
    """A pickler of traced structures: it does not call constructors of named tuples, which may look at the tensors."""

    def reducer_override(self, value: Any) -> Any:
        is_named_tuple = isinstance(value, tuple) and hasattr(value, "_make")
        return (type(value)._make, (tuple(value),)) if is_named_tuple else NotImplemented
