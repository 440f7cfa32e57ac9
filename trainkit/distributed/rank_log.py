"""Logs of ranks: the output of each rank, and its final traceback, in `rank_<k>.log` of the run folder.

    rank 0     terminal <── output ──> rank_0.log
    rank k                  output ──> rank_k.log

    torchrun   terminal <── output ──> rank_k.log     any rank that was started by others

A progress display that is redrawn on the terminal is in the log once, in its last state before other text.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from trainkit.errors import Stopped, UserError
from trainkit.files import open_to_append, optional_file

MAX_OPEN_ROWS = 12  # that a display may still change; earlier ones are written
_TOKENS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\n)|(\r)|([^\x1b\n\r]+)|\x1b")


def keep_log(folder: Path, *, rank: int) -> LogPage:
    """Redirect this process's output to the rank's log, on rank 0 in addition to the terminal; return the log."""
    path = folder / f"rank_{rank}.log"
    with optional_file(path):
        folder.mkdir(parents=True, exist_ok=True)
    # What is still in the buffers was printed before, and would end in the log after the redirection.
    sys.stdout.flush()
    sys.stderr.flush()
    if rank == 0:
        page = LogPage(path)
        sys.stdout, sys.stderr = _TeeStream(sys.stdout, page), _TeeStream(sys.stderr, page)
        return page
    with optional_file(path):
        fd = open_to_append(path)
        os.dup2(fd, 1)  # includes the output of libraries written in C
        os.dup2(fd, 2)
        os.close(fd)
    return LogPage(path)


@contextmanager
def log_copied(folder: Path, *, rank: int) -> Iterator[None]:
    """Copy this process's output and log records in the context, and a traceback that ends it, to the rank's log.

    Without effect if the folder is not writable: the writers of other files report that.
    """
    path = folder / f"rank_{rank}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(open_to_append(path))
    except OSError:
        yield
        return
    page, streams = LogPage(path), (sys.stdout, sys.stderr)
    # By id, as a stream need not be hashable. `streams` holds them, so that no id is used a second time.
    tee_of_stream = {id(stream): _TeeStream(stream, page) for stream in streams}
    # A handler keeps the stream that it was made with: replacing sys.stderr does not reach it.
    handlers = [*logging.getLogger().handlers, *logging.getLogger("trainkit").handlers]
    logging_to = [h for h in handlers if isinstance(h, logging.StreamHandler) and id(h.stream) in tee_of_stream]
    sys.stdout, sys.stderr = (tee_of_stream[id(stream)] for stream in streams)
    former_streams = [handler.setStream(tee_of_stream[id(handler.stream)]) for handler in logging_to]
    try:
        yield
    except BaseException as error:
        page.write(final_message(error))
        raise
    finally:
        sys.stdout, sys.stderr = streams
        for handler, stream in zip(logging_to, former_streams, strict=True):
            handler.setStream(stream)
        page.close()


def final_message(error: BaseException) -> str:
    """Return the end of a log: the traceback, or only the message of a UserError or Stopped."""
    is_expected = isinstance(error, UserError | Stopped)
    return "".join((traceback.format_exception_only if is_expected else traceback.format_exception)(error))


class LogPage:
    """A file with the lines that a terminal would show in the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows, self._row, self._column = [""], 0, 0
        self._has_display = False  # which hides the cursor while it is drawn

    def write(self, text: str) -> None:
        """Apply `text` to the rows as a terminal does, and write the rows that can no longer change."""
        for arguments, command, newline, carriage_return, plain in _TOKENS.findall(text):
            if plain:
                row, end = self._rows[self._row], self._column + len(plain)
                self._rows[self._row] = row[: self._column].ljust(self._column) + plain + row[end:]
                self._column = end
            elif newline:
                self._row, self._column = self._row + 1, 0
                if self._row == len(self._rows):
                    self._rows.append("")
            elif carriage_return:
                self._column = 0
            elif command == "A":
                self._row = max(0, self._row - int(arguments or 1))
            elif command in ("h", "l") and arguments == "?25":
                self._has_display = command == "l"
            elif command == "K":
                self._rows[self._row] = "" if arguments == "2" else self._rows[self._row][: self._column]
        # A display that erased its last rows has moved the cursor up, and shows nothing there.
        while len(self._rows) > self._row + 1 and not self._rows[-1]:
            self._rows.pop()
        # Outside of a display the cursor does not move up again, so that all complete rows can be written.
        is_ended = self._row == len(self._rows) - 1 and not self._rows[-1] and not self._has_display
        self._write_rows(len(self._rows) - 1 if is_ended else len(self._rows) - MAX_OPEN_ROWS)

    def close(self) -> None:
        """Write the remaining rows; may be called twice."""
        if self._rows[-1]:
            self._rows.append("")
        self._write_rows(len(self._rows) - 1)

    def _write_rows(self, count: int) -> None:
        if count <= 0:
            return
        with suppress(OSError):  # a full disk or a removed folder must not make a print fail
            # Opened for each write, since the folder may be removed while the run goes on.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(open_to_append(self.path), "a", encoding="utf-8", errors="replace") as file:
                file.writelines(f"{row.rstrip()}\n" for row in self._rows[:count])
        self._rows = self._rows[count:]
        self._row = max(0, self._row - count)


class _TeeStream:
    """A stream that copies its text to a page."""

    def __init__(self, stream: TextIO, page: LogPage) -> None:
        self._stream, self._page = stream, page

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        self._page.write(text)
        return written

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    # Such as `isatty` and `fileno`: displays and libraries must find the terminal.
    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
