"""The plan of a pipeline and its drawing, without training and without other processes."""

from __future__ import annotations

from torch import nn

from trainkit.window import Window

from .partition import Shared
from .planning import Costs, Cuts, plan
from .recording import Step
from .report import schedule_drawing, stages_drawing
from .schedules import Schedule
from .table import PartitionPlan


def preview(
    task: nn.Module,
    step: Step,
    window: Window,
    *,
    schedule: Schedule,
    balance: float,
    cuts: Cuts | None,
    shared: Shared,
    costs: Costs,
) -> tuple[PartitionPlan, str]:
    """Return the plan for windows like this one, and its drawing; the task stays whole."""
    num_stages, num_micro_batches = schedule.num_stages, len(window.micro_batches)
    batch = window.micro_batches[0].batch
    recording, partition = plan(
        task, step, batch, num_stages=num_stages, balance=balance, cuts=cuts, shared=shared, costs=costs
    )
    found = PartitionPlan.of(recording, partition, bubble=schedule.bubble(num_micro_batches))
    actions = [schedule.actions(rank, num_micro_batches) for rank in range(schedule.num_ranks)]
    return found, f"{stages_drawing(found)}\n\n{schedule_drawing(actions, num_stages=num_stages)}"
