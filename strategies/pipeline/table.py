"""A partition as a person wants to see it."""

from __future__ import annotations

from dataclasses import dataclass

from .events import Event, Recording
from .partition import STATES_PER_PARAMETER, Partition
from .segments import segments


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One line of the table."""

    stage: int
    first: str
    last: str
    num_modules: int
    parameter_bytes: int
    memory_bytes: int
    """Parameters, gradients, two moments of the optimizer, and activations of the micro-batches in flight."""
    share: float
    """Of the time of one micro-batch, forward and backward."""
    received_bytes: int
    """For each micro-batch, forward."""


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The stages of a task, what each costs, and how long they will wait for each other."""

    stages: tuple[StageSummary, ...]
    replicated: tuple[str, ...]
    bubble: float
    measured: bool

    @classmethod
    def of(cls, recording: Recording, partition: Partition, *, bubble: float) -> PartitionPlan:
        """Return the summary of a partition; `bubble` is the idle share of the schedule with equal stages."""
        bounds = partition.bounds(len(recording.events))
        pieces = segments(recording, bounds, list(range(len(bounds))))
        whole = sum(event.cost.seconds for event in recording.events) or 1.0
        stages = []
        for index, (start, stop) in enumerate(bounds):
            events = recording.events[start:stop]
            names = [event.name for event in events if event.is_unit]
            parameters = {name for event in events for name in event.parameters}
            parameter_bytes = sum(recording.parameter_bytes[name] for name in parameters)
            activations = sum(event.cost.activation_bytes for event in events)
            stages.append(
                StageSummary(
                    index,
                    names[0] if names else _what(events[0]),
                    names[-1] if names else _what(events[-1]),
                    len(set(names)),
                    parameter_bytes,
                    int(STATES_PER_PARAMETER * parameter_bytes + (len(bounds) - index) * activations),
                    sum(event.cost.seconds for event in events) / whole,
                    sum(recording.values[transfer.value].num_bytes for transfer in pieces[index].receives),
                )
            )
        return cls(tuple(stages), partition.replicated, bubble, recording.measured)

    @property
    def imbalance(self) -> float:
        """The slowest stage's time over the mean."""
        return max(stage.share for stage in self.stages) * len(self.stages)

    @property
    def predicted_bubble(self) -> float:
        """The idle share over all stages, with the time that the faster ones wait for the slowest."""
        return 1.0 - (1.0 - self.bubble) / max(self.imbalance, 1.0)

    def __str__(self) -> str:
        rows = [["stage", "from", "to", "modules", "parameters", "memory", "time", "received"]]
        for stage in self.stages:
            rows.append(
                [
                    str(stage.stage),
                    stage.first,
                    stage.last,
                    str(stage.num_modules),
                    in_units(stage.parameter_bytes),
                    in_units(stage.memory_bytes),
                    f"{stage.share:.1%}",
                    in_units(stage.received_bytes),
                ]
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (1, 2) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        source = "measured" if self.measured else "estimated from operations and bytes"
        lines.append(
            f"times {source}; slowest stage {self.imbalance:.2f} x the mean; predicted idle share "
            f"{self.predicted_bubble:.1%} ({self.bubble:.1%} if all stages were equal)"
        )
        if self.replicated:
            lines.append(f"in more than one stage, with gradients added up: {', '.join(self.replicated)}")
        return "\n".join(lines)


def in_units(num_bytes: float) -> str:
    """Return bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _what(event: Event) -> str:
    return f"{event.name} ({event.place})"
