"""Line charts, and the timeline of one step, as SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainkit.console import seconds, size
from trainkit.profiling import KINDS, Timeline, TimelineSpan
from trainkit.report.html import (
    SafeHtml,
    element,
    figures,
    join_html,
    number,
    share,
    short,
    ticks,
)
from trainkit.report.record import Curve, averaged, base_names, downsample

MOST_POINTS = 1200  # of a line, as it is drawn
_HEIGHT = 200
_GRID = 10_000  # units of the stretched part, across and down
_LOG_FROM = 20.0  # charts whose values differ by this factor get a switch to a logarithmic scale
_COLOURS = 8  # classes c0 to c7 of page.css
MOST_CHARTS = 60
_STAGE_COLOURS = {"train": 0, "validation": 1, "test": 2}
_ROW = 24  # of a timeline
_BAR = 18
_TOP = 22
_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "communication": "communication",
    "blocked": "ready, not started",
    "wait": "waiting for other ranks",
    "optimizer": "optimizer",
}
_LETTER_SHARE = 0.014  # of the width; a narrower bar has no room for a letter
_SHOW = {"share": share, "seconds": seconds, "bytes": size, "count": number}


@dataclass(frozen=True)
class Series:
    """A curve with its name in the legend."""

    name: str
    curve: Curve
    colour: int = 0


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    from_zero: bool = False,
    marks: Mapping[int, str] | None = None,
) -> SafeHtml:
    """Return a figure with all series; with widely differing values also a plot with a logarithmic axis.

    `from_zero`: the axis begins at 0, for amounts whose growth would look larger than it is. `marks` are texts of
    vertical lines, by step.
    """
    finite_series = [item for item in series if any(math.isfinite(value) for value in item.curve.values)]
    plots, switch = [], None
    if finite_series:
        plots.append(_plot(finite_series, x_name=x_name, logarithmic=False, from_zero=from_zero, marks=marks))
    else:
        plots.append(element("p", f"{', '.join(item.name for item in series)}: no finite value", class_="muted"))
    if finite_series and not from_zero and _spans_powers(finite_series):
        plots.append(_plot(finite_series, x_name=x_name, logarithmic=True, marks=marks))
        box = element("input", type="checkbox", class_="log-switch")
        switch = element("label", box, "log", class_="switch", title="log scale")
    items = []
    for item in series:
        last = element("b", number(item.curve.values[-1])) if item.curve.values else None
        items.append(element("li", element("i", class_=f"swatch c{item.colour % _COLOURS}"), item.name, " ", last))
    heading = element("span", title, class_="chart-title")
    caption = element("figcaption", heading, switch, element("ul", *items, class_="legend"))
    return element("figure", caption, *plots, class_="chart")


@dataclass(frozen=True)
class _Axes:
    """Positions of steps and values in the plot."""

    left: float
    right: float
    bottom: float
    top: float
    logarithmic: bool

    @classmethod
    def around(cls, curves: Sequence[Curve], *, logarithmic: bool, from_zero: bool) -> _Axes:
        steps = [step for curve in curves for step in (curve.steps[0], curve.steps[-1])]
        values = [value for curve in curves for value in curve.values if math.isfinite(value)]
        low, high = min(values), max(values)
        if logarithmic:
            low, high = math.log10(low), math.log10(high)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        is_near_zero = 0 <= low <= 0.3 * high or low == high > 0 or (from_zero and low >= 0)
        bottom = 0.0 if is_near_zero and not logarithmic else low - margin
        return cls(min(steps), max(steps), bottom, high + margin, logarithmic)

    def across(self, step: float) -> float:
        """Return the position of a step as a fraction of the width."""
        return (step - self.left) / (self.right - self.left) if self.right > self.left else 0.5

    def down(self, value: float) -> float:
        """Return the position of a value as a fraction of the height, from the top."""
        value = math.log10(value) if self.logarithmic else value
        return (self.top - value) / (self.top - self.bottom)

    def value_ticks(self) -> list[float]:
        if not self.logarithmic:
            return ticks(self.bottom, self.top, count=4)
        # The small numbers absorb rounding, which would lose a tick at the edge.
        powers = range(math.ceil(self.bottom - 1e-9), math.floor(self.top + 1e-9) + 1)
        factors = (1,) if len(powers) > 2 else (1, 2, 5)
        wider = range(math.floor(self.bottom), math.floor(self.top) + 1)
        values = [factor * 10.0**power for power in wider for factor in factors]
        return [value for value in values if self.bottom <= math.log10(value) <= self.top]


def _plot(
    series: Sequence[Series],
    *,
    x_name: str,
    logarithmic: bool,
    from_zero: bool = False,
    marks: Mapping[int, str] | None = None,
) -> SafeHtml:
    thin = [downsample(item.curve, most=MOST_POINTS) for item in series]
    axes = _Axes.around(thin, logarithmic=logarithmic, from_zero=from_zero)
    lines = _vertical(marks or {}, axes)
    pointed: list[dict[str, object]] = []
    for item, fine in zip(series, thin, strict=True):
        colour = item.colour % _COLOURS
        coarse = averaged(item.curve, most=MOST_POINTS // 4)
        lines += _lines(fine, axes, class_=f"line c{colour}" if coarse is None else f"line c{colour} faint")
        if coarse is not None:
            lines += _lines(coarse, axes, class_=f"line c{colour}")
        shown = coarse or fine
        heights = [round(axes.down(value), 4) if math.isfinite(value) else None for value in shown.values]
        texts = [number(value) for value in shown.values]
        pointed.append({"name": item.name, "colour": colour, "x": shown.steps, "y": texts, "t": heights})
    # Lines are drawn in a stretched picture, so that they fill any width; texts are outside of it and stay upright.
    box = f"0 0 {_GRID} {_GRID}"
    stretched = element("svg", *lines, viewBox=box, preserveAspectRatio="none", class_="stretched")
    frame = element("svg", *_grid(axes, x_name=x_name), stretched, width="100%", height=_HEIGHT, class_="frame")
    # NaN is not JSON: one would stop the script of the page, and all its charts.
    content = json.dumps({"left": axes.left, "right": axes.right, "x": x_name, "series": pointed}, allow_nan=False)
    # A name that contains `</script>` would end the script.
    data = element("script", SafeHtml(content.replace("<", "\\u003c")), type="application/json")
    return element("div", frame, data, class_="plot logarithmic" if logarithmic else "plot linear")


def _grid(axes: _Axes, *, x_name: str) -> list[SafeHtml]:
    parts = []
    for value in axes.value_ticks():
        height = f"{axes.down(value) * _HEIGHT:.1f}"
        parts.append(element("line", x1="0", x2="100%", y1=height, y2=height, class_="grid"))
        parts.append(element("text", short(value), x="-8", y=height, dy="0.32em", text_anchor="end"))
    marks = ticks(axes.left, axes.right, count=5)
    # There is no half step: marks between steps only where the whole axis lies within one.
    marks = [step for step in marks if step == int(step)] or marks
    for index, step in enumerate(marks):
        text = f"{short(step)} {x_name}" if index == len(marks) - 1 else short(step)
        across = axes.across(step)
        anchor = "start" if across < 0.04 else "end" if across > 0.9 else "middle"
        parts.append(element("text", text, x=f"{100 * across:.2f}%", y=_HEIGHT + 18, text_anchor=anchor))
    return parts


def _vertical(marks: Mapping[int, str], axes: _Axes) -> list[SafeHtml]:
    lines = []
    for step, text in marks.items():
        across = round(axes.across(step) * _GRID)
        if 0 <= across <= _GRID:
            title = element("title", text)
            lines.append(element("line", title, x1=across, x2=across, y1=0, y2=_GRID, class_="line mark"))
    return lines


def _lines(curve: Curve, axes: _Axes, *, class_: str) -> list[SafeHtml]:
    """Return a line for each run of finite values, and a mark at the bottom for each other value."""
    runs: list[list[str]] = [[]]
    marks: list[SafeHtml] = []
    for step, value in zip(curve.steps, curve.values, strict=True):
        across = round(axes.across(step) * _GRID)
        if math.isfinite(value):
            runs[-1].append(f"{across},{round(axes.down(value) * _GRID)}")
        else:
            runs.append([])
            marks.append(element("line", x1=across, x2=across, y1=_GRID - 700, y2=_GRID, class_="line not-finite"))
    # A line of one point is drawn as a dot by its round ends.
    dots = [element("polyline", points=f"{run[0]} {run[0]}", class_=f"{class_} dot") for run in runs if len(run) == 1]
    lines = [element("polyline", points=" ".join(run), class_=class_) for run in runs if len(run) > 1]
    return [*lines, *dots, *marks]


def _spans_powers(series: Iterable[Series]) -> bool:
    values = [value for item in series for value in filter(math.isfinite, item.curve.values)]
    return min(values) > 0 and max(values) >= _LOG_FROM * min(values)


def curve_charts(
    runs: Mapping[str, Mapping[str, Curve]], *, kinds: tuple[str, ...], marks: Mapping[int, str] | None = None
) -> list[SafeHtml]:
    """Return a chart for each metric of these kinds, with all stages of one run, or with all runs.

    `marks` are texts of vertical lines, by step.
    """
    names = dict.fromkeys(name for curves in runs.values() for name in curves)
    wanted = [name for name in sorted(names, key=_order) if kind_of_metric(name) in kinds]
    is_comparison = len(runs) > 1
    charts = []
    for base, members in ({name: [name] for name in wanted} if is_comparison else base_names(wanted)).items():
        series = []
        for index, (run, curves) in enumerate(runs.items()):
            for position, name in enumerate(members):
                label, colour = (run, index) if is_comparison else _style(name, members, position)
                if name in curves:
                    series.append(Series(label, _centred(name, curves[name]), colour))
        charts.append(chart(base, series, from_zero=kind_of_metric(members[0]) == "memory", marks=marks))
    return charts[:MOST_CHARTS]


def kind_of_metric(name: str) -> str:
    """Return what a metric is about: `learning`, `optimization`, `speed`, `memory`, or none (empty)."""
    base = name.rpartition("/")[2]
    if name == "train/epoch":
        return ""
    if base.endswith(("_per_second", "_wait_fraction")) or base == "mfu" or name.startswith("time/"):
        return "speed"
    if "memory" in name or base.endswith(("_bytes", "_mib", "_gib", "_mb", "_gb")):
        return "memory"
    if base.startswith("learning_rate") or "/learning_rate" in name or "gradient" in name:
        return "optimization"
    return "optimization" if base in ("grad_norm", "loss_scale", "skipped_steps") else "learning"


def _centred(name: str, curve: Curve) -> Curve:
    """Return the curve of what training steps return at the middle of the steps that each value is the mean of."""
    if not name.startswith("train/") or kind_of_metric(name) != "learning":
        return curve
    # Else training would seem to be behind validation, by half a log interval.
    first, second = (*curve.steps[:2], 2 * curve.steps[0])[:2]
    # A run that was resumed in a new folder begins later than at 0.
    starts = [0 if first <= second - first else first, *curve.steps[:-1]]
    return Curve([(start + step + 1) // 2 for start, step in zip(starts, curve.steps, strict=True)], curve.values)


def _style(name: str, members: Sequence[str], position: int) -> tuple[str, int]:
    """Return a metric's name in the legend and its colour: those of its stage, if each member has its own stage."""
    stage = name.partition("/")[0]
    if len({member.partition("/")[0] for member in members}) == len(members):
        return stage, _STAGE_COLOURS.get(stage, position)
    return name.rpartition("/")[2], position


def _order(name: str) -> tuple[int, int, str]:
    base = name.rpartition("/")[2]
    return ("learning", "optimization", "speed", "memory", "").index(kind_of_metric(name)), base != "loss", base


def timeline_chart(timeline: Timeline) -> SafeHtml:
    """Return the chart of a timeline with its legend, and below it the figures and the advice."""
    step = "" if timeline.step is None else f", step {timeline.step:,}"
    present = {span.kind for track in timeline.tracks for span in track.spans}
    kinds = [element("li", element("i", class_=f"swatch {kind}"), _NAMES[kind]) for kind in KINDS if kind in present]
    title = element("span", f"{timeline.title}{step}", class_="chart-title")
    caption = element("figcaption", title, element("ul", *kinds, class_="legend"))
    values = [(figure.name, _SHOW.get(figure.unit, number)(figure.value), figure.note) for figure in timeline.figures]
    advice = [element("li", sentence) for sentence in timeline.advice]
    return join_html(
        element("figure", caption, _picture(timeline), class_="chart wide"),
        figures(values),
        element("ul", *advice, class_="advice") if advice else None,
    )


def _picture(timeline: Timeline) -> SafeHtml:
    # Not zero, since it divides: a timeline may have no length.
    length = max(timeline.end - timeline.start, 1e-9)
    parts: list[SafeHtml] = []
    height = _TOP + _ROW * len(timeline.tracks)
    for moment in ticks(0.0, length, count=6):
        across = f"{100 * moment / length:.2f}%"
        anchor = "start" if moment == 0 else "end" if moment > 0.95 * length else "middle"
        parts.append(element("line", x1=across, x2=across, y1=_TOP - 4, y2=height, class_="grid"))
        parts.append(element("text", seconds(moment) if moment else "0", x=across, y=12, text_anchor=anchor))
    for row, track in enumerate(timeline.tracks):
        top = _TOP + row * _ROW
        parts.append(element("text", track.name, x="-8", y=top + _BAR / 2, dy="0.32em", text_anchor="end"))
        parts += _bars(track.spans, first=timeline.start, length=length, top=top)
    frame = element("svg", *parts, width="100%", height=height + 2, class_="frame")
    return element("div", frame, class_="plot gantt")


def _bars(spans: Iterable[TimelineSpan], *, first: float, length: float, top: float) -> Iterable[SafeHtml]:
    for span in spans:
        left, width = (span.start - first) / length, max(span.end - span.start, 0.0) / length
        kind = span.kind if span.kind in KINDS else "wait"
        tooltip = f"{span.name or _NAMES[kind]}: {seconds(span.end - span.start)}, from {seconds(span.start - first)}"
        title, box = element("title", tooltip), {"x": f"{100 * left:.3f}%", "width": f"{max(100 * width, 0.08):.3f}%"}
        yield element("rect", title, **box, y=top, height=_BAR, rx=2, class_=f"bar {kind}")
        if span.label and width >= _LETTER_SHARE * len(span.label):
            middle = f"{100 * (left + width / 2):.3f}%"
            yield element("text", span.label, x=middle, y=top + _BAR / 2, dy="0.34em", class_=f"on-bar {kind}")
