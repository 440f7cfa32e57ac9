"""Profiling: the timeline of a step by track, the communication that computation hides, and peak memory.

track     | spans                                  seconds ->
compute   | [forward ][backward            ][wait]
bucket 0  |              [communication ]
bucket 1  |                      [communication  ]
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trainkit.devices import DeviceMemory, memory, peak_memory, reset_peak
from trainkit.files import write_optional

FILENAME = "timeline.json"
KINDS = ("forward", "backward", "communication", "blocked", "wait", "optimizer")
_VERSION = 2  # of the file: one that another version of trainkit has written is not read
_DIGITS = 7  # of a second: tenths of a microsecond


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """An activity from `start` to `end`, in seconds of one clock."""

    kind: str
    """One of `KINDS`; the report gives each a colour."""
    start: float
    end: float
    name: str = ""
    """Shown when the pointer is on it."""
    label: str = ""
    """A few characters drawn on it where there is room: the number of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Track:
    """A row of the chart: one rank, or one bucket."""

    name: str
    spans: Sequence[TimelineSpan]


@dataclass(frozen=True, slots=True)
class TimelineFigure:
    """A number that summarizes the timeline."""

    name: str
    value: float
    unit: str = "share"
    """`share` (of 1), `seconds`, `bytes` or `count`."""
    note: str = ""
    """What to compare it with."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of one strategy."""

    strategy: str
    title: str
    tracks: Sequence[Track]
    step: int | None = None
    """The optimizer step, where it is known."""
    figures: Sequence[TimelineFigure] = ()
    advice: Sequence[str] = field(default_factory=list)
    """Suggested changes, in sentences; empty if there are none."""

    @property
    def start(self) -> float:
        """When the first span starts."""
        return min((span.start for track in self.tracks for span in track.spans), default=0.0)

    @property
    def end(self) -> float:
        """When the last span ends."""
        return max((span.end for track in self.tracks for span in track.spans), default=0.0)

    def write(self, folder: Path) -> None:
        """Write `timeline.json` into a run's folder, replacing an earlier one; times start at 0."""
        first = self.start

        def shifted(span: TimelineSpan) -> TimelineSpan:
            return replace(span, start=round(span.start - first, _DIGITS), end=round(span.end - first, _DIGITS))

        tracks = [Track(track.name, [shifted(span) for span in track.spans]) for track in self.tracks]
        # JSON has neither NaN nor infinity.
        figures = [figure for figure in self.figures if math.isfinite(figure.value)]
        content = {"version": _VERSION, **asdict(replace(self, tracks=tracks, figures=figures))}
        write_optional(folder / FILENAME, json.dumps(content) + "\n")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication measured on this rank, in seconds of one step."""

    exposed: float
    """Communication or waiting that no computation hid."""
    communication: float | None = None
    """All communication; `None` if only `exposed` is known, 0 if nothing is sent."""
    steps: int = 0
    """Steps that were averaged."""
    note: str = ""
    """What was measured, in a few words."""

    @property
    def hidden_share(self) -> float | None:
        """Share of communication that computation hid; `None` if there is none or it is not known."""
        return 1.0 - self.exposed / self.communication if self.communication else None

    def line(self, *, strategy: str, step_seconds: float) -> str:
        """Return one line, relative to the seconds of a whole step."""
        note = f" ({self.note})" if self.note else ""
        if self.communication == 0:
            return f"overlap: {strategy} has no communication here{note}"
        taken = self.exposed if self.communication is None else self.communication
        share = f"{1e3 * taken:.2f} ms ({taken / step_seconds:.0%}) of a step"
        if self.hidden_share is None:
            return f"overlap: {strategy} waits for others in {share}{note}"
        return f"overlap: {strategy} communicates in {share}, {self.hidden_share:.0%} of it hidden{note}"

    def record(self, *, strategy: str, step_seconds: float) -> dict[str, Any]:
        """Return the numbers and the line, for the run's `profile.json`."""
        return {
            "communication_seconds": self.communication,
            "exposed_seconds": self.exposed,
            "hidden_share": self.hidden_share,
            "step_seconds": step_seconds or None,
            "steps": self.steps,
            "line": self.line(strategy=strategy, step_seconds=step_seconds),
        }


NO_COMMUNICATION = Overlap(0.0, communication=0.0, note="one process, one device")


def read_timeline(folder: Path) -> Timeline | None:
    """Return the timeline recorded in a run's folder; `None` if there is none that can be read."""
    try:
        saved: dict[str, Any] = json.loads((folder / FILENAME).read_text(encoding="utf-8"))
        if saved.pop("version") != _VERSION:
            return None
        saved["tracks"] = [
            Track(track["name"], [TimelineSpan(**span) for span in track["spans"]]) for track in saved["tracks"]
        ]
        saved["figures"] = [TimelineFigure(**figure) for figure in saved["figures"]]
        return Timeline(**saved)
    # Missing, cut short or edited by hand, down to nesting without end: the report is written without a timeline.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def covered_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that the spans cover together, overlaps counted once."""
    total, covered_until = 0.0, float("-inf")
    # By their start, so that each adds only what reaches past those before.
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


class PeakMemoryTracker:
    """Peak memory of tensors on a GPU; the only place that resets torch's peak, so that several may read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: int | None = None
        self._before = 0  # of the run, up to the last reset
        self._between = 0
        self._since_log = 0  # up to the last measurement

    def restart(self) -> None:
        """Forget what this process has used before the run."""
        reset_peak(self._device)

    def measure(self) -> DeviceMemory:
        """Return the memory of the device, and begin a new peak for the next measurement."""
        measured = memory(self._device)
        self._restart(measured.peak)
        return measured

    def between_logs(self, step: int) -> int:
        """Return the peak bytes since the log point before the one of `step`."""
        # Several callbacks ask at one log point: the first resets the peak, and all get the same number.
        if step != self._step:
            peak = peak_memory(self._device)
            self._step, self._between = step, max(self._since_log, peak)
            self._restart(peak)
            self._since_log = 0  # after `_restart`, which would count this peak for the next log point too
        return self._between

    def of_run(self) -> int:
        """Return the peak bytes since the run started in this process."""
        return max(self._before, peak_memory(self._device))

    def _restart(self, peak: int) -> None:
        self._before, self._since_log = max(self._before, peak), max(self._since_log, peak)
        reset_peak(self._device)
