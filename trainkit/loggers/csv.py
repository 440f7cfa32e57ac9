"""`metrics.csv`: one row for each time that metrics are written, one column for each metric."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.files import open_to_append, write_text
from trainkit.logger import Logger, check_inside_run_dir


class CsvLogger(Logger):
    """Appends rows to `metrics.csv`; the cell of a metric that was not written is empty.

    A new metric adds a column on the right, for which the file is replaced atomically. `time` is in seconds since 1970;
    NaN and infinity are written as `nan` and `inf`.

    Args:
        filename: The file's name in the run's folder.

    """

    def __init__(self, *, filename: str = "metrics.csv") -> None:
        check_inside_run_dir(filename, where="filename")
        self.filename = filename
        self._file: int | None = None

    def open(self, folder: Path, *, step: int) -> None:
        self.close()
        self._path = folder / self.filename
        self._columns, rows, is_damaged = _read(self._path)
        # The resumed run writes the steps beyond this one again.
        kept_rows = [row for row in rows if int(row[0]) <= step]
        if is_damaged or len(kept_rows) < len(rows) or not self._path.exists():
            write_text(self._path, _text([self._columns, *kept_rows]))
        self._file = open_to_append(self._path)

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        assert self._file is not None
        if new := [name for name in metrics if name not in self._columns]:
            self._add_columns(new)
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        # One call for a row: a kill between calls would leave a part of it.
        os.write(self._file, _text([[str(row.get(column, "")) for column in self._columns]]).encode())

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _add_columns(self, names: Sequence[str]) -> None:
        columns, rows, _ = _read(self._path)
        self._columns = [*columns, *names]
        write_text(self._path, _text([self._columns, *([*row, *[""] * len(names)] for row in rows)]))
        # The file was replaced: the old descriptor would append to the one that is gone.
        self.close()
        self._file = open_to_append(self._path)


def _read(path: Path) -> tuple[list[str], list[list[str]], bool]:
    """Return the columns, the complete rows, and whether there is anything else, which a kill has left."""
    text = path.read_text() if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    columns, *rows = list(csv.reader(io.StringIO(complete))) or [["step", "time"]]
    valid = [row for row in rows if len(row) == len(columns) and row[0].isdigit()]
    return columns, valid, len(complete) < len(text) or len(valid) < len(rows)


def _text(rows: Sequence[Sequence[str]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()
