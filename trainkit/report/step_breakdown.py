"""Breakdown of a step's time, and the device's throughput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainkit.console import seconds, size
from trainkit.report.charts import Series, chart
from trainkit.report.html import (
    Content,
    SafeHtml,
    element,
    figures,
    join_html,
    number,
    share,
    short,
    table,
)
from trainkit.report.record import Curve


class Part(NamedTuple):
    """Name and colour of a part of a step: the class of its bar, and the number of its line."""

    label: str
    bar: str
    line: int


PARTS = {
    "data": Part("waiting for data", "data", 5),
    "copy": Part("copying to the device", "copy", 7),
    "forward": Part("forward", "forward", 0),
    "backward": Part("backward", "backward", 1),
    "communication": Part("communication that was not hidden", "wait", 6),
    "optimizer": Part("optimizer", "optimizer", 4),
    "rest": Part("other: callbacks, saving, logging", "rest", 3),
}
_SKIPPED = 1  # log points at the start: kernels are chosen and workers started then
_LETTER_SHARE = 0.08
_CALLBACK_SHARE = 0.01  # of the steps' time, above which a callback is named
_MIB = 1024 * 1024


def breakdown(step_times: Sequence[Mapping[str, Any]]) -> SafeHtml | None:
    """Return a bar and a table of the parts of a step; `None` if nothing was measured."""
    # A run with one log point has nothing else to show.
    counted = step_times[_SKIPPED:] or step_times
    steps = sum(int(line["steps"]) for line in counted)
    totals = {
        part: sum(float(line["seconds"].get(part, 0.0)) for line in counted)
        for part in PARTS
        if any(part in line["seconds"] for line in counted)
    }
    total = sum(totals.values())
    if not steps or total <= 0:
        return None
    shares = {part: value / total for part, value in totals.items()}
    bar = [
        element(
            "span",
            PARTS[part].label.split()[0].rstrip(",") if portion > _LETTER_SHARE else None,
            class_=PARTS[part].bar,
            style=f"width:{100 * portion:.2f}%",
            title=f"{PARTS[part].label}: {share(portion)}",
        )
        for part, portion in shares.items()
    ]
    rows: list[list[Content]] = []
    for part, value in totals.items():
        name = join_html(element("i", class_=f"swatch {PARTS[part].bar}"), PARTS[part].label)
        rows.append([name, seconds(value / steps), share(shares[part])])
    # They are the last part: what the slowest callbacks took of it comes below.
    for callback, value in _callback_seconds(counted, totals.get("rest", 0.0)):
        if value >= _CALLBACK_SHARE * total:
            rows.append([f"of it {callback}", seconds(value / steps), share(value / total)])
    rows.append([SafeHtml("<b>a step</b>"), seconds(total / steps), ""])
    return join_html(element("div", *bar, class_="stack"), table(["part of a step", "time", "share"], rows))


def _callback_seconds(step_times: Sequence[Mapping[str, Any]], most: float) -> list[tuple[str, float]]:
    """Return the seconds of each callback, slowest first, which add up to `most` at most."""
    totals: Counter[str] = Counter()
    for line in step_times:
        totals.update(line.get("callbacks", {}))
    # A clock of the host measured them: what a device or other ranks were busy beside is no time of the step.
    scale = min(1.0, most / totals.total()) if totals.total() else 0.0
    return [(name, value * scale) for name, value in totals.most_common()]


def waiting_chart(step_times: Sequence[Mapping[str, Any]]) -> SafeHtml | None:
    """Return the parts of a step over the run."""
    if len(step_times) < 3:
        return None
    series = []
    for part, style in PARTS.items():
        points = [(line["step"], line["seconds"].get(part), line["steps"]) for line in step_times]
        measured = [(step, value / count * 1e3) for step, value, count in points if value is not None and count]
        if measured and max(value for _, value in measured) > 0:
            curve = Curve([step for step, _ in measured], [value for _, value in measured])
            series.append(Series(style.label, curve, style.line))
    return chart("milliseconds of a step", series) if series else None


def memory_series(step_times: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Return the memory of the process and of its device over the run, in MiB."""
    series = []
    for colour, (key, name) in enumerate((("host", "process"), ("device", "device, peak between logs"))):
        points = [(line["step"], line.get("memory", {}).get(key)) for line in step_times]
        measured = [(step, float(value) / _MIB) for step, value in points if value is not None]
        if measured:
            series.append(Series(name, Curve([step for step, _ in measured], [value for _, value in measured]), colour))
    return series


def profile_part(profile: Mapping[str, Any]) -> SafeHtml | None:
    """Return the results of the profiler: FLOPs, MFU, overlap, and the slowest operations."""
    if not profile:
        return None
    values = [
        ("FLOPs of a step", _flops(profile.get("flops_per_step")), "operations, counted once"),
        ("achieved", _flops(profile.get("flops_per_second"), "FLOP/s"), "over all devices"),
        ("MFU", share(profile["mfu"]) if profile.get("mfu") is not None else "", str(profile.get("peak_note", ""))),
        ("communication", *_overlap(profile.get("overlap") or {})),
        ("peak of operations' memory", size(profile["peak_bytes"]) if profile.get("peak_bytes") else "", ""),
    ]
    first, last = profile.get("first_step"), profile.get("last_step")
    rows = [
        [row["name"], number(row["calls"]), seconds(row["self_seconds"]), share(row["share"])]
        for row in profile.get("operations", [])
    ]
    operations = None
    if rows:
        clock = "the device's" if profile.get("on_device") else "the CPU's"
        operations = join_html(
            element("h3", f"Operations of steps {first} to {last}, by {clock} own time"),
            table(["operation", "calls", "own time", "share"], rows),
        )
    return join_html(figures(values), operations)


def _overlap(overlap: Mapping[str, Any]) -> tuple[str, str]:
    """Return the fraction of communication that was hidden, and a line with details."""
    hidden, line = overlap.get("hidden_share"), str(overlap.get("line", "")).removeprefix("overlap: ")
    if hidden is None:
        return ("none" if overlap.get("communication_seconds") == 0 else "see note") if line else "", line
    return f"{share(hidden)} hidden", line


def _flops(value: Any, unit: str = "FLOP") -> str:
    if not isinstance(value, int | float) or value <= 0:
        return ""
    text = short(float(f"{value:.3g}"))
    # The letter of the power belongs to the unit: `1.2 TFLOP`.
    digits = text.rstrip("kMGTP")
    return f"{digits} {text.removeprefix(digits)}{unit}"
