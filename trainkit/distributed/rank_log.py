"""`rank_<k>.log` in the run's folder: what each rank prints, and the traceback that it ends with.

    rank 0     terminal <── what it prints ──> rank_0.log     the caller's terminal is its own; the log gets a copy
    rank k                  what it prints ──> rank_k.log

    torchrun   terminal <── what it prints ──> rank_k.log     who has started the ranks expects their output

A display that is drawn again and again on the terminal is in the log once, as it was when other text came.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from trainkit.errors import Stopped, UserError

MAX_OPEN_ROWS = 12  # which a display may still change; earlier ones are written
_TOKENS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\n)|(\r)|([^\x1b\n\r]+)|\x1b")


def keep_log(folder: Path, *, rank: int) -> LogPage:
    """Write to the rank's log what it prints from now on, on rank 0 as well as to the terminal; return the log."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{rank}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    if rank == 0:
        page = LogPage(path)
        sys.stdout, sys.stderr = _TeeStream(sys.stdout, page), _TeeStream(sys.stderr, page)
        return page
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)  # also what is printed by libraries written in C
    os.dup2(fd, 2)
    os.close(fd)
    return LogPage(path)


@contextmanager
def log_copied(folder: Path, *, rank: int) -> Iterator[None]:
    """Enter with a log that gets a copy of what this process prints, and the traceback that ends it.

    Without a log where the folder cannot be written to: whoever needs it says so.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{rank}.log").open("a").close()
    except OSError:
        yield
        return
    page = LogPage(folder / f"rank_{rank}.log")
    with _copied_to(page):
        try:
            yield
        except BaseException as error:
            page.write(last_words(error))
            raise
        finally:
            page.close()


def last_words(error: BaseException) -> str:
    """Return what a log ends with: the traceback, or of an error that explains itself the message."""
    explains_itself = isinstance(error, UserError | Stopped)
    return "".join((traceback.format_exception_only if explains_itself else traceback.format_exception)(error))


class LogPage:
    """A file that holds the lines which a terminal would show in the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows, self._row, self._column = [""], 0, 0
        self._is_drawn_on = False  # by a display, which hides the cursor meanwhile

    def write(self, text: str) -> None:
        """Do with the rows what a terminal does with `text`, and write those that stay as they are."""
        for arguments, command, newline, carriage_return, plain in _TOKENS.findall(text):
            if plain:
                self._put(plain)
            elif newline:
                self._row, self._column = self._row + 1, 0
                if self._row == len(self._rows):
                    self._rows.append("")
            elif carriage_return:
                self._column = 0
            elif command == "A":
                self._row = max(0, self._row - int(arguments or 1))
            elif command in ("h", "l") and arguments == "?25":
                self._is_drawn_on = command == "l"
            elif command == "K":
                self._rows[self._row] = "" if arguments == "2" else self._rows[self._row][: self._column]
        while len(self._rows) > self._row + 1 and not self._rows[-1]:
            self._rows.pop()
        is_ended = self._row == len(self._rows) - 1 and not self._rows[-1] and not self._is_drawn_on
        self._write_rows(len(self._rows) - 1 if is_ended else len(self._rows) - MAX_OPEN_ROWS)

    def close(self) -> None:
        """Write the rows that are still open; may be called twice."""
        if self._rows[-1]:
            self._rows.append("")
        self._write_rows(len(self._rows) - 1)

    def _put(self, text: str) -> None:
        row = self._rows[self._row]
        self._rows[self._row] = row[: self._column].ljust(self._column) + text + row[self._column + len(text) :]
        self._column += len(text)

    def _write_rows(self, count: int) -> None:
        if count <= 0:
            return
        with self.path.open("a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{row.rstrip()}\n" for row in self._rows[:count])
        self._rows = self._rows[count:]
        self._row = max(0, self._row - count)


@contextmanager
def _copied_to(page: LogPage) -> Iterator[None]:
    """Enter with streams, those of loggers included, whose text also goes to the page."""
    streams = sys.stdout, sys.stderr
    copies = {id(stream): _TeeStream(stream, page) for stream in streams}
    handlers = [*logging.getLogger().handlers, *logging.getLogger("trainkit").handlers]
    logging_to = [h for h in handlers if isinstance(h, logging.StreamHandler) and id(h.stream) in copies]
    sys.stdout, sys.stderr = (copies[id(stream)] for stream in streams)
    before = [handler.setStream(copies[id(handler.stream)]) for handler in logging_to]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for handler, stream in zip(logging_to, before, strict=True):
            handler.setStream(stream)


class _TeeStream:
    """A stream whose text also goes to a page."""

    def __init__(self, stream: TextIO, page: LogPage) -> None:
        self._stream, self._page = stream, page

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        self._page.write(text)
        return written

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
