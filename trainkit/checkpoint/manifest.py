"""manifest.json: the checkpoints of a folder, with size and hash of each file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainkit.checkpoint.files import text_digest, write_text
from trainkit.errors import UserError

FORMAT_VERSION = 2
"""1: one file for each checkpoint; 2: shards beside it."""
HEADER = "trainkit_checkpoint"
"""The key under which a checkpoint file holds its own metadata."""
MANIFEST = "manifest.json"
SUFFIX = ".pt"
SHARDS = ".shards"
UNLISTED = ".unlisted"
NAMES_SHOWN = 10  # of a list in a message


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
    """One checkpoint in the manifest."""

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
    shards: tuple[ShardFile, ...] = ()  # none: the file holds every tensor

    @staticmethod
    def of(path: Path, fields: Mapping[str, Any], **more: Any) -> CheckpointEntry:
        """Return the entry that a manifest's or a checkpoint's own fields describe, with `more` fields."""
        shards = tuple(ShardFile(**shard) for shard in fields.get("shards", ()))
        return CheckpointEntry(path=path, **{**fields, **more, "shards": shards})


@dataclass(frozen=True)
class Manifest:
    """The checkpoints of a folder in the order of saving, and the metric by which the best is chosen."""

    entries: list[CheckpointEntry]
    monitor: Monitor | None


def parse_manifest(folder: Path) -> Manifest:
    """Return the manifest in the folder's file; raises ValueError, TypeError or KeyError if it is damaged."""
    document = json.loads((folder / MANIFEST).read_bytes())
    version = document["format_version"]
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise too_new(folder / MANIFEST, version)
    if document["digest"] != text_digest(_canonical(document)):
        raise ValueError("the manifest was altered")
    monitor = document["monitor"]
    return Manifest(
        [_entry(folder, fields) for fields in document["checkpoints"]],
        None if monitor is None else Monitor(monitor["metric"], monitor["mode"]),
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the folder's manifest atomically; after the call it is on the disk."""
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "monitor": None if manifest.monitor is None else manifest.monitor._asdict(),
        "checkpoints": [_fields(entry) for entry in manifest.entries],
    }
    document["digest"] = text_digest(_canonical(document))
    write_text(folder / MANIFEST, json.dumps(document, indent=2) + "\n")


def shards_folder(path: Path) -> Path:
    """Return the folder beside the checkpoint at `path` that holds its shards."""
    return path.with_suffix(SHARDS)


def unlisted_marker(path: Path) -> Path:
    """Return the empty file that stands beside a checkpoint while it is about to be listed, or to be removed."""
    return path.with_name(f".{path.name}{UNLISTED}")


def too_new(path: Path, version: int) -> CheckpointError:
    """Return the error of a file that a later version of trainkit wrote."""
    return CheckpointError(
        f"{path} was written by a newer trainkit (format {version}, this one reads up to {FORMAT_VERSION}). "
        f"Type: pip install --upgrade trainkit"
    )


def first_names(names: Sequence[str]) -> str:
    """Return the first of many names, for a message."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _entry(folder: Path, fields: Mapping[str, Any]) -> CheckpointEntry:
    known = dict(fields)
    file = known.pop("file")
    if Path(file).name != file:
        raise ValueError(f"the manifest names a file outside its folder: {file!r}")
    return CheckpointEntry.of(
        folder / file, known, metrics={key: float(value) for key, value in known["metrics"].items()}
    )


def _fields(entry: CheckpointEntry) -> dict[str, Any]:
    fields = {key: value for key, value in vars(entry).items() if key != "path"}
    # JSON has no NaN and no infinity; float() reads them from text.
    fields["metrics"] = {key: value if math.isfinite(value) else str(value) for key, value in entry.metrics.items()}
    fields["shards"] = [shard._asdict() for shard in entry.shards]
    return {"file": entry.path.name, **fields}


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in document.items() if key != "digest"}, sort_keys=True)
