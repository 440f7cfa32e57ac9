"""The folder that a run writes into.

runs/<name>/<date_time>/
config.yaml  metrics.jsonl  tensorboard/  checkpoints/  rank_<k>.log  summary.json
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from trainkit.checkpoints.file import write_text
from trainkit.errors import UserError


def choose_run_dir(name: str, *, parent: Path = Path("runs")) -> Path:
    """Return a folder `runs/<name>/<date_time>` that does not exist yet."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    suffixes = ("" if attempt == 0 else f"_{attempt}" for attempt in count())
    return next(path for path in (parent / name / (stamp + suffix) for suffix in suffixes) if not path.exists())


def check_run_dir(folder: Path) -> None:
    """Raise UserError if the folder is not there and cannot be made, or cannot be written to; changes nothing."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"the run folder {folder} cannot be made: {existing} is a file. Set run_dir to another path.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"the run folder {folder} cannot be written to; set run_dir to a writable path.")


def make_run_dir(folder: Path) -> None:
    """Have the folder; raises UserError if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"the run folder {folder} cannot be written to ({error.strerror}); set run_dir to a writable path."
        ) from None


def write_config(folder: Path, config: str) -> None:
    """Keep the run's settings as `config.yaml`, and those of an earlier part of the run if they differ."""
    path = folder / "config.yaml"
    if path.exists() and path.read_text() != config:
        path.rename(folder / f"config_until_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}.yaml")
    write_text(path, config)


def forget_summary(folder: Path) -> None:
    """Remove the summary of an earlier part of the run: if this part is killed, it has none."""
    (folder / "summary.json").unlink(missing_ok=True)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`: what the run came to and why it ended."""
    known = {key: _as_json(value) for key, value in summary.items() if key != "weights"}
    write_text(folder / "summary.json", json.dumps(known, indent=2, allow_nan=False) + "\n")


def _as_json(value: Any) -> Any:
    """Return what stands for a value in JSON, which knows no paths and no numbers that are not finite."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_json(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
