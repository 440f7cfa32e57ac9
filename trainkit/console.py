"""What a run tells its user on standard output: aligned text, with colours where it is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """Rows of text under headings; the first column is aligned left, the others as numbers are."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    highlighted: set[int] = field(default_factory=set)
    """Rows that stand out on a terminal."""


def on_terminal() -> bool:
    """Return whether standard output is a terminal that a display can be drawn on again and again."""
    return bool(sys.stdout) and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def say(text: str) -> None:
    """Write one or several lines."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # whoever read it has gone (`| head`), which is no reason to end hours of training


def show(table: Table) -> None:
    """Write a table."""
    if on_terminal():
        terminal().print(_drawn(table))
    else:
        say(plain(table))


def terminal() -> Any:
    """Return a `rich` console on standard output, which is a terminal."""
    from rich.console import Console

    return Console(force_terminal=True, highlight=False)


def plain(table: Table) -> str:
    """Return a table as lines without any control characters."""
    lines = [table.columns, *table.rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    aligned = [_aligned(cells, widths) for cells in lines]
    return "\n".join([table.title, *(f"  {line}" for line in aligned)])


def number(value: float) -> str:
    """Return a number as a person reads it: `12,345`, `0.01235`, `1.2e-05`."""
    if isinstance(value, int) or (value == value // 1 and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def clock(seconds: float) -> str:
    """Return a time as `1:02:03`, or `0:05` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.ljust(width) if index == 0 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()


def _drawn(table: Table) -> Any:
    from rich import box
    from rich.table import Table as Drawing

    drawing = Drawing(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        drawing.add_column(column, justify="right" if index else "left", overflow="fold")
    for index, row in enumerate(table.rows):
        drawing.add_row(*row, style="bold green" if index in table.highlighted else None)
    return drawing
