"""Failures and warnings of a run, in its folder.

failure_rank_<k>.json   the error that ended the run on a rank, and the rank's position then
failure.json            the error that the caller of all ranks got, also for ranks that were killed
warnings.jsonl          each different warning once
"""

from __future__ import annotations

import json
import logging
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainkit.console import printable
from trainkit.files import open_to_append, write_optional

if TYPE_CHECKING:
    from trainkit.run import Run

CALLERS = "failure.json"
FILENAME = "warnings.jsonl"
_MAX_WARNINGS = 200  # different ones of a rank
_TASK_METHODS = ("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers")
PHASE_OF_FUNCTION = {
    "backward": "backward",
    "optimizer_step": "the optimizer's step",
    "_normalize_gradients": "adding up gradients",
    "save": "saving a checkpoint",
    "log": "logging",
    "_log": "logging",
    "step_schedules": "the schedules",
    "restore": "restoring a checkpoint",
    "step_batches": "reading data",
    "forward_backward": "forward and backward",
    "prepare_fit": "preparing the run",
}
"""The description of each function of trainkit, as the phase of a failure."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """One process's view of the end of a run."""

    error: str  # its class
    message: str
    traceback: str
    when: float  # seconds since 1970
    process: int | None = None  # None: the caller of all of them
    step: int | None = None  # complete steps
    epoch: int | None = None
    phase: str = ""
    evaluation: str = ""  # the evaluation in progress


def record_failure(run: Run, error: BaseException) -> None:
    """Write this rank's failure to the run's folder; never raises, and is not collective."""
    if run.run_dir is None:
        return
    progress, process = run.evaluation, run.strategy.comm.process
    _write(
        run.run_dir / f"failure_rank_{process}.json",
        error,
        process=process,
        step=run.state.step,
        epoch=run.state.epoch,
        phase=phase_in(frame for frame, _ in traceback.walk_tb(error.__traceback__)),
        evaluation="" if progress is None else f"{progress.stage}, batch {progress.batch}",
    )


def record_failure_of_caller(folder: Path, error: BaseException) -> None:
    """Write the failure that the caller of all ranks got; never raises."""
    _write(folder / CALLERS, error)


def clear_failures(folder: Path) -> None:
    """Remove the records of earlier parts of the run."""
    for path in (folder / CALLERS, *folder.glob("failure_rank_*.json")):
        path.unlink(missing_ok=True)


def read_failures(folder: Path) -> list[FailureRecord]:
    """Return the records in a run's folder, the earliest first; unreadable ones are skipped."""
    records = []
    for path in (folder / CALLERS, *sorted(folder.glob("failure_rank_*.json"))):
        try:
            records.append(FailureRecord(**json.loads(path.read_text(encoding="utf-8"))))
        # A process may have been killed while it wrote, or the file was altered: the other records still count.
        except (OSError, ValueError, TypeError, RecursionError):
            continue
    return sorted(records, key=lambda record: record.when)


def phase_in(frames: Iterable[FrameType]) -> str:
    """Return the innermost phase of a call stack, the outermost frame first; empty if it is unknown."""
    for frame in reversed(list(frames)):
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        # By name: strategies import this file, and it must not import callbacks, tasks or data.
        bases = {base.__name__ for base in type(owner).__mro__ if base.__module__.startswith("trainkit.")}
        if "Callback" in bases and (name.startswith("on_") or name == "close"):
            return f"the callback {type(owner).__name__}.{name}"
        if "TaskModule" in bases and name in _TASK_METHODS:
            return f"{type(owner).__name__}.{name}"
        if "trainkit" not in frame.f_globals.get("__name__", ""):
            continue
        stage = getattr(getattr(owner, "source", None), "stage", None)
        if isinstance(stage, str):
            return f"reading {stage} data"
        if name in PHASE_OF_FUNCTION:
            return PHASE_OF_FUNCTION[name]
    return ""


@contextmanager
def warnings_kept(folder: Path | None, *, process: int) -> Iterator[None]:
    """Write each different warning of the block to the folder once, and show it with escapes for control characters.

    `None` writes nothing.
    """
    handler = None if folder is None else _Handler(folder / FILENAME, process)
    ours = logging.getLogger("trainkit")
    # The present one, so that a user's or pytest's still gets each warning.
    show = warnings.showwarning

    def show_and_keep(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any, **named: Any
    ) -> None:
        if handler is not None:
            handler.keep(f"{category.__name__}: {message}", where=f"{filename}:{lineno}")
        text = printable(str(message))
        show(message if text == str(message) else text, category, filename, lineno, *more, **named)

    if handler is not None:
        ours.addHandler(handler)
    # Python has no handlers for warnings, only this function to replace.
    warnings.showwarning = show_and_keep
    try:
        yield
    finally:
        if handler is not None:
            ours.removeHandler(handler)
        # Someone may have replaced it in the block: theirs stays.
        if warnings.showwarning is show_and_keep:
            warnings.showwarning = show


def _write(path: Path, error: BaseException, **position: Any) -> None:
    message, text = (_encodable(part) for part in (str(error), "".join(traceback.format_exception(error))))
    record = FailureRecord(type(error).__name__, message, text, time.time(), **position)
    write_optional(path, json.dumps(asdict(record), indent=2) + "\n")


def _encodable(text: str) -> str:
    """Return the text without halves of characters, which a message may hold."""
    return text.encode("utf-8", "replace").decode()


class _Handler(logging.Handler):
    """Writes warnings and errors of trainkit's loggers, and shows them on the console if no other handler does."""

    def __init__(self, path: Path, process: int) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._process = process
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.keep(record.getMessage(), where=record.name, level=record.levelname)
        # As every handler of logging: an error while logging must not end the run.
        except Exception:
            self.handleError(record)
        if not logging.getLogger().handlers and logging.lastResort is not None:
            # logging does so only if there are no handlers at all
            shown = {**vars(record), "msg": printable(record.getMessage()), "args": None}
            logging.lastResort.handle(logging.makeLogRecord(shown))

    def keep(self, text: str, *, where: str, level: str = "WARNING") -> None:
        """Write a warning that was not written before; a disk error does not end the run."""
        # A warning of every step would fill the disk.
        if text in self._seen or len(self._seen) >= _MAX_WARNINGS:
            return
        self._seen.add(text)
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "process": self._process,
            "level": level,
            "where": where,
            "text": _encodable(text),
        }
        # Opened for each line: ranks append to one file, and a removed folder is noticed.
        with suppress(OSError), open(open_to_append(self._path), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
