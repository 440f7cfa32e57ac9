"""The timeline of one step as a picture: a row for each lane, a bar for each span."""

from __future__ import annotations

from collections.abc import Iterable

from trainkit.report.markup import Markup, element
from trainkit.report.numbers import number, seconds, share, size, ticks
from trainkit.timeline import KINDS, Figure, Timeline, TimelineSpan

_ROW = 24
_BAR = 18
_TOP = 22
_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "communication": "under way between ranks",
    "blocked": "ready, waits to be started",
    "wait": "waits for others",
    "optimizer": "optimizer",
}
_LETTER_SHARE = 0.014  # of the width; a narrower bar has no room for a letter
_SHOW = {"share": share, "seconds": seconds, "bytes": size, "count": number}


def timeline_figure(timeline: Timeline) -> Markup:
    """Return the picture with its legend, its figures and its advice."""
    step = "" if timeline.step is None else f", step {timeline.step:,}"
    caption = element(
        "figcaption",
        element("span", f"{timeline.title}{step}", class_="chart-title"),
        _legend(timeline),
    )
    return element("figure", caption, _picture(timeline), class_="chart wide")


def timeline_figures(timeline: Timeline) -> Markup:
    """Return the numbers that sum a timeline up, and what could be changed."""
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


def _legend(timeline: Timeline) -> Markup:
    present = {span.kind for lane in timeline.lanes for span in lane.spans}
    items = [element("li", element("i", class_=f"swatch {kind}"), _NAMES[kind]) for kind in KINDS if kind in present]
    return element("ul", *items, class_="legend")


def _picture(timeline: Timeline) -> Markup:
    length = max(timeline.end - timeline.start, 1e-9)
    parts: list[Markup] = []
    height = _TOP + _ROW * len(timeline.lanes)
    for moment in ticks(0.0, length, count=6):
        across = f"{100 * moment / length:.2f}%"
        anchor = "start" if moment == 0 else "end" if moment > 0.95 * length else "middle"
        parts.append(element("line", x1=across, x2=across, y1=_TOP - 4, y2=height, class_="grid"))
        parts.append(element("text", seconds(moment) if moment else "0", x=across, y=12, text_anchor=anchor))
    for row, lane in enumerate(timeline.lanes):
        top = _TOP + row * _ROW
        parts.append(element("text", lane.name, x="-8", y=top + _BAR / 2, dy="0.32em", text_anchor="end"))
        parts += _bars(lane.spans, first=timeline.start, length=length, top=top)
    frame = element("svg", *parts, width="100%", height=height + 2, class_="frame")
    return element("div", frame, class_="plot gantt")


def _bars(spans: Iterable[TimelineSpan], *, first: float, length: float, top: float) -> Iterable[Markup]:
    for span in spans:
        left, width = (span.start - first) / length, max(span.end - span.start, 0.0) / length
        kind = span.kind if span.kind in KINDS else "wait"
        told = f"{span.name or _NAMES[kind]}: {seconds(span.end - span.start)}, from {seconds(span.start - first)}"
        yield element(
            "rect",
            element("title", told),
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


def _value(figure: Figure) -> str:
    return _SHOW.get(figure.unit, number)(figure.value)


def _note(figure: Figure) -> Markup | None:
    return element("span", figure.note, class_="muted") if figure.note else None
