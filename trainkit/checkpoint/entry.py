"""What is known of one checkpoint, and the errors that name one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainkit.errors import UserError, nearest

FORMAT_VERSION = 2
"""1: one file for each checkpoint; 2: shards beside it."""
HEADER = "trainkit_checkpoint"
MANIFEST = "manifest.json"
SUFFIX = ".pt"
SHARDS = ".shards"
UNLISTED = ".unlisted"


class CheckpointError(UserError):
    """A checkpoint that could not be written, found or used."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is missing, cut off or altered: an earlier one can take its place."""


class Monitor(NamedTuple):
    """The metric by which checkpoints are compared, and whether a small or a large value is good."""

    metric: str
    mode: Literal["min", "max"]


class ShardFile(NamedTuple):
    """One file that a rank wrote beside the checkpoint's own."""

    file: str
    size: int  # bytes
    digest: str


@dataclass(frozen=True)
class CheckpointEntry:
    """What the manifest says about one checkpoint."""

    path: Path
    name: str
    step: int
    epoch: int
    metrics: Mapping[str, float]
    reason: str
    saved_at: str  # UTC, ISO 8601
    size: int  # bytes
    digest: str  # "sha256:..." or "blake2b:...", in hexadecimal
    format_version: int
    shards: tuple[ShardFile, ...] = ()  # none: the file holds all

    @staticmethod
    def of(path: Path, fields: Mapping[str, Any]) -> CheckpointEntry:
        """Return the entry that a manifest or a checkpoint's header describes."""
        shards = tuple(ShardFile(**shard) for shard in fields.get("shards", ()))
        return CheckpointEntry(path=path, **{**fields, "shards": shards})


def shards_of(path: Path) -> Path:
    """Return the folder that stands beside a checkpoint which several ranks have written."""
    return path.with_suffix(SHARDS)


def marker_of(path: Path) -> Path:
    """Return the empty file that stands beside a checkpoint while it is about to be listed, or to be removed."""
    return path.with_name(f".{path.name}{UNLISTED}")


def too_new(path: Path, version: int) -> CheckpointError:
    """Return the error of a file that a later version of trainkit wrote."""
    return CheckpointError(
        f"{path} was written by a newer trainkit (format {version}, this one reads up to {FORMAT_VERSION}). "
        f"Type: pip install --upgrade trainkit"
    )


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
