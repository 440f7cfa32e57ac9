"""Charts as SVG: the timeline of one step, and the jobs of a sweep as parallel coordinates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainkit.profiling import KINDS, Timeline, TimelineFigure, TimelineSpan
from trainkit.report.html import SafeHtml, element, number, seconds, share, short, size, ticks

_ROW = 24
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
_HEIGHT = 280
_STEPS_OF_COLOUR = 5


def timeline_figure(timeline: Timeline) -> SafeHtml:
    """Return the chart of a timeline, with its legend."""
    step = "" if timeline.step is None else f", step {timeline.step:,}"
    caption = element(
        "figcaption",
        element("span", f"{timeline.title}{step}", class_="chart-title"),
        _legend(timeline),
    )
    return element("figure", caption, _picture(timeline), class_="chart wide")


def timeline_figures(timeline: Timeline) -> SafeHtml:
    """Return the figures and the advice of a timeline."""
    items = [
        element("div", element("dt", figure.name), element("dd", _value(figure), _note(figure)))
        for figure in timeline.figures
    ]
    advice = [element("li", sentence) for sentence in timeline.advice]
    return element(
        "div",
        element("dl", *items, class_="figures") if items else None,
        element("ul", *advice, class_="advice") if advice else None,
    )


def _legend(timeline: Timeline) -> SafeHtml:
    present = {span.kind for track in timeline.tracks for span in track.spans}
    items = [element("li", element("i", class_=f"swatch {kind}"), _NAMES[kind]) for kind in KINDS if kind in present]
    return element("ul", *items, class_="legend")


def _picture(timeline: Timeline) -> SafeHtml:
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
        yield element(
            "rect",
            element("title", tooltip),
            x=f"{100 * left:.3f}%",
            y=top,
            width=f"{max(100 * width, 0.08):.3f}%",
            height=_BAR,
            rx=2,
            class_=f"bar {kind}",
        )
        if span.label and width >= _LETTER_SHARE * len(span.label):
            middle = f"{100 * (left + width / 2):.3f}%"
            yield element("text", span.label, x=middle, y=top + _BAR / 2, dy="0.34em", class_=f"on-bar {kind}")


def _value(figure: TimelineFigure) -> str:
    return _SHOW.get(figure.unit, number)(figure.value)


def _note(figure: TimelineFigure) -> SafeHtml | None:
    return element("span", figure.note, class_="muted") if figure.note else None


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    number: int
    values: dict[str, str]
    """The value typed for each key."""
    metrics: dict[str, float]
    error: str | None
    report: str | None
    """Path of its report, relative to the sweep's folder."""


def parallel_coordinates(
    jobs: Sequence[Job], keys: Sequence[str], *, goal: str, value: Callable[[Job], float], mode: str
) -> SafeHtml:
    """Return a chart with an axis for each key and one for the goal; `jobs` are sorted, the best first."""
    by_number = sorted(jobs, key=lambda job: job.number)
    axes = [_axis(key, {job.number: job.values.get(key, "-") for job in by_number}) for key in keys]
    axes.append(_number_axis(goal, {job.number: value(job) for job in jobs}, mode=mode))
    last = max(len(axes) - 1, 1)
    parts: list[SafeHtml] = []
    lines: list[SafeHtml] = []
    for place, job in reversed(list(enumerate(jobs))):  # the best is drawn last
        colour = _colour(place, len(jobs))
        points = " ".join(
            f"{10_000 * i / last:.0f},{10_000 * (1 - axis.at[job.number]):.0f}" for i, axis in enumerate(axes)
        )
        typed = ", ".join(f"{key}={job.values.get(key)}" for key in keys)
        tooltip = f"job {job.number}: {typed}: {number(value(job))}"
        lines.append(
            element("polyline", element("title", tooltip), points=points, class_="run", style=f"stroke:{colour}")
        )
    for index, axis in enumerate(axes):
        across = f"{100 * index / last:.2f}%"
        parts.append(element("line", x1=across, x2=across, y1=0, y2=_HEIGHT, class_="axis"))
        parts.append(element("text", axis.name, x=across, y=-16, text_anchor=_anchor(index, last)))
        right = index == last
        for text, height in axis.places.items():
            down = f"{(1 - height) * _HEIGHT:.1f}"
            parts.append(
                element(
                    "text",
                    text,
                    x=across,
                    dx=8 if right else -8,
                    y=down,
                    dy="0.32em",
                    text_anchor="start" if right else "end",
                )
            )
    stretched = element(
        "svg",
        *lines,
        viewBox="0 0 10000 10000",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
        class_="stretched",
    )
    frame = element("svg", stretched, *parts, width="100%", height=_HEIGHT, class_="frame")
    return element("figure", element("div", frame, class_="plot parallel"), class_="chart wide")


@dataclass(frozen=True)
class _Axis:
    """A vertical axis with the position of each value, from 0 (bottom) to 1 (top)."""

    name: str
    places: dict[str, float]
    """Positions of the labels."""
    at: dict[int, float]
    """Positions of the jobs, by number."""


def _anchor(index: int, last: int) -> str:
    return "start" if index == 0 else "end" if index == last else "middle"


def _axis(name: str, texts: dict[int, str]) -> _Axis:
    """Return an evenly spaced axis, sorted if all values are numbers, else in order of first use."""
    distinct = list(dict.fromkeys(texts.values()))
    with suppress(ValueError):
        distinct.sort(key=float)
    span = max(len(distinct) - 1, 1)
    places = {text: index / span if len(distinct) > 1 else 0.5 for index, text in enumerate(distinct)}
    return _Axis(
        name, places if len(places) <= 12 else _some(places), {job: places[text] for job, text in texts.items()}
    )


def _some(places: dict[str, float]) -> dict[str, float]:
    every = -(-len(places) // 10)
    return {text: place for index, (text, place) in enumerate(places.items()) if index % every == 0}


def _number_axis(name: str, values: dict[int, float], *, mode: str) -> _Axis:
    """Return the axis of a metric with the best value at the top."""
    low, high = min(values.values()), max(values.values())

    def place(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return 1 - share if mode == "min" else share

    marks = [low + (high - low) * share for share in (0, 0.25, 0.5, 0.75, 1)] if high > low else [low]
    return _Axis(
        name, {short(float(f"{mark:.3g}")): place(mark) for mark in marks}, {job: place(v) for job, v in values.items()}
    )


def _colour(place: int, count: int) -> str:
    """Return the colour of a job, from that of the best to that of the worst."""
    share = place / max(count - 1, 1)
    part = round(100 * (1 - share) / _STEPS_OF_COLOUR) * _STEPS_OF_COLOUR
    return f"color-mix(in oklab, var(--c2) {part}%, var(--c1))"
