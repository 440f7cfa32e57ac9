"""What is known of one checkpoint, and the errors that name one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainkit.errors import UserError

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
