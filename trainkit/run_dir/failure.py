"""What a rank knew when an error ended its run: `failure_rank_<k>.json` in the run's folder.

Every rank writes its own, so that the report can show the rank that failed first and where the others were then. The
caller, who also learns of ranks that were killed and could not write any more, leaves `failure.json`.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from trainkit.loops.run import Run


logger = logging.getLogger(__name__)

CALLERS = "failure.json"
_TASK_METHODS = ("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers")
_PHASES = {
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


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """One process's view of the end of a run."""

    error: str
    """The error's class."""
    message: str
    traceback: str
    when: float
    """Seconds since 1970."""
    process: int | None = None
    """Which of all processes; `None`: the caller of all of them."""
    step: int | None = None
    """Steps that were complete."""
    epoch: int | None = None
    phase: str = ""
    evaluation: str = ""
    """The evaluation that was under way."""


def record_failure(run: Run, error: BaseException) -> None:
    """Leave what this rank knows in the run's folder; never raises, and is not collective."""
    if run.run_dir is None:
        return
    progress, process = run.evaluation, run.strategy.comm.process
    record = FailureRecord(
        type(error).__name__,
        str(error),
        _text_of(error),
        time.time(),
        process,
        run.state.step,
        run.state.epoch,
        phase_of(error),
        "" if progress is None else f"{progress.stage}, batch {progress.batch}",
    )
    _write(run.run_dir / f"failure_rank_{process}.json", record)


def record_failure_of_caller(folder: Path, error: BaseException) -> None:
    """Leave what the caller of all ranks was told; never raises."""
    _write(folder / CALLERS, FailureRecord(type(error).__name__, str(error), _text_of(error), time.time()))


def clear_failures(folder: Path) -> None:
    """Remove what earlier parts of the run left."""
    for path in (folder / CALLERS, *folder.glob("failure_rank_*.json")):
        path.unlink(missing_ok=True)


def read_failures(folder: Path) -> list[FailureRecord]:
    """Return what was left in a run's folder, the earliest first."""
    records = []
    for path in (folder / CALLERS, *sorted(folder.glob("failure_rank_*.json"))):
        try:
            records.append(FailureRecord(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(records, key=lambda record: record.when)


def phase_of(error: BaseException) -> str:
    """Return what the run was doing when the error was raised: the innermost activity that a user has a name for."""
    return phase_in(_frames(error))


def phase_in(frames: Iterable[FrameType]) -> str:
    """Return what a call stack, the outermost frame first, is doing."""
    for frame in reversed(list(frames)):
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        # By name, as this file is read by strategies that import no callback, task or data.
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
        if name in _PHASES:
            return _PHASES[name]
    return ""


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _write(path: Path, record: FailureRecord) -> None:
    try:
        path.write_text(json.dumps(_plain(asdict(record)), indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        logger.warning("what went wrong could not be kept in %s: %s", path, problem)


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return texts that every encoding takes: a message may hold halves of a character."""
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in record.items()
    }


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
