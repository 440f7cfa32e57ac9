"""What a run keeps of its pipeline: the plan as text and as JSON, a drawing of it, the timeline as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .schedules import BACKWARD, FORWARD, Action, Span, draw, simulate
from .table import PartitionPlan, in_units
from .timeline import timeline_picture

BAR_WIDTH = 60
COLUMNS = 150
"""A schedule wider than this is drawn for fewer micro-batches."""


def write_plan(plan: PartitionPlan, folder: Path) -> None:
    """Leave `partition.txt` and `partition.json` in the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "partition.txt").write_text(f"{plan}\n\n{stages_drawing(plan)}\n", encoding="utf-8")
    (folder / "partition.json").write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")


def write_timeline(spans: Sequence[Sequence[Span]], folder: Path, *, expected: float) -> None:
    """Leave `timeline.svg` in the run's folder: the last window, with its idle share beside the expected one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "timeline.svg").write_text(timeline_picture(spans, expected=expected), encoding="utf-8")


def stages_drawing(plan: PartitionPlan) -> str:
    """Return a bar for each stage, as long as its share of the time.

    Each begins where the one before it ends::

        stage 0  ##########             embedding to blocks.3
                           | 64.0 KiB received for each micro-batch
        stage 1            ##########   blocks.4 to head
    """
    lines = []
    start = 0
    done = 0.0
    for stage in plan.stages:
        if stage.stage:
            lines.append(f"{'':9}{'':{start}}| {in_units(stage.received_bytes)} received for each micro-batch")
        done += stage.share
        stop = max(round(done * BAR_WIDTH), start + 1)
        bar = " " * start + "#" * (stop - start)
        lines.append(f"stage {stage.stage:<3}{bar:<{BAR_WIDTH}}  {stage.first} to {stage.last}")
        start = stop
    return "\n".join(lines)


def schedule_drawing(actions: Sequence[Sequence[Action]], *, num_stages: int) -> str:
    """Return who does which micro-batch when, if a forward takes one column and a backward two in every stage."""
    costs = {(kind, stage): cost for kind, cost in ((FORWARD, 1.0), (BACKWARD, 2.0)) for stage in range(num_stages)}
    text = draw(simulate(actions, costs, num_stages), with_stage=num_stages > len(actions))
    lines = text.splitlines()
    return "\n".join(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 4]} ..." for line in lines)
