"""From a task and one batch to a recording with cuts: which modules are units, what they cost, where stages begin."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from trainkit.errors import UserError

from .choice import Choice
from .costs import estimated_seconds
from .events import Event, Recording
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


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A task's step with one batch, which can be observed as often as needed."""

    task: nn.Module
    step: Step
    batch: Any
    costs: Costs

    def observe(self, units: frozenset[str]) -> Observation:
        """Return what one run shows; raises UserError where only computing could tell what the step does."""
        if self.costs != "fake":
            return observe(self.task, self.step, self.batch, units=units)
        try:
            return observe(self.task, self.step, self.batch, units=units, fake=True)
        except NEEDS_ELEMENTS as error:
            raise UserError(
                f"{type(self.task).__name__}'s step looks at elements of a tensor ({error.func}), which are not known "
                "while it is recorded without computing anything. Give the task real parameters (not on the meta "
                "device) and set strategy.record=real."
            ) from None

    def set_costs(self, recording: Recording) -> None:
        """Measure or estimate how long the events take."""
        if self.costs == "measured":
            try:
                measure(recording, self.task, self.step, self.batch)
                return
            except Unrepeatable as error:
                logger.info("costs are estimated, not measured: %s", error)
        estimate(recording)


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
    rehearsal = Rehearsal(task, step, batch, costs)
    survey = rehearsal.observe(frozenset())
    if not survey.recording.parameter_users:
        raise UserError(f"{type(task).__name__}'s step uses no parameter of the task: there is nothing to cut.")
    if cuts is not None:
        return _manual(rehearsal, survey, cuts, num_stages=num_stages, shared=shared)
    best: tuple[Recording, Partition] | None = None
    best_cost = float("inf")
    refusal: UserError | None = None
    previous: frozenset[str] | None = None
    for fineness in FINENESS:
        recording = _record(rehearsal, survey, limit=1.0 / (num_stages * fineness), opened=frozenset())
        units = frozenset(event.name for event in recording.events if event.is_unit)
        if units == previous:
            continue
        previous = units
        rehearsal.set_costs(recording)
        try:
            found = partition(recording, num_stages=num_stages, balance=balance, shared=shared)
        except UserError as error:
            refusal = error
            continue
        stage_costs = StageCosts.of(recording, num_stages=num_stages, balance=balance)
        cost = dearest(found.cuts, len(recording.events), stage_costs)
        if cost < best_cost * WORTH_OPENING:
            best, best_cost = (recording, found), cost
        if best_cost * num_stages <= GOOD_IMBALANCE:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def plan_again(
    task: nn.Module, step: Step, batch: Any, choice: Choice, *, costs: Costs = "measured"
) -> tuple[Recording, Partition] | None:
    """Return a recording cut as it was when `choice` was made, or nothing if the step makes other calls by now."""
    rehearsal = Rehearsal(task, step, batch, costs)
    recording = rehearsal.observe(frozenset(choice.units)).recording
    if not choice.fits(recording):
        return None
    rehearsal.set_costs(recording)
    return recording, with_replicas(recording, choice.cuts)


def _manual(
    rehearsal: Rehearsal, survey: Observation, cuts: Cuts, *, num_stages: int, shared: Shared
) -> tuple[Recording, Partition]:
    wanted = [] if isinstance(cuts, Mapping) else list(cuts)
    names = [name for name in survey.module_calls if name]
    opened = {
        ancestor
        for name in names
        if any(name == want or name.endswith(f".{want}") for want in wanted)
        for ancestor in _ancestors(name)
    }
    limit = 0.0 if isinstance(cuts, Mapping) else 1.0  # patterns may name any module
    recording = _record(rehearsal, survey, limit=limit, opened=frozenset(opened))
    rehearsal.set_costs(recording)
    asked = dict(cuts) if isinstance(cuts, Mapping) else wanted
    return recording, manual_cuts(recording, asked, num_stages=num_stages, shared=shared)


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
