"""The plan of a pipeline and its drawing, without training and without other processes."""

from __future__ import annotations

from collections.abc import Sequence

from .partition import Shared
from .planning import Cuts, Rehearsal, plan_steps
from .report import schedule_drawing, stages_drawing
from .schedules import Schedule
from .table import PartitionPlan


def preview(
    rehearsals: Sequence[Rehearsal],
    num_micro_batches: int,
    *,
    schedule: Schedule,
    balance: float,
    cuts: Cuts | None,
    shared: Shared,
) -> tuple[PartitionPlan, str]:
    """Return the plan for windows of so many micro-batches, and its drawing; the task stays whole."""
    num_stages = schedule.num_stages
    planned = plan_steps(rehearsals, num_stages=num_stages, balance=balance, cuts=cuts, shared=shared)
    found = PartitionPlan.of(planned.whole, planned.partition, bubble=schedule.bubble(num_micro_batches))
    actions = [schedule.actions(rank, num_micro_batches) for rank in range(schedule.num_ranks)]
    return found, f"{stages_drawing(found)}\n\n{schedule_drawing(actions, num_stages=num_stages)}"
