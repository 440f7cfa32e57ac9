"""What a strategy recorded of one step, in the form that the report draws: `timeline.json` in the run's folder.

lane      | spans                                  seconds ->
compute   | [forward ][backward            ][wait]
bucket 0  |              [communication ]
bucket 1  |                      [communication  ]
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILENAME = "timeline.json"
KINDS = ("forward", "backward", "communication", "blocked", "wait", "optimizer")
_VERSION = 1
_DIGITS = 7  # of a second: tenths of a microsecond


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something that went on from `start` to `end`, in seconds of one clock."""

    kind: str
    """One of `KINDS`; the report gives each a colour."""
    start: float
    end: float
    name: str = ""
    """What it was, for who points at it."""
    label: str = ""
    """A few letters that are written on it where there is room: the number of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the picture: what one rank did, or how one bucket fared."""

    name: str
    spans: Sequence[TimelineSpan]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that sums the picture up."""

    name: str
    value: float
    unit: str = "share"
    """`share` (of 1), `seconds`, `bytes` or `count`."""
    note: str = ""
    """What it is to be compared with."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of one strategy."""

    strategy: str
    title: str
    lanes: Sequence[Lane]
    step: int | None = None
    """The optimizer step that is drawn, where it is known."""
    figures: Sequence[Figure] = ()
    advice: Sequence[str] = field(default_factory=list)
    """What could be changed, in sentences; nothing if all is well."""

    @property
    def start(self) -> float:
        """When the first span starts."""
        return min((span.start for lane in self.lanes for span in lane.spans), default=0.0)

    @property
    def end(self) -> float:
        """When the last span ends."""
        return max((span.end for lane in self.lanes for span in lane.spans), default=0.0)

    def write(self, folder: Path) -> None:
        """Leave `timeline.json` in a run's folder, in place of an earlier one; times then begin at 0."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{FILENAME}.part"
        part.write_text(json.dumps({"version": _VERSION, **asdict(self._from_zero())}) + "\n", encoding="utf-8")
        os.replace(part, folder / FILENAME)

    def _from_zero(self) -> Timeline:
        first = self.start
        lanes = [
            Lane(
                lane.name,
                [
                    TimelineSpan(
                        span.kind,
                        round(span.start - first, _DIGITS),
                        round(span.end - first, _DIGITS),
                        span.name,
                        span.label,
                    )
                    for span in lane.spans
                ],
            )
            for lane in self.lanes
        ]
        figures = [figure for figure in self.figures if math.isfinite(figure.value)]
        return Timeline(self.strategy, self.title, lanes, self.step, figures, list(self.advice))


def read_timeline(folder: Path) -> Timeline | None:
    """Return what was recorded in a run's folder; `None` where nothing was, or nothing that can be read."""
    try:
        saved: dict[str, Any] = json.loads((folder / FILENAME).read_text(encoding="utf-8"))
        if saved.pop("version") != _VERSION:
            return None
        saved["lanes"] = [
            Lane(lane["name"], [TimelineSpan(**span) for span in lane["spans"]]) for lane in saved["lanes"]
        ]
        saved["figures"] = [Figure(**figure) for figure in saved["figures"]]
        return Timeline(**saved)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def covered_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that the spans cover together, overlaps counted once."""
    total, covered = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total
