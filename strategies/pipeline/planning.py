"""From a task and one batch to a recording with cuts: which modules are units, what they cost, where stages begin."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from trainkit.errors import UserError

from .choice import Choice
from .costs import estimated_seconds
from .events import Event, Recording
from .joint import Joint, join
from .manual_cuts import manual_cuts
from .measuring import Unrepeatable, estimate, measure
from .observation import Observation
from .partition import Partition, Shared, StageCosts, dearest, partition, with_replicas
from .recording import Step, observe

logger = logging.getLogger(__name__)

Cuts = Sequence[str] | Mapping[str, int]
Costs = Literal["measured", "estimated", "fake"]
NEEDS_ELEMENTS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

GOOD_IMBALANCE = 1.05
"""Modules are not opened further once the dearest stage is this close to the mean."""
WORTH_OPENING = 0.98
"""More events make every replay longer: finer units must make the dearest stage cheaper by this factor."""
FINENESS = (2, 4, 8, 16)
"""A module is opened where it takes more than this part of a stage; tried in turn."""


def _nothing() -> None:
    """A task's only step needs nothing before it."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A task's step with one batch, which can be observed as often as needed."""

    task: nn.Module
    step: Step
    batch: Any
    costs: Costs
    begin: Callable[[], None] = _nothing
    """Called before the step is run: it turns to the phase that the step belongs to."""
    share: float = 1.0
    """How often the step is made, for one of the task's."""

    def observe(self, units: frozenset[str], earlier: Sequence[weakref.ref[Tensor]] = ()) -> Observation:
        """Return what one run shows; raises UserError where only computing could tell what the step does."""
        self.begin()
        if self.costs != "fake":
            return observe(self.task, self.step, self.batch, units=units, earlier=earlier)
        try:
            return observe(self.task, self.step, self.batch, units=units, fake=True, earlier=earlier)
        except NEEDS_ELEMENTS as error:
            raise UserError(
                f"{type(self.task).__name__}'s step looks at elements of a tensor ({error.func}), which are not known "
                "while it is recorded without computing anything. Give the task real parameters (not on the meta "
                "device) and set strategy.record=real."
            ) from None

    def set_costs(self, recording: Recording) -> None:
        """Measure or estimate how long the events take."""
        self.begin()
        if self.costs == "measured":
            try:
                measure(recording, self.task, self.step, self.batch)
                return
            except Unrepeatable as error:
                logger.info("costs are estimated, not measured: %s", error)
        estimate(recording)


@dataclass(frozen=True, slots=True)
class Planned:
    """The recorded steps of a task's phases, or its one step, and how they are cut together."""

    steps: tuple[Recording, ...]
    whole: Recording
    """All of them in one list, as in `Joint`; of one step that step itself."""
    partition: Partition
    """Of the whole."""
    partitions: tuple[Partition, ...]
    """Of each step."""

    @classmethod
    def of(cls, steps: Sequence[Recording], joint: Joint, partition: Partition) -> Planned:
        """Return the plan with a partition of the joint list."""
        return cls(tuple(steps), joint.recording, partition, tuple(joint.partitions(partition, steps)))


def plan(
    task: nn.Module,
    step: Step,
    batch: Any,
    *,
    num_stages: int,
    balance: float = 0.0,
    cuts: Cuts | None = None,
    shared: Shared = "auto",
    costs: Costs = "measured",
) -> tuple[Recording, Partition]:
    """Return a recording of `step` and its partition: the user's `cuts`, or the best for this `balance`.

    `shared` says whether stages may have copies of one parameter, as in `partition`.
    The step runs a few times on a copy of `batch`; the task is left as it was. Unless `costs` are `measured` they
    follow from operations and bytes; `fake` computes nothing at all, and the task may lie on the meta device.
    """
    rehearsals = [Rehearsal(task, step, batch, costs)]
    planned = plan_steps(rehearsals, num_stages=num_stages, balance=balance, cuts=cuts, shared=shared)
    return planned.whole, planned.partition


def plan_steps(
    rehearsals: Sequence[Rehearsal],
    *,
    num_stages: int,
    balance: float,
    cuts: Cuts | None,
    shared: Shared,
) -> Planned:
    """Return recordings of all steps of a task, cut such that each parameter is in the same stage in all of them."""
    surveys: list[Observation] = []
    for rehearsal in rehearsals:
        earlier = [tensor for survey in surveys for tensor in survey.made]
        survey = rehearsal.observe(frozenset(), earlier)
        surveys.append(survey)
        if not survey.recording.parameter_users:
            raise UserError(
                f"{type(rehearsal.task).__name__}'s step uses no parameter of the task: there is nothing to cut."
            )
    together = len(rehearsals) > 1
    shared = "replicated" if together else shared  # of several steps the joint list has bonds around what is shared
    if cuts is not None:
        return _manual(rehearsals, surveys, cuts, num_stages=num_stages, shared=shared)
    best: Planned | None = None
    best_cost = float("inf")
    refusal: UserError | None = None
    previous: list[frozenset[str]] | None = None
    for fineness in FINENESS:
        limit = 1.0 / (num_stages * fineness)
        steps = _record_alike(rehearsals, surveys, limit=limit, opened=frozenset())
        units = [_units(step) for step in steps]
        if units == previous:
            continue
        previous = units
        joint = _costed(rehearsals, steps)
        try:
            found = partition(joint.recording, num_stages=num_stages, balance=balance, shared=shared)
        except UserError as error:
            refusal = error
            continue
        stage_costs = StageCosts.of(joint.recording, num_stages=num_stages, balance=balance)
        cost = dearest(found.cuts, len(joint.recording.events), stage_costs)
        if cost < best_cost * WORTH_OPENING:
            best, best_cost = Planned.of(steps, joint, found), cost
        if best_cost * num_stages <= GOOD_IMBALANCE:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def plan_again(rehearsals: Sequence[Rehearsal], choice: Choice) -> Planned | None:
    """Return recordings cut as they were when `choice` was made, or nothing if the steps make other calls by now."""
    steps = [rehearsal.observe(frozenset(choice.units)).recording for rehearsal in rehearsals]
    joint = _costed(rehearsals, steps, measure=False)
    if not choice.fits(joint.recording):
        return None
    joint = _costed(rehearsals, steps)
    return Planned.of(steps, joint, with_replicas(joint.recording, choice.cuts))


def _costed(rehearsals: Sequence[Rehearsal], steps: Sequence[Recording], *, measure: bool = True) -> Joint:
    for rehearsal, step in zip(rehearsals, steps, strict=True):
        if measure:
            rehearsal.set_costs(step)
    return join(steps, [rehearsal.share for rehearsal in rehearsals])


def _units(step: Recording) -> frozenset[str]:
    return frozenset(event.name for event in step.events if event.is_unit)


def _manual(
    rehearsals: Sequence[Rehearsal],
    surveys: Sequence[Observation],
    cuts: Cuts,
    *,
    num_stages: int,
    shared: Shared,
) -> Planned:
    wanted = [] if isinstance(cuts, Mapping) else list(cuts)
    names = [name for survey in surveys for name in survey.module_calls if name]
    opened = {
        ancestor
        for name in names
        if any(name == want or name.endswith(f".{want}") for want in wanted)
        for ancestor in _ancestors(name)
    }
    limit = 0.0 if isinstance(cuts, Mapping) else 1.0  # patterns may name any module
    steps = _record_alike(rehearsals, surveys, limit=limit, opened=frozenset(opened))
    joint = _costed(rehearsals, steps)
    asked = dict(cuts) if isinstance(cuts, Mapping) else wanted
    found = manual_cuts(joint.recording, asked, num_stages=num_stages, shared=shared)
    return Planned.of(steps, joint, found)


def _record_alike(
    rehearsals: Sequence[Rehearsal], surveys: Sequence[Observation], *, limit: float, opened: frozenset[str]
) -> list[Recording]:
    """Return recordings in which a module that one of them opens is opened by all, where it can be."""
    while True:
        steps = [
            _record(rehearsal, survey, limit=limit, opened=opened)
            for rehearsal, survey in zip(rehearsals, surveys, strict=True)
        ]
        units = frozenset().union(*map(_units, steps))
        nested = units.intersection(ancestor for name in units for ancestor in _ancestors(name))
        if nested <= opened:
            return steps
        opened |= nested


def _record(rehearsal: Rehearsal, survey: Observation, *, limit: float, opened: frozenset[str]) -> Recording:
    """Return a recording whose units take at most `limit` of the step, where they can be opened."""
    closed: frozenset[str] = frozenset()
    while True:
        units = choose_units(rehearsal.task, survey, limit=limit, opened=opened, closed=closed)
        observation = rehearsal.observe(units)
        opaque = frozenset(
            name
            for name in observation.opaque_units - opened
            if _can_be_opened(rehearsal.task, survey, name) and name not in closed
        )
        reading = frozenset(observation.reading_modules - opened - closed - opaque)
        if opaque:
            opened |= opaque
        elif reading:
            closed |= reading
        else:
            _refuse_reentrant(observation.reentrant)
            return observation.recording


def _refuse_reentrant(events: Sequence[Event]) -> None:
    if events:
        named = next((event for event in events if event.is_unit), events[0])
        raise UserError(
            f"{named} is called inside torch.utils.checkpoint with use_reentrant=True, which hides from the other "
            "stages where gradients go. Pass use_reentrant=False, or call the checkpoint inside one module's forward."
        )


def choose_units(
    task: nn.Module,
    survey: Observation,
    *,
    limit: float,
    opened: frozenset[str] = frozenset(),
    closed: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Return the outermost modules that take at most `limit` of the step in one call, or cannot be opened."""
    calls = survey.module_calls
    whole = estimated_seconds(calls[""].cost) or 1.0
    units: set[str] = set()
    pending = [("", child) for child in calls[""].callees]
    seen: set[str] = set()
    while pending:
        _, name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        share = estimated_seconds(calls[name].cost) / calls[name].num_calls / whole
        asked = name in opened or (share > limit and name not in closed)
        if asked and _can_be_opened(task, survey, name):
            pending += [(name, child) for child in calls[name].callees]
        else:
            units.add(name)
    return frozenset(units)


def _can_be_opened(task: nn.Module, survey: Observation, name: str) -> bool:
    module = task.get_submodule(name)
    is_compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return bool(survey.module_calls[name].callees) and not is_compiled


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
