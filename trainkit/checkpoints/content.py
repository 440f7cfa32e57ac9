"""The content of a checkpoint file: read only where it is what was saved, and never as code."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from trainkit.checkpoints.digest import ALGORITHMS, Written, digest_of
from trainkit.checkpoints.entry import (
    FORMAT_VERSION,
    HEADER,
    CheckpointEntry,
    CheckpointError,
    DamagedCheckpoint,
    ShardFile,
    shards_of,
    too_new,
)
from trainkit.checkpoints.payload import PayloadWalk, plain
from trainkit.errors import UserError


def labelled(
    payload: dict[str, Any], *, name: str, step: int, epoch: int, metrics: Mapping[str, float], reason: str
) -> dict[str, Any]:
    """Return what goes into a file: the payload, with what the manifest will say of it in front."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*", name):
        raise UserError(f"A checkpoint's name is made of letters, digits and '_.=+-', got {name!r}.")
    if HEADER in payload:
        raise UserError(f"The key '{HEADER}' of a checkpoint is reserved; use another one.")
    header = {
        "name": name,
        "step": int(step),
        "epoch": int(epoch),
        "metrics": {key: float(value) for key, value in metrics.items()},
        "reason": reason,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "format_version": FORMAT_VERSION,
    }
    return {HEADER: header, **plain(payload)}


def read_checkpoint(path: Path, entry: CheckpointEntry | None, *, map_location: Any) -> dict[str, Any]:
    """Return what a checkpoint file holds, its header included, after checking that it is what was saved.

    Without an entry the checksums inside the file are what it is checked by.
    """
    with opened(path) as file:
        if entry is None:
            _check_archive(file)
        else:
            check_digest(file, path, Written(entry.size, entry.digest))
        content = _unpickled(file, path, map_location=map_location, verified=entry is not None)
    header = content.get(HEADER) if isinstance(content, dict) else None
    if not isinstance(header, dict):
        raise _foreign(path, content)
    if header["format_version"] > FORMAT_VERSION:
        raise too_new(path, header["format_version"])
    if header["format_version"] < 1:
        raise CheckpointError(
            f"{path} has format {header['format_version']}, which no released trainkit wrote; it is not read."
        )
    checked: dict[str, Any] = content
    return _with_shards(checked, path, map_location=map_location) if header.get("shards") else checked


def check_digest(file: FileIO, path: Path, saved: Written) -> None:
    """Raise DamagedCheckpoint unless the open file has the size and hash that were saved."""
    algorithm = saved.digest.partition(":")[0]
    if algorithm not in ALGORITHMS:
        raise too_new(path, FORMAT_VERSION + 1)
    found = digest_of(file, algorithm)
    if found.size != saved.size:
        raise DamagedCheckpoint(
            f"{path} is cut off or altered: it has {found.size:,} bytes, {saved.size:,} were saved."
        )
    if found.digest != saved.digest:
        raise DamagedCheckpoint(f"{path} was altered after it was saved: its {algorithm} hash is another one.")


def check_shards(path: Path, shards: Iterable[ShardFile]) -> None:
    """Raise DamagedCheckpoint unless the files beside the checkpoint at `path` are those that were saved."""
    for shard in shards:
        name = shards_of(path) / shard.file
        with opened(name) as file:
            check_digest(file, name, Written(shard.size, shard.digest))


def _with_shards(content: dict[str, Any], path: Path, *, map_location: Any) -> dict[str, Any]:
    """Return the content with the tensors that several ranks have written."""
    from trainkit.checkpoints.shard_files import filled  # which takes half a second to import

    check_shards(path, CheckpointEntry.of(path, {**content[HEADER], "size": 0, "digest": ""}).shards)
    whole = filled(content, shards_of(path))
    if str(map_location) == "cpu":
        return whole
    moved: dict[str, Any] = PayloadWalk(lambda tensor, place: tensor.to(map_location)).convert(whole, "")
    return moved


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


def _holds_code(path: Path, error: UnpicklingError) -> CheckpointError:
    found = re.search(r"GLOBAL (\S+)", str(error))
    what = f" (it names {found[1]})" if found else ""
    return CheckpointError(
        f"{path} holds Python objects{what}, and reading these can run code, so it is refused: a checkpoint holds only "
        f"tensors and plain values. If you trust the file, load it in your task's constructor with torch.load."
    )


def _foreign(path: Path, content: object) -> CheckpointError:
    keys = f" Its keys: {', '.join(map(str, list(content)[:10]))}." if isinstance(content, dict) else ""
    return CheckpointError(
        f"{path} was not saved by trainkit, so there is no run to continue in it.{keys} To start from its weights, "
        f"load them in your task's constructor: self.load_state_dict(torch.load(path, weights_only=True))"
    )
