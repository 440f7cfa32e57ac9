"""The warnings of a run, kept for its report: `warnings.jsonl` in its folder."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

FILENAME = "warnings.jsonl"
_MOST = 200  # different ones of a rank


@contextmanager
def warnings_kept(folder: Path | None, *, process: int) -> Iterator[None]:
    """Enter with a file that takes each different warning once, whoever else is shown it; `None`: keep nothing.

    Costs nothing until something warns.
    """
    if folder is None:
        yield
        return
    handler = _Handler(folder / FILENAME, process)
    ours = logging.getLogger("trainkit")
    show = warnings.showwarning

    def show_and_keep(  # noqa: PLR0917 # as `warnings` calls it
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        handler.keep(f"{category.__name__}: {message}", where=f"{filename}:{lineno}")
        show(message, category, filename, lineno, file, line)

    ours.addHandler(handler)
    warnings.showwarning = show_and_keep
    try:
        yield
    finally:
        ours.removeHandler(handler)
        if warnings.showwarning is show_and_keep:
            warnings.showwarning = show


class _Handler(logging.Handler):
    """Writes warnings and errors of trainkit's loggers, and passes them on to the console where nobody else would."""

    def __init__(self, path: Path, process: int) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._process = process
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.keep(record.getMessage(), where=record.name, level=record.levelname)
        except Exception:
            self.handleError(record)
        if not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)  # logging does so only where it finds no handler at all

    def keep(self, text: str, *, where: str, level: str = "WARNING") -> None:
        """Write a warning that was not written before; a disk that takes no more is no reason to stop."""
        if text in self._seen or len(self._seen) >= _MOST:
            return
        self._seen.add(text)
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "process": self._process,
            "level": level,
            "where": where,
            "text": text.encode("utf-8", "replace").decode(),
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            pass
