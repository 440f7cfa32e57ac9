"""Where the checkpoints are that a path leads to."""

from __future__ import annotations

from pathlib import Path

from trainkit.checkpoints.entry import MANIFEST, SUFFIX, CheckpointError
from trainkit.errors import nearest

CHECKPOINTS = "checkpoints"
NAMES_SHOWN = 10  # of a list in a message


def checkpoints_folder(path: Path) -> Path:
    """Return the folder of checkpoints of a run folder, such a folder itself or a file in it; raise CheckpointError."""
    if path.is_file():
        return path.parent
    if not path.is_dir():
        raise _not_there(path)
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    if (path / MANIFEST).exists() or any(path.glob(f"*{SUFFIX}")):
        return path
    runs = sorted(manifest.parent.parent.name for manifest in path.glob(f"*/{CHECKPOINTS}/{MANIFEST}"))
    if runs:
        raise CheckpointError(
            f"{path} holds {len(runs)} runs, not one. The latest is {path / runs[-1]}. All: {first_names(runs[::-1])}."
        )
    raise no_checkpoint_in(path)


def _not_there(path: Path) -> CheckpointError:
    parent = existing(path.parent)
    names = (
        sorted(child.name for child in parent.iterdir() if not child.name.startswith(".")) if parent.is_dir() else []
    )
    # The first part that is missing is the one to correct.
    wrong = path.absolute().relative_to(parent.absolute()).parts[0]
    named = "This folder" if parent == Path() else str(parent)
    there = f"{named} holds: {first_names(names)}." if names else f"{named} is empty."
    return CheckpointError(f"There is no run or checkpoint at {path}.{nearest(wrong, names)} {there}")


def no_checkpoint_in(folder: Path) -> CheckpointError:
    """Return the error of a folder without a complete checkpoint."""
    unlisted = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    there = (
        f" These files are not in its {MANIFEST}: {first_names(unlisted)}; name a file to load it." if unlisted else ""
    )
    return CheckpointError(f"There is no complete checkpoint in {folder}.{there}")


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that is there."""
    return next(parent for parent in [path, *path.absolute().parents] if parent.exists())


def first_names(names: list[str]) -> str:
    """Return the first of many names in words."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
