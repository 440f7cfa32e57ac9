"""The timeline of one step as SVG, with its figures and advice."""

from __future__ import annotations

from collections.abc import Iterable

from trainkit.profiling import KINDS, Timeline, TimelineSpan
from trainkit.report.html import SafeHtml, element, figures, join_html, number, seconds, share, size, ticks

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
        title, place = element("title", tooltip), {"x": f"{100 * left:.3f}%", "width": f"{max(100 * width, 0.08):.3f}%"}
        yield element("rect", title, **place, y=top, height=_BAR, rx=2, class_=f"bar {kind}")
        if span.label and width >= _LETTER_SHARE * len(span.label):
            middle = f"{100 * (left + width / 2):.3f}%"
            yield element("text", span.label, x=middle, y=top + _BAR / 2, dy="0.34em", class_=f"on-bar {kind}")
