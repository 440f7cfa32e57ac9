"""The run that `resume=auto` continues: the newest unfinished one with a complete checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainkit.checkpoint.store import CHECKPOINTS, CheckpointEntry, CheckpointStore
from trainkit.duration import Duration
from trainkit.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AutoResume:
    """The run to resume, or `None` for a new one, and the reason."""

    run_dir: Path | None
    why: str

    def log(self) -> None:
        """Log the choice, on one rank also if torchrun has started every rank."""
        if os.environ.get("RANK", "0") == "0":
            logger.info("resume=auto: %s", self.why)


def find_run_to_resume(
    run_dir: Path | None, *, name: str, max_duration: Sequence[Duration], parent: Path = Path("runs")
) -> AutoResume:
    """Return the run in `run_dir`, finished or not, or else the newest unfinished one of `parent/name`.

    A run can be resumed if one of its checkpoints is complete. It is unfinished if it was stopped, failed or was
    killed, or reached another `max_duration` than the present one.
    """
    folders = [run_dir] if run_dir is not None else _newest_first(parent / name)
    for folder in folders:
        # A folder that the user names is continued even if it is finished: `max_duration` may be longer.
        if run_dir is None and _is_finished(folder, max_duration):
            continue
        entry = latest_complete(folder)
        if entry is not None:
            return AutoResume(folder, f"continuing {folder} from step {entry.step}.")
    if run_dir is not None:
        return AutoResume(None, f"starting a new run in {run_dir}, which has no complete checkpoint.")
    return AutoResume(None, f"starting a new run, as no run in {parent / name} can be resumed.")


def latest_complete(run_dir: Path) -> CheckpointEntry | None:
    """Return the latest checkpoint of a run that is undamaged; reads files, changes none."""
    folder = run_dir / CHECKPOINTS
    if not folder.is_dir():
        return None
    store = CheckpointStore(folder)
    for entry in reversed(store.entries()):
        with suppress(CheckpointError):  # damaged: the one before it may do
            store.verify(entry)
            return entry
    return None


def last_number(run_dir: Path) -> int:
    """Return the number of the checkpoint that was saved last into a run folder, 0 without one."""
    folder = run_dir / CHECKPOINTS
    return max((entry.number for entry in CheckpointStore(folder).entries()), default=0) if folder.is_dir() else 0


def _newest_first(folder: Path) -> list[Path]:
    """Return the folders `<date_time>` and `<date_time>_<n>` without those of sweeps, which hold other runs."""
    if not folder.is_dir():
        return []
    runs = [path for path in folder.iterdir() if path.is_dir() and not (path / "multirun.yaml").exists()]
    return sorted(runs, key=_started, reverse=True)


def _started(run_dir: Path) -> tuple[str, int]:
    length = len("2026-01-31_12-00-00")
    stamp, suffix = run_dir.name[:length], run_dir.name[length + 1 :]
    # The suffix as a number: as text, _10 would come before _9.
    return stamp, int(suffix) if suffix.isdigit() else 0


def _is_finished(run_dir: Path, max_duration: Sequence[Duration]) -> bool:
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        status, reason = str(summary["status"]), str(summary["exit_reason"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False  # killed before it wrote a summary
    # Finished for another reason, such as early stopping, counts for every duration.
    reached = reason.removeprefix("reached max_duration=")
    return status == "finished" and (reached == reason or reached in map(str, max_duration))
