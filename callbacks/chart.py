"""A small chart as SVG, for what was tried before a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 640, 400, 56


def chart(across: Sequence[float], up: Sequence[float], *, marked: float | None, titles: tuple[str, str, str]) -> str:
    """Return a line over a logarithmic axis, with a vertical mark; `titles` are those of the chart and its axes.

    Points that are not finite are left out.
    """
    points = [(x, y) for x, y in zip(across, up, strict=True) if math.isfinite(y) and x > 0]
    shown = points or [(1.0, 0.0)]
    left, right = math.log10(min(x for x, _ in shown)), math.log10(max(x for x, _ in shown))
    low, high = min(y for _, y in shown), max(y for _, y in shown)

    def place(x: float, y: float) -> tuple[float, float]:
        part = (math.log10(x) - left) / (right - left or 1)
        height = (y - low) / (high - low or 1)
        return _MARGIN + part * (_WIDTH - 2 * _MARGIN), _HEIGHT - _MARGIN - height * (_HEIGHT - 2 * _MARGIN)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    parts = [f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/>']
    for exponent in range(math.ceil(left), math.floor(right) + 1):
        x, _ = place(10.0**exponent, low)
        parts.append(_text(x, _HEIGHT - _MARGIN + 18, f"1e{exponent}", anchor="middle"))
    for value in (low, (low + high) / 2, high):
        parts.append(_text(_MARGIN - 6, place(10.0**left, value)[1] + 4, f"{value:.4g}", anchor="end"))
    if marked is not None:
        x, _ = place(marked, low)
        bounds = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_MARGIN}" y2="{_HEIGHT - _MARGIN}"'
        parts.append(f'<line {bounds} stroke="#dc2626" stroke-dasharray="4 3"/>')
        parts.append(_text(x, _MARGIN - 6, f"{marked:.3g}", anchor="middle"))
    title, horizontal, vertical = titles
    parts.append(_text(_WIDTH / 2, 20, title, anchor="middle"))
    parts.append(_text(_WIDTH / 2, _HEIGHT - 10, horizontal, anchor="middle"))
    parts.append(_text(8, _MARGIN - 20, vertical, anchor="start"))
    frame = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" style="background:white"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, words: str, *, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
