"""Tables and messages on standard output, with colours on a terminal, and log records on standard error.

Control characters in texts of others (names of metrics, messages of exceptions) are shown as escapes: a terminal would
obey them.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_ANY_WIDTH = 10_000  # columns: lines are not wrapped
# The last two ranges turn text around: a name could show another command than the one that it holds.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # not newline and tab


@dataclass
class Table:
    """Rows of text under headings; the first column is aligned left, the others right."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    highlighted: set[int] = field(default_factory=set)
    """Rows that stand out on a terminal."""


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def printable(text: str) -> str:
    """Return `text` with control characters, except newlines and tabs, as escapes."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def log_to_stderr() -> None:
    """Write the log records of this process to standard error, unless a handler is set."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def on_terminal() -> bool:
    """Return True if standard output is a terminal that a live display can be drawn on."""
    return bool(sys.stdout) and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def in_notebook() -> bool:
    """Return True in the kernel of a notebook, whose output is not a terminal, but can rewrite its last line."""
    # Not imported: outside of a notebook that would take time, and say nothing.
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def say(text: str) -> None:
    """Write one or several lines."""
    with suppress(BrokenPipeError):  # the reader is gone (`| head`), which must not end the run
        print(printable(text), flush=True)


def show(table: Table) -> None:
    """Write a table, with colours on a terminal."""
    if on_terminal():
        from trainkit.rng import SavedGenerators  # here, as `--help` does not wait for torch

        with SavedGenerators():  # `rich` draws from python's generator when it is imported
            terminal().print(f"\n{printable(table.title)}", style="bold", markup=False)
            terminal().print(_drawn(table))
    else:
        say(plain(table))


def terminal() -> Any:
    """Return a `rich` console on standard output, which is a terminal."""
    from rich.console import Console

    return Console(force_terminal=True, highlight=False)


def plain(table: Table) -> str:
    """Return a table as lines without control characters, of any width."""
    from trainkit.rng import SavedGenerators

    text = StringIO()
    with SavedGenerators():
        from rich.console import Console

        console = Console(file=text, width=_ANY_WIDTH, color_system=None, highlight=False, force_jupyter=False)
        console.print(_drawn(table))
    return "\n".join([printable(table.title), *(line.rstrip() for line in text.getvalue().splitlines())])


def number(value: float) -> str:
    """Return a number for people: `12,345`, `0.01235`, `1.2e-05`."""
    if isinstance(value, int) or (value == value // 1 and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def size(num_bytes: float) -> str:
    """Return a number of bytes as `12.3 MiB`."""
    for unit in _SIZES[:-1]:
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_SIZES[-1]}"


def seconds(value: float) -> str:
    """Return a duration as `12.3 ms`, `1.25 s` or `1:02:03`."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    return clock(value) if value >= 3599.5 else f"{clock(value)} min"


def clock(seconds: float) -> str:
    """Return a time as `1:02:03`, or `0:05` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _drawn(table: Table) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    drawing = RichTable(box=None, padding=(0, 0, 0, 2))
    for index, column in enumerate(table.columns):
        drawing.add_column(printable(column), justify="right" if index else "left", overflow="fold")
    for index, row in enumerate(table.rows):
        # Text: brackets in a name are not markup.
        texts = [Text(printable(cell)) for cell in row]
        drawing.add_row(*texts, style="bold green" if index in table.highlighted else None)
    return drawing
