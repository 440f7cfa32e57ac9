"""Line charts as SVG, inside a report or as a separate file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainkit.report.html import SafeHtml, element, join_html, number, short, ticks
from trainkit.report.record import Curve, averaged, base_names, downsample

MOST_POINTS = 1200  # of a line, as it is drawn
_HEIGHT = 200
_GRID = 10_000  # units of the stretched part, across and down
_LOG_FROM = 20.0  # charts whose values differ by this factor get a switch to a logarithmic scale
_COLOURS = 8
_FILE_WIDTH, _FILE_HEIGHT, _MARGIN = 640, 400, 56
MOST_CHARTS = 60
_STAGE_COLOURS = {"train": 0, "validation": 1, "test": 2}
_NOT_DRAWN = ("train/epoch",)


@dataclass(frozen=True)
class Series:
    """A curve with its name in the legend."""

    name: str
    curve: Curve
    colour: int = 0


Format = Callable[[float], str]


def chart(title: str, series: Sequence[Series], *, x_name: str = "step", show: Format = number) -> SafeHtml:
    """Return a figure with all series; with widely differing values also a plot with a logarithmic axis."""
    known = [item for item in series if any(math.isfinite(value) for value in item.curve.values)]
    nonfinite = [item for item in series if item not in known and item.curve.values]
    if not known:
        return _empty(title, nonfinite)
    plots = [_plot(known, x_name=x_name, show=show, logarithmic=False)]
    switch: SafeHtml | None = None
    if _spans_powers(known):
        plots.append(_plot(known, x_name=x_name, show=show, logarithmic=True))
        switch = element(
            "label", element("input", type="checkbox", class_="log-switch"), "log", class_="switch", title="log scale"
        )
    caption = element("figcaption", element("span", title, class_="chart-title"), switch, _legend(series, show))
    return element("figure", caption, *plots, class_="chart")


def _empty(title: str, nonfinite: Sequence[Series]) -> SafeHtml:
    names = ", ".join(item.name for item in nonfinite)
    caption = element("figcaption", element("span", title, class_="chart-title"))
    return element("figure", caption, element("p", f"{names}: no finite value", class_="muted"), class_="chart")


def _legend(series: Sequence[Series], show: Format) -> SafeHtml:
    items = [
        element(
            "li",
            element("i", class_=f"swatch c{item.colour % _COLOURS}"),
            item.name,
            " ",
            element("b", show(item.curve.last)),
        )
        for item in series
        if item.curve.values
    ]
    return element("ul", *items, class_="legend")


@dataclass(frozen=True)
class _Axes:
    """Positions of steps and values in the plot."""

    left: float
    right: float
    bottom: float
    top: float
    logarithmic: bool

    @classmethod
    def around(cls, curves: Sequence[Curve], *, logarithmic: bool) -> _Axes:
        steps = [step for curve in curves for step in (curve.steps[0], curve.steps[-1])]
        values = [value for curve in curves for value in curve.values if math.isfinite(value)]
        low, high = min(values), max(values)
        if logarithmic:
            low, high = math.log10(low), math.log10(high)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        bottom = 0.0 if not logarithmic and (0 <= low <= 0.3 * high or low == high > 0) else low - margin
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
        powers = range(math.ceil(self.bottom - 1e-9), math.floor(self.top + 1e-9) + 1)
        factors = (1,) if len(powers) > 2 else (1, 2, 5)
        wider = range(math.floor(self.bottom), math.floor(self.top) + 1)
        values = [factor * 10.0**power for power in wider for factor in factors]
        return [value for value in values if self.bottom <= math.log10(value) <= self.top]


def _plot(series: Sequence[Series], *, x_name: str, show: Format, logarithmic: bool) -> SafeHtml:
    thin = [downsample(item.curve, most=MOST_POINTS) for item in series]
    axes = _Axes.around(thin, logarithmic=logarithmic)
    lines: list[SafeHtml] = []
    pointed: list[dict[str, object]] = []
    for item, fine in zip(series, thin, strict=True):
        colour = f"line c{item.colour % _COLOURS}"
        coarse = averaged(item.curve, most=MOST_POINTS // 4)
        if coarse is not None:
            lines += _lines(fine, axes, class_=f"{colour} faint")
            lines += _lines(coarse, axes, class_=colour)
        else:
            lines += _lines(fine, axes, class_=colour)
        shown = coarse or fine
        pointed.append(
            {
                "name": item.name,
                "colour": item.colour % _COLOURS,
                "x": shown.steps,
                "y": [show(value) for value in shown.values],
                "t": [round(axes.down(value), 4) if math.isfinite(value) else None for value in shown.values],
            }
        )
    stretched = element(
        "svg",
        *lines,
        viewBox=f"0 0 {_GRID} {_GRID}",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
        class_="stretched",
    )
    frame = element("svg", *_grid(axes, x_name=x_name), stretched, width="100%", height=_HEIGHT, class_="frame")
    content = json.dumps({"left": axes.left, "right": axes.right, "x": x_name, "series": pointed}, allow_nan=False)
    data = element("script", SafeHtml(content.replace("<", "\\u003c")), type="application/json")
    return element("div", frame, data, class_="plot logarithmic" if logarithmic else "plot linear")


def _grid(axes: _Axes, *, x_name: str) -> list[SafeHtml]:
    parts = []
    for value in axes.value_ticks():
        height = f"{axes.down(value) * _HEIGHT:.1f}"
        parts.append(element("line", x1="0", x2="100%", y1=height, y2=height, class_="grid"))
        parts.append(element("text", short(value), x="-8", y=height, dy="0.32em", text_anchor="end"))
    marks = [step for step in ticks(axes.left, axes.right, count=5) if step == int(step)]
    for index, step in enumerate(marks):
        text = f"{short(step)} {x_name}" if index == len(marks) - 1 else short(step)
        across = axes.across(step)
        anchor = "start" if across < 0.04 else "end" if across > 0.9 else "middle"
        parts.append(element("text", text, x=f"{100 * across:.2f}%", y=_HEIGHT + 18, text_anchor=anchor))
    return parts


def _lines(curve: Curve, axes: _Axes, *, class_: str) -> list[SafeHtml]:
    """Return a line for each run of finite values, and a mark at the bottom for each other value."""
    parts: list[SafeHtml] = []
    points: list[str] = []
    for step, value in zip(curve.steps, curve.values, strict=True):
        across = round(axes.across(step) * _GRID)
        if math.isfinite(value) and not (axes.logarithmic and value <= 0):
            points.append(f"{across},{round(axes.down(value) * _GRID)}")
            continue
        parts += _line(points, class_=class_)
        points = []
        parts.append(element("line", x1=across, x2=across, y1=_GRID - 700, y2=_GRID, class_="line not-finite"))
    return [*parts, *_line(points, class_=class_)]


def _line(points: Sequence[str], *, class_: str) -> list[SafeHtml]:
    if not points:
        return []
    # A line of one point is drawn as a dot by its round ends.
    joined_points = " ".join(points if len(points) > 1 else [points[0], points[0]])
    return [element("polyline", points=joined_points, class_=class_ if len(points) > 1 else f"{class_} dot")]


def _spans_powers(series: Iterable[Series]) -> bool:
    values = [value for item in series for value in filter(math.isfinite, item.curve.values)]
    return min(values) > 0 and max(values) >= _LOG_FROM * min(values)


def chart_grid(charts: Sequence[SafeHtml]) -> SafeHtml:
    """Return charts in a grid."""
    return element("div", join_html(*charts), class_="charts")


def curve_charts(runs: Mapping[str, Mapping[str, Curve]], *, kinds: tuple[str, ...]) -> list[SafeHtml]:
    """Return a chart for each metric of these kinds, with all stages of one run, or with all runs."""
    names = dict.fromkeys(name for curves in runs.values() for name in curves)
    wanted = [name for name in sorted(names, key=_order) if kind_of(name) in kinds]
    charts = []
    groups = base_names(wanted) if len(runs) == 1 else {name: [name] for name in wanted}
    for base, members in groups.items():
        series = []
        for number_of_run, (run, curves) in enumerate(runs.items()):
            for place, name in enumerate(members):
                if name in curves:
                    colour = number_of_run if len(runs) > 1 else _colour(name, members, place)
                    series.append(Series(run or _legend_name(name, members), curves[name], colour))
        charts.append(chart(base, series))
    return charts[:MOST_CHARTS]


def _colour(name: str, members: list[str], place: int) -> int:
    stages = [member.partition("/")[0] for member in members]
    return _STAGE_COLOURS.get(name.partition("/")[0], place) if len(set(stages)) == len(stages) else place


def _legend_name(name: str, members: list[str]) -> str:
    """Return a metric's name in the legend: its stage, or else its last part."""
    stages = {member.partition("/")[0] for member in members}
    return name.partition("/")[0] if len(stages) == len(members) else name.rpartition("/")[2]


def kind_of(name: str) -> str:
    """Return the section that a metric belongs to: `learning`, `optimization`, `speed`, `memory`, or none (empty)."""
    base = name.rpartition("/")[2]
    if name in _NOT_DRAWN:
        return ""
    if base.endswith(("_per_second", "_wait_fraction")) or base == "mfu" or name.startswith("time/"):
        return "speed"
    if "memory" in name or base.endswith(("_bytes", "_mib", "_gib", "_mb", "_gb")):
        return "memory"
    if base.startswith("learning_rate") or "/learning_rate" in name or "gradient" in name or base == "skipped_steps":
        return "optimization"
    return "learning"


def _order(name: str) -> tuple[int, int, str]:
    base = name.rpartition("/")[2]
    return ("learning", "optimization", "speed", "memory", "").index(kind_of(name)), base != "loss", base


def line_chart(
    across: Sequence[float], up: Sequence[float], *, marked: float | None, titles: tuple[str, str, str]
) -> str:
    """Return an SVG file with a line over a logarithmic axis and a vertical mark at `marked`.

    `titles` are those of the chart, of its x axis and of its y axis. Points that are not finite are not drawn.
    """
    points = [(math.log10(x), y) for x, y in zip(across, up, strict=True) if math.isfinite(y) and x > 0] or [(0.0, 0.0)]
    left, right = min(power for power, _ in points), max(power for power, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    width, height = _FILE_WIDTH - 2 * _MARGIN, _FILE_HEIGHT - 2 * _MARGIN

    def column(power: float) -> float:
        return _MARGIN + (power - left) / (right - left or 1) * width

    def row(value: float) -> float:
        return _MARGIN + (1 - (value - low) / (high - low or 1)) * height

    def text(x: float, y: float, words: str, anchor: str = "middle") -> SafeHtml:
        return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)

    line = " ".join(f"{column(power):.1f},{row(value):.1f}" for power, value in points)
    parts = [element("polyline", points=line, fill="none", stroke="#2563eb", stroke_width=2)]
    powers = range(math.ceil(left), math.floor(right) + 1)
    parts += [text(column(power), _FILE_HEIGHT - _MARGIN + 18, f"1e{power}") for power in powers]
    parts += [text(_MARGIN - 6, row(value) + 4, f"{value:.4g}", "end") for value in (low, (low + high) / 2, high)]
    if marked is not None:
        x = f"{column(math.log10(marked)):.1f}"
        top, bottom = _MARGIN, _FILE_HEIGHT - _MARGIN
        parts.append(element("line", x1=x, x2=x, y1=top, y2=bottom, stroke="#dc2626", stroke_dasharray="4 3"))
        parts.append(text(float(x), _MARGIN - 6, f"{marked:.3g}"))
    title, horizontal, vertical = titles
    parts.append(text(_FILE_WIDTH / 2, 20, title))
    parts.append(text(_FILE_WIDTH / 2, _FILE_HEIGHT - 10, horizontal))
    parts.append(text(8, _MARGIN - 20, vertical, "start"))
    frame = f'width="{_FILE_WIDTH}" height="{_FILE_HEIGHT}" viewBox="0 0 {_FILE_WIDTH} {_FILE_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" style="background:white"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {style}>\n{join_html(*parts)}\n</svg>\n'
