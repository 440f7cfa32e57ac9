"""Report of a partition and of a step: text, JSON and drawings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainkit.profiling import Timeline, TimelineFigure, TimelineSpan, Track

from .graph import Node, TracedGraph
from .partition import STATES_PER_PARAMETER, Partition
from .schedules import BACKWARD, FORWARD, Action, Span, draw, idle_share, simulate
from .stage import stage_graphs


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage in the table of a partition."""

    stage: int
    first: str
    last: str
    num_modules: int
    parameter_bytes: int
    memory_bytes: int
    """Parameters, gradients, two moments of the optimizer, and activations of the micro-batches in flight."""
    share: float
    """Share of the time of one micro-batch, forward and backward."""
    received_bytes: int
    """Bytes received per micro-batch in forward."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The stages of a task with their costs, and the idle share of the schedule."""

    stages: tuple[StageSummary, ...]
    replicated: tuple[str, ...]
    bubble: float
    measured: bool

    @classmethod
    def of(cls, graph: TracedGraph, partition: Partition, *, bubble: float) -> PlanReport:
        """Return the summary of a partition; `bubble` is the idle share of the schedule with equal stages."""
        bounds = partition.bounds(len(graph.nodes))
        pieces = stage_graphs(graph, bounds, list(range(len(bounds))))
        whole = sum(node.cost.seconds for node in graph.nodes) or 1.0
        stages = []
        for index, (start, stop) in enumerate(bounds):
            nodes = graph.nodes[start:stop]
            names = [node.name for node in nodes if node.is_leaf_module]
            parameters = {name for node in nodes for name in node.parameters}
            parameter_bytes = sum(graph.parameter_bytes[name] for name in parameters)
            activations = sum(node.cost.activation_bytes for node in nodes)
            stages.append(
                StageSummary(
                    index,
                    names[0] if names else _described(nodes[0]),
                    names[-1] if names else _described(nodes[-1]),
                    len(set(names)),
                    parameter_bytes,
                    int(STATES_PER_PARAMETER * parameter_bytes + (len(bounds) - index) * activations),
                    sum(node.cost.seconds for node in nodes) / whole,
                    sum(graph.values[transfer.value].num_bytes for transfer in pieces[index].receives),
                )
            )
        return cls(tuple(stages), partition.replicated, bubble, graph.measured)

    @property
    def imbalance(self) -> float:
        """Time of the slowest stage, relative to the mean."""
        return max(stage.share for stage in self.stages) * len(self.stages)

    @property
    def predicted_bubble(self) -> float:
        """Idle share over all stages, with the time that faster stages wait for the slowest."""
        return 1.0 - (1.0 - self.bubble) / max(self.imbalance, 1.0)

    def __str__(self) -> str:
        rows = [("stage", "from", "to", "modules", "parameters", "memory", "time", "received")]
        for stage in self.stages:
            sizes = (in_units(size) for size in (stage.parameter_bytes, stage.memory_bytes, stage.received_bytes))
            parameters, memory, received = sizes
            index, modules, time = str(stage.stage), str(stage.num_modules), f"{stage.share:.1%}"
            rows.append((index, stage.first, stage.last, modules, parameters, memory, time, received))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = "  ".join(f"{{:{side}{width}}}" for side, width in zip("><<>>>>>", widths, strict=True))
        lines = [cells.format(*row) for row in rows]
        source = "measured" if self.measured else "estimated from operations and bytes"
        lines.append(
            f"times {source}; slowest stage {self.imbalance:.2f} x the mean; predicted idle share "
            f"{self.predicted_bubble:.1%} ({self.bubble:.1%} if all stages were equal)"
        )
        if self.replicated:
            lines.append(f"in more than one stage, with gradients summed: {', '.join(self.replicated)}")
        return "\n".join(lines)


def in_units(num_bytes: float) -> str:
    """Return bytes in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _described(node: Node) -> str:
    return f"{node.name} ({node.location})"


BAR_WIDTH = 60
WORTH_ADVICE = 0.10  # of all ranks' time: idle beyond what the schedule itself costs
COLUMNS = 150
"""Wider lines of a drawn schedule are cut off."""


def write_plan(plan: PlanReport, folder: Path) -> None:
    """Write `partition.txt` and `partition.json` to the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "partition.txt").write_text(f"{plan}\n\n{draw_stages(plan)}\n", encoding="utf-8")
    (folder / "partition.json").write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")


def write_timeline(spans: Sequence[Sequence[Span]], folder: Path, *, expected: float) -> None:
    """Write a step to the run folder: a drawing, `timeline.svg`, and `timeline.json` for the report.

    `expected` is the idle share of the schedule with equal stages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    timeline_of_step(spans, expected=expected).write(folder)
    (folder / "timeline.svg").write_text(timeline_svg(spans, expected=expected), encoding="utf-8")


def timeline_of_step(spans: Sequence[Sequence[Span]], *, expected: float) -> Timeline:
    """Return the timeline of a step for the report: one track per rank, one bar per action."""
    tracks = [Track(f"rank {rank}", [_bar(span) for span in rank_spans]) for rank, rank_spans in enumerate(spans)]
    num_micro_batches = len({span.action.micro_batch for rank_spans in spans for span in rank_spans})
    idle = idle_share(spans)
    figures = [
        TimelineFigure("bubble, measured", idle, note=f"{expected:.1%} with equal stages: (p-1)/(m+p-1)"),
        TimelineFigure("one step", max((row[-1].end for row in spans if row), default=0.0), "seconds"),
        TimelineFigure("micro-batches", num_micro_batches, "count"),
    ]
    advice = []
    if idle > expected + WORTH_ADVICE:
        advice.append(
            "Ranks are idle for longer than with equal stages. partition.txt shows the slowest stage; "
            "strategy.split_points moves stages, and strategy.accumulate gives more micro-batches."
        )
    return Timeline("pipeline", "Actions of each rank in one step", tracks, None, figures, advice)


def _bar(span: Span) -> TimelineSpan:
    action = span.action
    kind = "forward" if action.kind == FORWARD else "backward"
    return TimelineSpan(kind, span.start, span.end, action.place(), str(action.micro_batch))


def draw_stages(plan: PlanReport) -> str:
    """Return a bar for each stage, as long as its share of the time.

    Example::

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


def draw_schedule(actions: Sequence[Sequence[Action]], *, num_stages: int) -> str:
    """Return a drawing of the schedule in which a forward takes one column and a backward two in every stage."""
    costs = {(kind, stage): cost for kind, cost in ((FORWARD, 1.0), (BACKWARD, 2.0)) for stage in range(num_stages)}
    text = draw(simulate(actions, costs, num_stages), with_stage=num_stages > len(actions))
    lines = text.splitlines()
    return "\n".join(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 4]} ..." for line in lines)


ROW_PIXELS, WIDTH_PIXELS, LEFT_PIXELS, TOP_PIXELS = 26, 900, 70, 24
_COLOURS = {FORWARD: "#4c8bf5", "B": "#f5a04c"}


def timeline_svg(spans: Sequence[Sequence[Span]], *, expected: float) -> str:
    """Return an SVG of one step: a row for each rank, forwards blue, backwards orange, idle time white.

    `spans` are in seconds; `expected` is the idle share of the schedule with equal stages.
    """
    length = max((span.end for row in spans for span in row), default=0.0) or 1.0
    height = TOP_PIXELS + ROW_PIXELS * len(spans) + 6
    title = f"{length * 1e3:.1f} ms, idle {idle_share(spans):.1%} (equal stages: {expected:.1%})"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT_PIXELS + WIDTH_PIXELS + 10}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT_PIXELS}" y="15">{title}</text>',
    ]
    scale = WIDTH_PIXELS / length
    for rank, row in enumerate(spans):
        top = TOP_PIXELS + rank * ROW_PIXELS
        lines.append(f'<text x="4" y="{top + 16}">rank {rank}</text>')
        for span in row:
            left, width = LEFT_PIXELS + span.start * scale, max((span.end - span.start) * scale, 0.5)
            lines.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW_PIXELS - 4}" '
                f'fill="{_COLOURS[span.action.kind]}" stroke="white"><title>{span.action}</title></rect>'
            )
            if width > 14:
                lines.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 15}" text-anchor="middle" fill="white">'
                    f"{span.action.micro_batch}</text>"
                )
    return "\n".join([*lines, "</svg>"])
