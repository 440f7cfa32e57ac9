"""Planner of stages: traces the steps of a task, measures their nodes and chooses a partition."""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from trainkit.errors import UserError

from .graph import Node, Step, TracedGraph, estimated_seconds
from .merged_graph import MergedGraph, merge_graphs
from .partition import (
    Partition,
    SharedParameters,
    StageCosts,
    manual_partition,
    partition,
    replicate_shared,
    slowest_stage,
)
from .profile import NotRepeatable, estimate, measure
from .tracer import TraceResult, trace

logger = logging.getLogger(__name__)

SplitPoints = Sequence[str] | Mapping[str, int]
Costs = Literal["measured", "estimated", "fake"]
NEEDS_ELEMENTS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

GOOD_IMBALANCE = 1.05
"""Modules are not expanded further once the slowest stage is this close to the mean."""
WORTH_EXPANDING = 0.98
"""More nodes make every step longer: finer leaf modules must make the slowest stage cheaper by this factor."""
GRANULARITIES = (2, 4, 8, 16)
"""A module is expanded where it takes more than this part of a stage; tried in turn."""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A step by which a task, or one phase of it, is trained."""

    step: Step
    begin: Callable[[], None] | None = None
    """Switches to the phase of the step; called before each run."""
    share: float = 1.0
    """Calls per step of the task."""


@dataclass(frozen=True, slots=True)
class TraceInput:
    """A training step with one batch, which can be traced as often as needed."""

    task: nn.Module
    training_step: TrainingStep
    batch: Any
    costs: Costs

    def begin(self) -> Step:
        """Switch to the phase of the step, and return the step."""
        if self.training_step.begin is not None:
            self.training_step.begin()
        return self.training_step.step

    def trace(self, leaf_modules: frozenset[str], earlier: Sequence[weakref.ref[Tensor]] = ()) -> TraceResult:
        """Trace one run; raises UserError if the fake trace needs elements of a tensor."""
        step, fake = self.begin(), self.costs == "fake"
        try:
            return trace(self.task, step, self.batch, leaf_modules=leaf_modules, fake=fake, earlier=earlier)
        except NEEDS_ELEMENTS as error:
            if not fake:
                raise
            raise UserError(
                f"{type(self.task).__name__}'s step reads elements of a tensor ({error.func}), which are not known "
                "while it is traced without computing anything. Give the task real parameters (not on the meta "
                "device) and set strategy.trace=eager."
            ) from None

    def set_costs(self, graph: TracedGraph) -> None:
        """Measure or estimate the seconds of the nodes."""
        step = self.begin()
        if self.costs == "measured":
            try:
                measure(graph, self.task, step, self.batch)
                return
            except NotRepeatable as error:
                logger.info("costs are estimated, not measured: %s", error)
        estimate(graph)


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The traced steps of a task's phases, or its one step, with their common partition."""

    steps: tuple[TracedGraph, ...]
    whole: TracedGraph
    """All steps in one list, as in `MergedGraph`; a single step itself."""
    partition: Partition
    """Partition of the whole."""
    partitions: tuple[Partition, ...]
    """Partition of each step."""

    @classmethod
    def of(cls, steps: Sequence[TracedGraph], merged: MergedGraph, partition: Partition) -> PartitionPlan:
        """Return the plan with a partition of the merged graph."""
        return cls(tuple(steps), merged.graph, partition, tuple(merged.partitions(partition, steps)))


def plan(
    task: nn.Module,
    step: Step,
    batch: Any,
    *,
    num_stages: int,
    balance: float = 0.0,
    split_points: SplitPoints | None = None,
    shared_parameters: SharedParameters = "auto",
    costs: Costs = "measured",
) -> tuple[TracedGraph, Partition]:
    """Return a graph of `step` and its partition: at `split_points`, or the best for this `balance`.

    The step runs a few times on a copy of `batch`; the task is restored. Unless `costs` are `measured` they are
    estimated from operations and bytes; `fake` computes nothing, and the task may be on the meta device.
    """
    planned = plan_steps(
        [TraceInput(task, TrainingStep(step), batch, costs)],
        num_stages=num_stages,
        balance=balance,
        split_points=split_points,
        shared_parameters=shared_parameters,
    )
    return planned.whole, planned.partition


def plan_steps(
    trace_inputs: Sequence[TraceInput],
    *,
    num_stages: int,
    balance: float,
    split_points: SplitPoints | None,
    shared_parameters: SharedParameters,
) -> PartitionPlan:
    """Return graphs of all steps of a task, partitioned so that each parameter is in the same stage in all of them."""
    surveys: list[TraceResult] = []
    for trace_input in trace_inputs:
        earlier = [tensor for survey in surveys for tensor in survey.made]
        survey = trace_input.trace(frozenset(), earlier)
        surveys.append(survey)
        if not survey.graph.parameter_users:
            raise UserError(
                f"{type(trace_input.task).__name__}'s step uses no parameter of the task: nothing can be partitioned."
            )
    if len(trace_inputs) > 1:  # the merged graph has constraints around shared parameters
        shared_parameters = "replicated"
    if split_points is not None:
        return _plan_at_split_points(
            trace_inputs, surveys, split_points, num_stages=num_stages, shared_parameters=shared_parameters
        )
    best: PartitionPlan | None = None
    best_cost = float("inf")
    refusal: UserError | None = None
    previous: list[frozenset[str]] | None = None
    for granularity in GRANULARITIES:
        limit = 1.0 / (num_stages * granularity)
        steps = _trace_consistently(trace_inputs, surveys, limit=limit, expanded=frozenset())
        leaf_modules = [_leaf_modules(step) for step in steps]
        if leaf_modules == previous:
            continue
        previous = leaf_modules
        merged = _costed(trace_inputs, steps)
        try:
            found = partition(merged.graph, num_stages=num_stages, balance=balance, shared_parameters=shared_parameters)
        except UserError as error:
            refusal = error
            continue
        stage_costs = StageCosts.of(merged.graph, num_stages=num_stages, balance=balance)
        cost = slowest_stage(found.cuts, len(merged.graph.nodes), stage_costs)
        if cost < best_cost * WORTH_EXPANDING:
            best, best_cost = PartitionPlan.of(steps, merged, found), cost
        if best_cost * num_stages <= GOOD_IMBALANCE:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def restore_plan(trace_inputs: Sequence[TraceInput], saved_partition: SavedPartition) -> PartitionPlan | None:
    """Return the plan of `saved_partition`, or `None` if the steps make other calls now."""
    steps = [trace_input.trace(frozenset(saved_partition.leaf_modules)).graph for trace_input in trace_inputs]
    merged = _costed(trace_inputs, steps, measure=False)
    if not saved_partition.fits(merged.graph):
        return None
    merged = _costed(trace_inputs, steps)
    return PartitionPlan.of(steps, merged, replicate_shared(merged.graph, saved_partition.cuts))


def _costed(trace_inputs: Sequence[TraceInput], steps: Sequence[TracedGraph], *, measure: bool = True) -> MergedGraph:
    for trace_input, step in zip(trace_inputs, steps, strict=True):
        if measure:
            trace_input.set_costs(step)
    return merge_graphs(steps, [trace_input.training_step.share for trace_input in trace_inputs])


def _leaf_modules(step: TracedGraph) -> frozenset[str]:
    return frozenset(node.name for node in step.nodes if node.is_leaf_module)


def _plan_at_split_points(
    trace_inputs: Sequence[TraceInput],
    surveys: Sequence[TraceResult],
    split_points: SplitPoints,
    num_stages: int,
    shared_parameters: SharedParameters,
) -> PartitionPlan:
    wanted = [] if isinstance(split_points, Mapping) else list(split_points)
    names = [name for survey in surveys for name in survey.module_calls if name]
    expanded = {
        ancestor
        for name in names
        if any(name == want or name.endswith(f".{want}") for want in wanted)
        for ancestor in _ancestors(name)
    }
    limit = 0.0 if isinstance(split_points, Mapping) else 1.0  # patterns may name any module
    steps = _trace_consistently(trace_inputs, surveys, limit=limit, expanded=frozenset(expanded))
    merged = _costed(trace_inputs, steps)
    asked = dict(split_points) if isinstance(split_points, Mapping) else wanted
    found = manual_partition(merged.graph, asked, num_stages=num_stages, shared_parameters=shared_parameters)
    return PartitionPlan.of(steps, merged, found)


def _trace_consistently(
    trace_inputs: Sequence[TraceInput], surveys: Sequence[TraceResult], *, limit: float, expanded: frozenset[str]
) -> list[TracedGraph]:
    """Return graphs in which a module that is expanded in one is expanded in all, where possible."""
    while True:
        steps = [
            _trace_expanding(trace_input, survey, limit=limit, expanded=expanded)
            for trace_input, survey in zip(trace_inputs, surveys, strict=True)
        ]
        leaf_modules = frozenset().union(*map(_leaf_modules, steps))
        nested = leaf_modules.intersection(ancestor for name in leaf_modules for ancestor in _ancestors(name))
        if nested <= expanded:
            return steps
        expanded |= nested


def _trace_expanding(
    trace_input: TraceInput, survey: TraceResult, *, limit: float, expanded: frozenset[str]
) -> TracedGraph:
    """Return a graph whose leaf modules take at most `limit` of the step where they can be expanded."""
    kept_whole: frozenset[str] = frozenset()
    while True:
        leaf_modules = choose_leaf_modules(
            trace_input.task, survey, limit=limit, expanded=expanded, kept_whole=kept_whole
        )
        traced = trace_input.trace(leaf_modules)
        opaque = frozenset(
            name
            for name in traced.opaque_leaf_modules - expanded
            if _can_be_expanded(trace_input.task, survey, name) and name not in kept_whole
        )
        reading = frozenset(traced.reading_modules - expanded - kept_whole - opaque)
        if opaque:
            expanded |= opaque
        elif reading:
            kept_whole |= reading
        else:
            _refuse_reentrant(traced.reentrant)
            return traced.graph


def _refuse_reentrant(nodes: Sequence[Node]) -> None:
    if nodes:
        named = next((node for node in nodes if node.is_leaf_module), nodes[0])
        raise UserError(
            f"{named} is called inside torch.utils.checkpoint with use_reentrant=True, which hides its gradients from "
            "the other stages. Pass use_reentrant=False, or call the checkpoint inside one module's forward."
        )


def choose_leaf_modules(
    task: nn.Module,
    survey: TraceResult,
    *,
    limit: float,
    expanded: frozenset[str] = frozenset(),
    kept_whole: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Return the outermost modules that take at most `limit` of the step in one call, or cannot be expanded."""
    calls = survey.module_calls
    whole = estimated_seconds(calls[""].cost) or 1.0
    leaf_modules: set[str] = set()
    pending = [("", child) for child in calls[""].callees]
    seen: set[str] = set()
    while pending:
        _, name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        share = estimated_seconds(calls[name].cost) / calls[name].num_calls / whole
        asked = name in expanded or (share > limit and name not in kept_whole)
        if asked and _can_be_expanded(task, survey, name):
            pending += [(name, child) for child in calls[name].callees]
        else:
            leaf_modules.add(name)
    return frozenset(leaf_modules)


def _can_be_expanded(task: nn.Module, survey: TraceResult, name: str) -> bool:
    module = task.get_submodule(name)
    is_compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return bool(survey.module_calls[name].callees) and not is_compiled


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


@dataclass(frozen=True, slots=True)
class SavedPartition:
    """Leaf modules and cuts of a partition, kept in a checkpoint because they depend on measured times."""

    settings: str
    """Settings of the strategy; with others, such as another number of stages, the task is partitioned again."""
    leaf_modules: tuple[str, ...]
    cuts: tuple[int, ...]
    digest: int
    """Digest of all nodes; a step with other calls is partitioned again."""

    @classmethod
    def of(cls, settings: str, graph: TracedGraph, partition: Partition) -> SavedPartition:
        """Return the partition of a graph in the form of a checkpoint."""
        leaf_modules = sorted({node.name for node in graph.nodes if node.is_leaf_module})
        return cls(settings, tuple(leaf_modules), partition.cuts, _digest(graph))

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> SavedPartition:
        """Return the partition from plain values."""
        return cls(saved["settings"], tuple(saved["leaf_modules"]), tuple(saved["cuts"]), saved["digest"])

    def saved(self) -> dict[str, Any]:
        """Return the partition as plain values."""
        return asdict(self)

    def fits(self, graph: TracedGraph) -> bool:
        """Return True if a graph has the nodes of this partition."""
        return _digest(graph) == self.digest


def _digest(graph: TracedGraph) -> int:
    return zlib.crc32("\n".join(f"{node.name} {node.is_leaf_module}" for node in graph.nodes).encode())
