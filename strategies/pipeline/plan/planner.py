"""Planner of stages: traces the steps of a task, measures their nodes and chooses a partition."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

# Private: torch exports these nowhere else.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from trainkit.errors import UserError

from ..trace.graph import NOMINAL, Rates, Step, TracedGraph, estimated_seconds
from ..trace.tracer import TraceResult, trace
from .merged_graph import MergedGraph, merge_graphs
from .partition import (
    MemoryCosts,
    Partition,
    SharedParameters,
    StageCosts,
    manual_partition,
    partition,
    replicate_shared,
)
from .profile import HOST, NotRepeatable, estimate, measure

logger = logging.getLogger(__name__)

Costs = Literal["measured", "estimated", "fake"]
# What fake tensors raise where their elements are needed.
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

    def run(self, batch: Any) -> Any:
        """Switch to the phase of the step and run it."""
        if self.begin is not None:
            self.begin()
        return self.step(batch)


@dataclass(frozen=True, slots=True)
class TraceInput:
    """A training step with one batch, which can be traced as often as needed."""

    task: nn.Module
    training_step: TrainingStep
    batch: Any
    costs: Costs
    preceding: tuple[TrainingStep, ...] = ()
    """The steps of the phases before this one, which may leave state for it."""
    device: torch.device = HOST
    """The device of the training, of which the costs are."""
    rates: Rates = NOMINAL
    """The rates of that device."""
    _traced: dict[tuple[frozenset[str], ...], TraceResult] = field(default_factory=dict, init=False, repr=False)

    def _preceding(self) -> list[Step]:
        runs = [step.run for step in self.preceding]
        # They switch to their phases, so this one is begun again at the end, before the step itself.
        return [*runs, lambda batch: self.begin()] if runs else []

    def begin(self) -> Step:
        """Switch to the phase of the step, and return the step."""
        if self.training_step.begin is not None:
            self.training_step.begin()
        return self.training_step.step

    def trace(
        self,
        leaf_modules: frozenset[str],
        left_behind: frozenset[str] = frozenset(),
        changed: frozenset[str] = frozenset(),
    ) -> TraceResult:
        """Trace one run, once for the same arguments; raises UserError if the fake trace needs elements of a tensor.

        `changed` are the names of the state that other steps change, and `left_behind` of attributes in which the
        steps of other phases leave tensors of one stage.
        """
        arguments = leaf_modules, left_behind, changed
        # Finer leaf modules are often those that were chosen before, and a trace runs the step several times.
        if arguments in self._traced:
            return self._traced[arguments]
        fake = self.costs == "fake"
        try:
            self._traced[arguments] = trace(
                self.task,
                self.begin(),
                self.batch,
                leaf_modules=leaf_modules,
                fake=fake,
                preceding=self._preceding(),
                left_behind=left_behind,
                changed=changed,
                rates=self.rates,
            )
            return self._traced[arguments]
        except NEEDS_ELEMENTS as error:
            if not fake:  # an eager trace has elements: this is an error of the task
                raise
            raise UserError(
                f"{type(self.task).__name__}'s step reads elements of a tensor ({error.func}), which are not known "
                "while it is traced without computing anything. Give the task real parameters (not on the meta "
                "device) and set strategy.trace=eager."
            ) from None

    def set_costs(self, graph: TracedGraph) -> None:
        """Measure or estimate the seconds of the nodes."""
        if self.costs == "measured":
            try:
                measure(graph, self.task, self.begin(), self.batch, self._preceding(), device=self.device)
                return
            except NotRepeatable as error:
                # No reason to stop: estimated costs make less balanced stages, but the same gradients.
                logger.info("costs are estimated, not measured: %s", error)
        estimate(graph, self.rates)


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


def plan_steps(
    trace_inputs: Sequence[TraceInput],
    *,
    num_stages: int,
    balance: float = 0.0,
    split_points: Sequence[str] | None = None,
    shared_parameters: SharedParameters = "auto",
    memory: MemoryCosts | None = None,
) -> PartitionPlan:
    """Return graphs of all steps of a task, partitioned so that each parameter is in the same stage in all of them.

    Stages begin at `split_points`, or where it is best for this `balance` of time and `memory`. The steps run a few
    times on copies of their batches; the task is restored.
    """
    trace_inputs = _in_sequence(trace_inputs)
    # Without leaf modules every call is a node: this tells what each module costs, and which modules it calls.
    # In order: each phase must know the attributes in which those before it leave tensors of one stage.
    surveys: list[TraceResult] = []
    for trace_input in trace_inputs:
        phase_leaks = frozenset().union(*(survey.left_behind for survey in surveys))
        survey = trace_input.trace(frozenset(), phase_leaks)
        surveys.append(survey)
        if not survey.graph.parameter_users:
            raise UserError(
                f"{type(trace_input.task).__name__}'s step uses no parameter of the task: nothing can be partitioned."
            )
    if len(trace_inputs) > 1:  # the merged graph has constraints around shared parameters
        shared_parameters = "replicated"
    if split_points is not None:
        names = {name for survey in surveys for name in survey.module_calls}
        opened = {name for name in names if any(name == point or name.endswith(f".{point}") for point in split_points)}
        # A module inside a leaf module could not begin a stage. With a limit of 1 none is expanded for its cost.
        expanded = frozenset(ancestor for name in opened for ancestor in _ancestors(name))
        steps = _trace_consistently(trace_inputs, surveys, limit=1.0, expanded=expanded)
        merged = _costed(trace_inputs, steps)
        graph = merged.graph
        manual = manual_partition(graph, split_points, num_stages=num_stages, shared_parameters=shared_parameters)
        _warn_of_reads(graph)
        return _plan_of(steps, merged, manual)
    best: PartitionPlan | None = None
    best_cost = float("inf")
    refusal: UserError | None = None
    previous: list[frozenset[str]] | None = None
    for granularity in GRANULARITIES:
        limit = 1.0 / (num_stages * granularity)
        steps = _trace_consistently(trace_inputs, surveys, limit=limit, expanded=frozenset())
        leaf_modules = [step.leaf_modules for step in steps]
        if leaf_modules == previous:  # measuring again would give other noise, not another graph
            continue
        previous = leaf_modules
        merged = _costed(trace_inputs, steps)
        try:
            candidate = partition(
                merged.graph,
                num_stages=num_stages,
                balance=balance,
                shared_parameters=shared_parameters,
                memory=memory,
            )
        except UserError as error:
            # Not yet the end, as finer leaf modules have more cut points. The last refusal is that of the finest.
            refusal = error
            continue
        costs = StageCosts.of(merged.graph, num_stages=num_stages, balance=balance, memory=memory)
        cost = costs.slowest(candidate.cuts)
        if cost < best_cost * WORTH_EXPANDING:
            best, best_cost = _plan_of(steps, merged, candidate), cost
        # Costs are shares of the step, so that 1 / num_stages is their mean.
        if best_cost * num_stages <= GOOD_IMBALANCE:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    _warn_of_reads(best.whole)
    return best


def _warn_of_reads(graph: TracedGraph) -> None:
    """Warn of calls by which the step's own code may branch on values."""
    for node in graph.nodes:
        if not node.is_opaque and (node.reads or node.has_plain) and not node.is_batch_only:
            logger.warning(
                "%s asks a tensor for its value. If the step makes other calls for other values, the run will end at "
                "the first batch for which it does: a pipeline needs the same calls for every batch. Move such a "
                "branch into one module's forward, or compute both sides and use torch.where.",
                node,
            )


def saved_partition(plan: PartitionPlan, settings: str) -> dict[str, Any]:
    """Return a partition as plain values for a checkpoint, since leaf modules and cuts depend on measured times.

    `settings` are those of the strategy; with others, such as another number of stages, the task is partitioned again.
    """
    # Sorted, so that equal partitions make equal checkpoints: the order of a set differs from process to process.
    leaf_modules, cuts = tuple(sorted(plan.whole.leaf_modules)), plan.partition.cuts
    return {"settings": settings, "leaf_modules": leaf_modules, "cuts": cuts, "digest": _digest(plan.whole)}


def restore_plan(trace_inputs: Sequence[TraceInput], saved: Mapping[str, Any]) -> PartitionPlan | None:
    """Return the plan of a saved partition, or `None` if the steps make other calls now."""
    trace_inputs = _in_sequence(trace_inputs)
    leaf_modules = frozenset(saved["leaf_modules"])
    steps = [trace_input.trace(leaf_modules).graph for trace_input in trace_inputs]
    # A step must know what the others write, which only their traces tell: each is traced twice.
    if len(steps) > 1:
        written = frozenset().union(*(step.written for step in steps))
        steps = [trace_input.trace(leaf_modules, changed=written).graph for trace_input in trace_inputs]
    merged = _costed(trace_inputs, steps)
    if _digest(merged.graph) != saved["digest"]:
        return None
    return _plan_of(steps, merged, replicate_shared(merged.graph, saved["cuts"]))


def _in_sequence(trace_inputs: Sequence[TraceInput]) -> list[TraceInput]:
    """Return the inputs, each with the steps of those before it."""
    steps = tuple(trace_input.training_step for trace_input in trace_inputs)
    return [replace(trace_input, preceding=steps[:index]) for index, trace_input in enumerate(trace_inputs)]


def _costed(trace_inputs: Sequence[TraceInput], steps: Sequence[TracedGraph]) -> MergedGraph:
    for trace_input, step in zip(trace_inputs, steps, strict=True):
        trace_input.set_costs(step)
    return merge_graphs(steps, [trace_input.training_step.share for trace_input in trace_inputs])


def _plan_of(steps: Sequence[TracedGraph], merged: MergedGraph, partition: Partition) -> PartitionPlan:
    return PartitionPlan(tuple(steps), merged.graph, partition, tuple(merged.partitions(partition, steps)))


def _digest(graph: TracedGraph) -> int:
    # Names alone: times differ from run to run, and sizes with the batch. A checksum that is the same in all processes.
    return zlib.crc32("\n".join(f"{node.name} {node.is_leaf_module}" for node in graph.nodes).encode())


def _trace_consistently(
    trace_inputs: Sequence[TraceInput], surveys: Sequence[TraceResult], *, limit: float, expanded: frozenset[str]
) -> list[TracedGraph]:
    """Return graphs in which a module that is expanded in one is expanded in all, where possible."""
    # A single step's own trace tells what it writes; `changed` is for the state of other steps.
    several = surveys if len(surveys) > 1 else ()
    written: frozenset[str] = frozenset().union(*(survey.graph.written for survey in several))
    # Ends, as each round expands another module.
    while True:
        steps = [
            trace_expanding(trace_input, survey, limit=limit, expanded=expanded, changed=written)
            for trace_input, survey in zip(trace_inputs, surveys, strict=True)
        ]
        leaf_modules = frozenset().union(*(step.leaf_modules for step in steps))
        # Where one step has a module as one node, the nodes inside of it in another step would all have to be in the
        # same stage, as they use its parameters.
        nested = leaf_modules.intersection(ancestor for name in leaf_modules for ancestor in _ancestors(name))
        if nested <= expanded:
            return steps
        expanded |= nested


def trace_expanding(
    trace_input: TraceInput, survey: TraceResult, *, limit: float, expanded: frozenset[str], changed: frozenset[str]
) -> TracedGraph:
    """Return a graph whose leaf modules take at most `limit` of the step where they can be expanded."""
    kept_whole: frozenset[str] = frozenset()  # modules that stay leaf modules
    # Ends, as each round adds a module to one of the two sets.
    while True:
        leaf_modules = _choose_leaf_modules(trace_input, survey, limit=limit, expanded=expanded, kept_whole=kept_whole)
        traced = trace_input.trace(leaf_modules, changed=changed)
        opaque = (traced.opaque_leaf_modules | traced.carrying_modules) - expanded - kept_whole
        opaque = {name for name in opaque if _can_be_expanded(trace_input.task, survey, name)}
        reading = traced.reading_modules - expanded - kept_whole - opaque
        # The task itself ("") cannot be one node: with it nothing would be left to partition.
        changing = {node.path for node in traced.changed_calls or ()} - {""} - expanded - kept_whole
        # One remedy a round, as each makes other nodes, of which the next trace tells. Errors come last, when no choice
        # of leaf modules is left that could avoid them.
        if opaque:
            expanded |= opaque
        elif changing:
            kept_whole |= changing
        elif reading:
            kept_whole |= reading
        elif traced.changed_calls is not None:
            first, later = traced.changed_calls
            raise UserError(
                f"the step calls {first} when it runs for the first time, and {later} in its place when it runs again, "
                "because of a cache that the first run fills, a counter or a random branch. A pipeline needs the same "
                "calls in every step. Fill the cache in the task's constructor, move the branch into one module's "
                "forward, which may run any code, or train with strategy=ddp."
            )
        elif traced.unsendable:
            node = traced.unsendable[0]
            raise UserError(
                f"{node} reads elements of '{node.tensor_names[0]}', which one stage alone has, and returns no numbers "
                "that could be sent to the others. Read it by .item() or .tolist(), or in one module's forward."
            )
        elif traced.refusal is not None:
            raise UserError(traced.refusal)
        else:
            return traced.graph


def _choose_leaf_modules(
    trace_input: TraceInput, survey: TraceResult, *, limit: float, expanded: frozenset[str], kept_whole: frozenset[str]
) -> frozenset[str]:
    """Return the outermost modules that take at most `limit` of the step in one call, or cannot be expanded."""
    calls = survey.module_calls
    step_seconds = estimated_seconds(calls[""].cost, trace_input.rates) or 1.0  # shares of 0 for a step without costs
    leaf_modules: set[str] = set()
    pending = list(calls[""].callees)
    seen: set[str] = set()  # several modules may call the same one
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        # For one call: a module that is called in every layer has a node, and a possible cut, at each.
        share = estimated_seconds(calls[name].cost, trace_input.rates) / calls[name].num_calls / step_seconds
        asked = name in expanded or (share > limit and name not in kept_whole)
        if asked and _can_be_expanded(trace_input.task, survey, name):
            pending += calls[name].callees
        else:
            leaf_modules.add(name)
    return frozenset(leaf_modules)


def _can_be_expanded(task: nn.Module, survey: TraceResult, name: str) -> bool:
    module = task.get_submodule(name)
    # Torch has no public way to ask whether `Module.compile` was called. The class of `torch.compile` is asked for by
    # name, as its import takes long.
    is_compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    # They need the module's inputs and result in one stage, as a leaf module has them. Torch lists them nowhere else.
    has_backward_hooks = module._backward_hooks or module._backward_pre_hooks
    return bool(survey.module_calls[name].callees) and not (is_compiled or has_backward_hooks)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
