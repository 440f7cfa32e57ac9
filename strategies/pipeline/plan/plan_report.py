"""Report of a partition and of a step: text, JSON and drawings."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainkit.console import size
from trainkit.files import write_optional
from trainkit.profiling import Timeline, TimelineFigure, TimelineSpan, Track

from ..trace.graph import TracedGraph
from .memory import RankMemory
from .partition import Partition
from .schedules import FORWARD, Span, idle_share
from .stage import stage_graphs
from .traffic import HostTraffic


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage in the table of a partition."""

    stage: int
    first: str
    last: str
    num_modules: int
    parameter_bytes: int
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
    memory: tuple[RankMemory, ...] = ()
    """Of each rank of a replica."""
    traffic: tuple[HostTraffic, ...] = ()
    """Of each placement on several hosts, first the chosen one."""

    @classmethod
    def of(
        cls,
        graph: TracedGraph,
        partition: Partition,
        *,
        bubble: float,
        memory: Sequence[RankMemory] = (),
        traffic: Sequence[HostTraffic] = (),
    ) -> PlanReport:
        """Return the summary of a partition; `bubble` is the idle share of the schedule with equal stages."""
        bounds = partition.bounds(len(graph.nodes))
        # Any ranks will do: what a stage receives does not depend on them.
        pieces = stage_graphs(graph, bounds, list(range(len(bounds))))
        # 1.0 for a step without costs, which would divide by zero.
        total_seconds = sum(node.cost.seconds for node in graph.nodes) or 1.0
        stages = []
        for index, (start, stop) in enumerate(bounds):
            nodes = graph.nodes[start:stop]
            modules = [node.name for node in nodes if node.is_leaf_module]
            # A stage may have calls of functions only.
            names = modules or [f"{node.name} ({node.location})" for node in nodes]
            parameters = {name for node in nodes for name in node.parameters}
            parameter_bytes = sum(graph.parameter_bytes[name] for name in parameters)
            stages.append(
                StageSummary(
                    index,
                    names[0],
                    names[-1],
                    len(set(modules)),
                    parameter_bytes,
                    sum(node.cost.seconds for node in nodes) / total_seconds,
                    sum(graph.values[transfer.value].num_bytes for transfer in pieces[index].receives),
                )
            )
        return cls(tuple(stages), partition.replicated, bubble, graph.measured, tuple(memory), tuple(traffic))

    @property
    def imbalance(self) -> float:
        """Time of the slowest stage, relative to the mean."""
        return max(stage.share for stage in self.stages) * len(self.stages)

    @property
    def predicted_bubble(self) -> float:
        """Idle share over all stages, with the time that faster stages wait for the slowest."""
        # Every stage takes as long as the slowest one. At least 1.0, as a sum of rounded shares may be less.
        return 1.0 - (1.0 - self.bubble) / max(self.imbalance, 1.0)

    def __str__(self) -> str:
        rows = [("stage", "from", "to", "modules", "parameters", "time", "received")]
        for stage in self.stages:
            index, modules, time = str(stage.stage), str(stage.num_modules), f"{stage.share:.1%}"
            parameters, received = size(stage.parameter_bytes), size(stage.received_bytes)
            rows.append((index, stage.first, stage.last, modules, parameters, time, received))
        lines = _aligned(rows, "><<>>>>")
        source = "measured" if self.measured else "estimated from operations and bytes"
        lines.append(
            f"times {source}; slowest stage {self.imbalance:.2f} x the mean; predicted idle share "
            f"{self.predicted_bubble:.1%} ({self.bubble:.1%} if all stages were equal)"
        )
        if self.replicated:
            lines.append(f"in more than one stage, with gradients summed: {', '.join(self.replicated)}")
        if self.memory:
            names = ("rank", "parameters", "gradients", "optimizer", "activations", "messages", "peak", "in flight")
            lines += ["", *_aligned([names, *map(_memory_row, self.memory)], ">>>>>>>>")]
        if self.traffic:
            titles = ("placement", "activations", "gradients", "weights", "sent between hosts in a step")
            lines += ["", *_aligned([titles, *map(_traffic_row, self.traffic)], "<>>>>")]
            # The first row is that of the present placement; the other one shows what it would cost.
            lines.append(f"placement={self.traffic[0].placement} is used")
        return "\n".join(lines)


def _memory_row(rank: RankMemory) -> tuple[str, ...]:
    sizes = (rank.parameters, rank.gradients, rank.optimizer, rank.activations, rank.messages, rank.peak)
    return str(rank.rank), *map(size, sizes), str(rank.in_flight)


def _traffic_row(traffic: HostTraffic) -> tuple[str, ...]:
    sizes = (traffic.activations, traffic.gradients, traffic.weights, traffic.total)
    return traffic.placement, *map(size, sizes)


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Doubled braces are those of the format that is made here.
    cells = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [cells.format(*row) for row in rows]


BAR_WIDTH = 60
STEPS_KEPT = 31  # enough for a median that one slow step does not change
WORTH_ADVICE = 0.10  # of all ranks' time: idle beyond what the schedule itself costs


def write_plan(plan: PlanReport, folder: Path) -> None:
    """Write `partition.txt` and `partition.json` to the run folder."""
    # Optional: a full disk must not end a run that needs no table.
    write_optional(folder / "partition.txt", f"{plan}\n\n{draw_stages(plan)}\n")
    content = asdict(plan)
    for row, rank in zip(content["memory"], plan.memory, strict=True):
        row["peak"] = rank.peak
    write_optional(folder / "partition.json", json.dumps(content, indent=2) + "\n")


class StepTimelines:
    """Keeps the spans of the latest full steps, and writes those of the step of median length.

    The last step of an epoch may have fewer micro-batches, between which ranks are idle for longer.
    """

    def __init__(self) -> None:
        self._steps: deque[Sequence[Sequence[Span]]] = deque(maxlen=STEPS_KEPT)

    def add(self, spans: Sequence[Sequence[Span]], folder: Path, *, expected: float) -> None:
        """Write the timeline, now also of a step with these spans, unless it has fewer actions than others."""
        num_actions = _num_actions(spans)
        most = _num_actions(self._steps[0]) if self._steps else 0  # all that are kept have as many
        if num_actions < most:
            return
        if num_actions > most:
            self._steps.clear()
        self._steps.append(spans)
        by_length = sorted(self._steps, key=_length)
        write_timeline(by_length[(len(by_length) - 1) // 2], folder, expected=expected)


def _num_actions(spans: Sequence[Sequence[Span]]) -> int:
    return sum(map(len, spans))


def _length(spans: Sequence[Sequence[Span]]) -> float:
    return max((row[-1].end for row in spans if row), default=0.0)


def write_timeline(spans: Sequence[Sequence[Span]], folder: Path, *, expected: float) -> None:
    """Write the timeline of a step for the report: one track per rank, one span per action.

    `expected` is the idle share of the schedule with equal stages.
    """
    tracks = [Track(f"rank {rank}", [_timeline_span(span) for span in row]) for rank, row in enumerate(spans)]
    # With several stages a rank, a micro-batch has several actions on each.
    num_micro_batches = len({span.action.micro_batch for row in spans for span in row})
    idle = idle_share(spans)
    figures = [
        TimelineFigure("bubble, measured", idle, note=f"{expected:.1%} with equal stages: (p-1)/(m+p-1)"),
        TimelineFigure("one step", _length(spans), "seconds"),
        TimelineFigure("micro-batches", num_micro_batches, "count"),
    ]
    advice = []
    if idle > expected + WORTH_ADVICE:
        advice.append(
            "Ranks are idle for longer than with equal stages. partition.txt shows the slowest stage; "
            "strategy.split_points moves stages, and strategy.accumulate gives more micro-batches."
        )
    Timeline("pipeline", "Actions of each rank in one step", tracks, None, figures, advice).write(folder)


def _timeline_span(span: Span) -> TimelineSpan:
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
        if stage.stage:  # the first one receives nothing
            lines.append(f"{'':9}{'':{start}}| {size(stage.received_bytes)} received for each micro-batch")
        done += stage.share
        # From the sum, as rounded lengths would add up to another width; at least one mark for a stage of little time.
        stop = max(round(done * BAR_WIDTH), start + 1)
        bar = " " * start + "#" * (stop - start)
        lines.append(f"stage {stage.stage:<3}{bar:<{BAR_WIDTH}}  {stage.first} to {stage.last}")
        start = stop
    return "\n".join(lines)
