"""What each stage of a pipeline did when, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from .schedules import FORWARD, Span, idle_share

ROW_PIXELS, WIDTH_PIXELS, LEFT_PIXELS, TOP_PIXELS = 26, 900, 70, 24
_COLOURS = {FORWARD: "#4c8bf5", "B": "#f5a04c"}


def timeline_picture(spans: Sequence[Sequence[Span]], *, expected: float) -> str:
    """Return an SVG picture of one window: a row for each rank, forwards blue, backwards orange, idle time white.

    `spans` has seconds; `expected` is the idle share of the schedule with equal stages, written beside the measured.
    """
    length = max((span.end for row in spans for span in row), default=0.0) or 1.0
    height = TOP_PIXELS + ROW_PIXELS * len(spans) + 6
    title = f"{length * 1e3:.1f} ms, idle {idle_share(spans):.1%} (equal stages: {expected:.1%})"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT_PIXELS + WIDTH_PIXELS + 10}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT_PIXELS}" y="15">{title}</text>',
    ]
    scale = WIDTH_PIXELS / length
    for rank, row in enumerate(spans):
        top = TOP_PIXELS + rank * ROW_PIXELS
        lines.append(f'<text x="4" y="{top + 16}">rank {rank}</text>')
        for span in row:
            left, width = LEFT_PIXELS + span.start * scale, max((span.end - span.start) * scale, 0.5)
            lines.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW_PIXELS - 4}" '
                f'fill="{_COLOURS[span.action.kind]}" stroke="white"><title>{span.action}</title></rect>'
            )
            if width > 14:
                lines.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 15}" text-anchor="middle" fill="white">'
                    f"{span.action.micro_batch}</text>"
                )
    return "\n".join([*lines, "</svg>"])
