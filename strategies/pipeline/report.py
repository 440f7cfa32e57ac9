"""What a run keeps of its pipeline: the plan as text and as JSON, a drawing of it, the timeline as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trainkit.profiling.timeline import Timeline, TimelineFigure, TimelineSpan, Track

from .schedules import BACKWARD, FORWARD, Action, Span, draw, idle_share, simulate
from .table import PartitionPlan, in_units
from .timeline import timeline_picture

BAR_WIDTH = 60
WORTH_ADVICE = 0.10  # of all ranks' time: idle beyond what the schedule itself costs
COLUMNS = 150
"""A schedule wider than this is drawn for fewer micro-batches."""


def write_plan(plan: PartitionPlan, folder: Path) -> None:
    """Leave `partition.txt` and `partition.json` in the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "partition.txt").write_text(f"{plan}\n\n{stages_drawing(plan)}\n", encoding="utf-8")
    (folder / "partition.json").write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")


def write_timeline(spans: Sequence[Sequence[Span]], folder: Path, *, expected: float) -> None:
    """Leave `timeline.svg` in the run's folder: the last window, with its idle share beside the expected one.

    The same window is left as `timeline.json`, for the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn_timeline(spans, expected=expected).write(folder)
    (folder / "timeline.svg").write_text(timeline_picture(spans, expected=expected), encoding="utf-8")


def drawn_timeline(spans: Sequence[Sequence[Span]], *, expected: float) -> Timeline:
    """Return a window in the form that the report draws: a lane for each rank, a bar for each action."""
    tracks = [Track(f"rank {rank}", [_bar(span) for span in rank_spans]) for rank, rank_spans in enumerate(spans)]
    num_micro_batches = len({span.action.micro_batch for rank_spans in spans for span in rank_spans})
    idle = idle_share(spans)
    figures = [
        TimelineFigure("bubble, measured", idle, note=f"{expected:.1%} with equal stages: (p-1)/(m+p-1)"),
        TimelineFigure("one window", max((row[-1].end for row in spans if row), default=0.0), "seconds"),
        TimelineFigure("micro-batches", num_micro_batches, "count"),
    ]
    advice = []
    if idle > expected + WORTH_ADVICE:
        advice.append(
            "Ranks are idle for longer than equal stages would be. Look at partition.txt for the slowest stage; "
            "strategy.cuts sets where stages begin, and strategy.accumulate gives more micro-batches."
        )
    return Timeline("pipeline", "Who does which micro-batch when, in one step", tracks, None, figures, advice)


def _bar(span: Span) -> TimelineSpan:
    action = span.action
    kind = "forward" if action.kind == FORWARD else "backward"
    name = f"{kind} of micro-batch {action.micro_batch} in stage {action.stage}"
    return TimelineSpan(kind, span.start, span.end, name, str(action.micro_batch))


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
