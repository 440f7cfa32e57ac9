"""The manifest of a folder of checkpoints: what is there, and how it was saved."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.checkpoint.entry import (
    FORMAT_VERSION,
    HEADER,
    MANIFEST,
    SUFFIX,
    CheckpointEntry,
    CheckpointError,
    Monitor,
    marker_of,
    too_new,
)
from trainkit.checkpoint.files import digest_of, digest_of_text, fastest_algorithm, write_text
from trainkit.checkpoint.serialization import opened, read_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """The checkpoints of a folder in the order of saving, and what makes one of them the best."""

    entries: list[CheckpointEntry]
    monitor: Monitor | None


def read_manifest(folder: Path) -> Manifest:
    """Return the folder's manifest; one that is lost or damaged is made anew from the undamaged files, in memory."""
    try:
        return parse_manifest(folder)
    except FileNotFoundError:
        reason = "is missing"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = "is damaged"
    entries = _rebuilt(folder)
    if entries or reason == "is damaged":
        logger.warning(
            "%s %s; the %d undamaged checkpoints in the folder are used as they are",
            folder / MANIFEST,
            reason,
            len(entries),
        )
    return Manifest(entries, None)


def parse_manifest(folder: Path) -> Manifest:
    """Return the manifest as it stands in its file; raise ValueError, TypeError or KeyError for one that is damaged."""
    document = json.loads((folder / MANIFEST).read_bytes())
    version = document["format_version"]
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise too_new(folder / MANIFEST, version)
    if document["digest"] != digest_of_text(_canonical(document)):
        raise ValueError("the manifest was altered")
    monitor = document["monitor"]
    return Manifest(
        [_entry(folder, fields) for fields in document["checkpoints"]],
        None if monitor is None else Monitor(monitor["metric"], monitor["mode"]),
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the folder's manifest at one instant; after the call it is on the disk."""
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "monitor": None if manifest.monitor is None else manifest.monitor._asdict(),
        "checkpoints": [_fields(entry) for entry in manifest.entries],
    }
    document["digest"] = digest_of_text(_canonical(document))
    write_text(folder / MANIFEST, json.dumps(document, indent=2) + "\n")


def _rebuilt(folder: Path) -> list[CheckpointEntry]:
    entries = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if marker_of(path).exists():
            continue
        try:
            entries.append(_inspected(path))
        except CheckpointError as error:
            logger.warning("left out: %s", error)
    return sorted(entries, key=lambda entry: entry.saved_at)


def _inspected(path: Path) -> CheckpointEntry:
    """Return the entry that a file's own header and content give it."""
    header = read_checkpoint(path, None, map_location="cpu")[HEADER]
    with opened(path) as file:
        size, digest = digest_of(file, fastest_algorithm())
    return CheckpointEntry.of(path, {**header, "size": size, "digest": digest})


def _entry(folder: Path, fields: dict[str, Any]) -> CheckpointEntry:
    known = dict(fields)
    file = known.pop("file")
    if Path(file).name != file:
        raise ValueError(f"the manifest names a file outside its folder: {file!r}")
    known["metrics"] = {key: float(value) for key, value in known["metrics"].items()}
    return CheckpointEntry.of(folder / file, known)


def _fields(entry: CheckpointEntry) -> dict[str, Any]:
    fields = {key: value for key, value in vars(entry).items() if key != "path"}
    # JSON has no NaN and no infinity; float() reads them from text.
    fields["metrics"] = {key: value if math.isfinite(value) else str(value) for key, value in entry.metrics.items()}
    fields["shards"] = [shard._asdict() for shard in entry.shards]
    return {"file": entry.path.name, **fields}


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in document.items() if key != "digest"}, sort_keys=True)
