"""The manifest of a folder of checkpoints: what is there, how it was saved, and whether it still is what was saved."""

from __future__ import annotations

import json
import logging
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, NamedTuple

import torch

from trainkit.checkpoints.file import ALGORITHMS, digest_of, digest_of_text, fastest_algorithm, write_text
from trainkit.errors import UserError

FORMAT_VERSION = 1
HEADER = "trainkit_checkpoint"
MANIFEST = "manifest.json"
SUFFIX = ".pt"
UNLISTED = ".unlisted"

logger = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that could not be written, found or used."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is missing, cut off or altered: an earlier one can take its place."""


class Monitor(NamedTuple):
    """The metric by which checkpoints are compared, and whether a small or a large value is good."""

    metric: str
    mode: Literal["min", "max"]


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


@dataclass(frozen=True)
class Manifest:
    """The checkpoints of a folder in the order of saving, and what makes one of them the best."""

    entries: list[CheckpointEntry]
    monitor: Monitor | None


def marker_of(path: Path) -> Path:
    """Return the empty file that stands beside a checkpoint while it is about to be listed, or to be removed."""
    return path.with_name(f".{path.name}{UNLISTED}")


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
        raise _too_new(folder / MANIFEST, version)
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


def read_checkpoint(path: Path, entry: CheckpointEntry | None, *, map_location: Any) -> dict[str, Any]:
    """Return what a checkpoint file holds, its header included, after checking that it is what was saved.

    Without an entry the checksums inside the file are what it is checked by.
    """
    with opened(path) as file:
        if entry is None:
            _check_archive(file)
        else:
            check_digest(file, entry)
        content = _unpickled(file, path, map_location=map_location, verified=entry is not None)
    header = content.get(HEADER) if isinstance(content, dict) else None
    if not isinstance(header, dict):
        raise _foreign(path, content)
    if header["format_version"] > FORMAT_VERSION:
        raise _too_new(path, header["format_version"])
    if header["format_version"] < 1:
        raise CheckpointError(
            f"{path} has format {header['format_version']}, which no released trainkit wrote; it is not read."
        )
    checked: dict[str, Any] = content
    return checked


def check_digest(file: FileIO, entry: CheckpointEntry) -> None:
    """Raise DamagedCheckpoint unless the open file has the size and hash of the entry."""
    algorithm = entry.digest.partition(":")[0]
    if algorithm not in ALGORITHMS:
        raise _too_new(entry.path, FORMAT_VERSION + 1)
    found = digest_of(file, algorithm)
    if found.size != entry.size:
        raise DamagedCheckpoint(
            f"{entry.path} is cut off or altered: it has {found.size:,} bytes, {entry.size:,} were saved."
        )
    if found.digest != entry.digest:
        raise DamagedCheckpoint(f"{entry.path} was altered after it was saved: its {algorithm} hash is another one.")


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """Give the file, open for reading; raise DamagedCheckpoint where it is missing or the disk does not give it."""
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing.") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}.") from error


def _unpickled(file: FileIO, path: Path, *, map_location: Any, verified: bool) -> Any:
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except UnpicklingError as error:
        raise _holds_code(path, error) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if verified:
            raise
        # Whatever an altered archive makes torch raise: the bytes are unknown, so the kinds of errors are too.
        raise DamagedCheckpoint(f"{path} is damaged: {str(error).splitlines()[0]}.") from error


def _check_archive(file: FileIO) -> None:
    path = getattr(file, "name", "the file")
    start = file.read(4)
    if start[:2] == b"\x80\x02" or start[:1] in b"(}]c":
        raise CheckpointError(
            f"{path} is a pickle, which can run code when it is read; trainkit reads only its own checkpoints. "
            f"If you trust it, load it in your task's constructor with torch.load."
        )
    try:
        with zipfile.ZipFile(file) as archive:
            # A part that is marked as a folder is left out by torch, which then reads memory that nobody has written.
            odd = [part.filename for part in archive.infolist() if part.external_attr or part.compress_type]
            damaged = odd[0] if odd else archive.testzip()
    except Exception as error:
        # Of an altered archive zipfile raises a dozen kinds of errors.
        raise DamagedCheckpoint(f"{path} is not a checkpoint, or is cut off: {error}.") from error
    if damaged is not None:
        raise DamagedCheckpoint(f"{path} is damaged: its part '{damaged}' is not what was saved.")
    file.seek(0)


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
    return CheckpointEntry(path=path, size=size, digest=digest, **header)


def _entry(folder: Path, fields: dict[str, Any]) -> CheckpointEntry:
    known = dict(fields)
    file = known.pop("file")
    if Path(file).name != file:
        raise ValueError(f"the manifest names a file outside its folder: {file!r}")
    known["metrics"] = {key: float(value) for key, value in known["metrics"].items()}
    return CheckpointEntry(path=folder / file, **known)


def _fields(entry: CheckpointEntry) -> dict[str, Any]:
    fields = {key: value for key, value in vars(entry).items() if key != "path"}
    # JSON has no NaN and no infinity; float() reads them from text.
    fields["metrics"] = {key: value if math.isfinite(value) else str(value) for key, value in entry.metrics.items()}
    return {"file": entry.path.name, **fields}


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in document.items() if key != "digest"}, sort_keys=True)


def _holds_code(path: Path, error: UnpicklingError) -> CheckpointError:
    found = re.search(r"GLOBAL (\S+)", str(error))
    what = f" (it names {found[1]})" if found else ""
    return CheckpointError(
        f"{path} holds Python objects{what}, and reading these can run code, so it is refused: a checkpoint holds only "
        f"tensors and plain values. If you trust the file, load it in your task's constructor with torch.load."
    )


def _too_new(path: Path, version: int) -> CheckpointError:
    return CheckpointError(
        f"{path} was written by a newer trainkit (format {version}, this one reads up to {FORMAT_VERSION}). "
        f"Type: pip install --upgrade trainkit"
    )


def _foreign(path: Path, content: object) -> CheckpointError:
    keys = f" Its keys: {', '.join(map(str, list(content)[:10]))}." if isinstance(content, dict) else ""
    return CheckpointError(
        f"{path} was not saved by trainkit, so there is no run to continue in it.{keys} To start from its weights, "
        f"load them in your task's constructor: self.load_state_dict(torch.load(path, weights_only=True))"
    )
