"""Where the time of a step goes."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.loops.step_timer import StepTimer

if TYPE_CHECKING:
    from trainkit.run import Run

FILENAME = "step_times.jsonl"
_STATM = Path("/proc/self/statm")


class StepTimes(Callback):
    """Leaves in `step_times.jsonl`, at each log point, the seconds of each part of the steps since the last one.

    The parts are waiting for data, copying to the device, forward, backward, communication that was not hidden, the
    optimizer and the rest; with them goes the memory in use. The report draws them. Nothing waits for the device.

    Args:
        log: Whether loggers get them too, as `time/data` and so on, in milliseconds of a step.

    """

    def __init__(self, *, log: bool = False) -> None:
        self.log = log
        self._watch: StepTimer | None = None
        self._file: int | None = None
        self._since = 0.0
        self._evaluating_since = self._evaluating = 0.0

    def on_fit_start(self, run: Run) -> None:
        assert run.feed is not None
        self._watch = run.watch = StepTimer(run.strategy, run.precision, run.feed)
        if run.is_main and run.run_dir is not None:
            self._file = os.open(run.run_dir / FILENAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._since, self._evaluating = time.perf_counter(), 0.0

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._evaluating_since = time.perf_counter()

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._evaluating += time.perf_counter() - self._evaluating_since

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        watch = self._watch
        if watch is None or watch.steps == 0:
            return
        now, steps = time.perf_counter(), watch.steps
        seconds = watch.take(now - self._since - self._evaluating)
        if self.log:
            metrics.update({f"time/{part}": value / steps * 1e3 for part, value in seconds.items()})
        if self._file is not None:
            self._write(run, steps, seconds)
        self._since, self._evaluating = now, 0.0

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, run: Run, steps: int, seconds: dict[str, float]) -> None:
        assert self._file is not None
        line: dict[str, Any] = {
            "step": run.state.step,
            "steps": steps,
            "seconds": {part: round(value, 7) for part, value in seconds.items()},
            "memory": _memory(run),
        }
        if self._evaluating:
            line["evaluation"] = round(self._evaluating, 7)
        os.write(self._file, f"{json.dumps(line)}\n".encode())


def _memory(run: Run) -> dict[str, int]:
    """Return the bytes of this process in memory, and the most of a CUDA device between log points."""
    memory = {}
    with suppress(OSError, ValueError, IndexError):  # a system that does not tell
        memory["host"] = int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if run.strategy.device.type == "cuda":
        memory["device"] = run.peak_memory.between_logs(run.state.step)
    return memory
