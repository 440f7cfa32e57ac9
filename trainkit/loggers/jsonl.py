"""`metrics.jsonl`: one JSON object for each time that metrics are written."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from trainkit.files import open_to_append, write_text
from trainkit.logger import Logger, check_inside_run_dir


class JsonlLogger(Logger):
    """Appends to `metrics.jsonl` lines such as `{"step": 50, "time": 1767225600.1, "train/loss": 0.69}`.

    `time` is in seconds since 1970. Every line is handed to the system at once, so that a killed process loses none.
    JSON has neither NaN nor infinity: they are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `float()` and
    JavaScript's `Number()` read.

    Args:
        filename: The file's name in the run's folder.

    """

    def __init__(self, *, filename: str = "metrics.jsonl") -> None:
        check_inside_run_dir(filename, where="filename")
        self.filename = filename
        self._file: int | None = None

    def open(self, folder: Path, *, step: int) -> None:
        self.close()
        path = folder / self.filename
        _truncate(path, step=step)
        self._file = open_to_append(path)

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        assert self._file is not None
        line: dict[str, float] = {"step": step, "time": round(time.time(), 3), **metrics}
        # Nearly all lines are finite: only the others pay for a check of each value.
        try:
            text = json.dumps(line, allow_nan=False)
        except ValueError:
            text = json.dumps({name: _as_json(value) for name, value in line.items()})
        # One call for a line: a kill between calls would leave a part of it.
        os.write(self._file, f"{text}\n".encode())

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _truncate(path: Path, *, step: int) -> None:
    """Remove the lines beyond `step`, and a last line that a kill left unfinished."""
    if not path.exists():
        return
    text = path.read_text()
    kept_lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n") and _step_of(line) <= step]
    if len("".join(kept_lines)) < len(text):
        write_text(path, "".join(kept_lines))


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for a line that was written only in part."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _as_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
