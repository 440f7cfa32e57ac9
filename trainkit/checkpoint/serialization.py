"""Payloads in bytes and back: tensors, plain Python values and containers; nothing in a file can run code."""

from __future__ import annotations

import re
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.files import ALGORITHMS, FileDigest, file_digest
from trainkit.checkpoint.manifest import (
    FORMAT_VERSION,
    HEADER,
    NAMES_SHOWN,
    CheckpointEntry,
    CheckpointError,
    DamagedCheckpoint,
    ShardFile,
    first_names,
    shards_folder,
    too_new,
)
from trainkit.errors import UserError, nearest

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_SEQUENCES: tuple[type, ...] = (list, tuple, set)
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)


def with_metadata(
    payload: dict[str, Any], *, name: str, step: int, epoch: int, metrics: Mapping[str, float], reason: str
) -> dict[str, Any]:
    """Return the content of a file: the payload, with the metadata that the manifest lists in front."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*", name):
        raise UserError(f"A checkpoint's name consists of letters, digits and '_.=+-', got {name!r}.")
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


def plain(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the payload in the form that is saved: without numpy's types, each tensor with its own bytes only.

    A view of a larger storage (a gradient bucket, a fusion buffer) is copied, since `torch.save` would write all of the
    storage; tensors that share their bytes share the copy. Raises UserError with the place of a value that could not
    be read back without running code.
    """
    copies: dict[tuple[object, ...], Tensor] = {}

    def own_bytes(tensor: Tensor, place: str) -> Tensor:
        if tensor.layout is not torch.strided or _bytes_of(tensor) >= tensor.untyped_storage().nbytes():
            return tensor
        key = storage_key(tensor)
        if key not in copies:
            copies[key] = tensor.clone()
        return copies[key]

    converted: dict[str, Any] = PayloadVisitor(own_bytes).convert(payload, "")
    return converted


def payload_bytes(payload: object) -> int:
    """Return the approximate size of the payload in a file, in bytes."""
    if isinstance(payload, Tensor):
        return _bytes_of(payload) + 256
    if isinstance(payload, dict):
        return sum(payload_bytes(key) + payload_bytes(value) for key, value in payload.items())
    if isinstance(payload, (list, tuple, set)):
        return sum(map(payload_bytes, payload))
    return len(payload) + 8 if isinstance(payload, (str, bytes)) else 8


def read_checkpoint(path: Path, entry: CheckpointEntry | None) -> dict[str, Any]:
    """Return the content of a checkpoint file, its header included, after verifying that it is what was saved.

    Without an entry the file is verified by the checksums inside it.
    """
    with open_file(path) as file:
        if entry is None:
            _check_archive(file, path)
        else:
            check_digest(file, path, FileDigest(entry.size, entry.digest))
        content = _unpickled(file, path, verified=entry is not None)
    header = content.get(HEADER) if isinstance(content, dict) else None
    if not isinstance(header, dict):
        raise _not_a_checkpoint(path, content)
    if header["format_version"] > FORMAT_VERSION:
        raise too_new(path, header["format_version"])
    if header["format_version"] < 1:
        raise CheckpointError(
            f"{path} has format {header['format_version']}, which no released trainkit wrote; it cannot be read."
        )
    verified: dict[str, Any] = content
    return _with_shards(verified, path) if header.get("shards") else verified


def check_digest(file: FileIO, path: Path, saved: FileDigest) -> None:
    """Raise DamagedCheckpoint unless the open file has the size and hash that were saved."""
    algorithm = saved.digest.partition(":")[0]
    if algorithm not in ALGORITHMS:
        raise too_new(path, FORMAT_VERSION + 1)
    found = file_digest(file, algorithm)
    if found.size != saved.size:
        raise DamagedCheckpoint(
            f"{path} is cut off or altered: it has {found.size:,} bytes, {saved.size:,} were saved."
        )
    if found.digest != saved.digest:
        raise DamagedCheckpoint(f"{path} was altered after it was saved: its {algorithm} hash is another one.")


def check_shards(path: Path, shards: Iterable[ShardFile]) -> None:
    """Raise DamagedCheckpoint unless the shards of the checkpoint at `path` are the files that were saved."""
    for shard in shards:
        name = shards_folder(path) / shard.file
        with open_file(name) as file:
            check_digest(file, name, FileDigest(shard.size, shard.digest))


@contextmanager
def open_file(path: Path) -> Iterator[FileIO]:
    """Open the file for reading; raises DamagedCheckpoint if it is missing or cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing.") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}.") from error


def check_state_dict_keys(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raise CheckpointError unless `found` has exactly the expected keys; `where` names the checkpoint."""
    wanted, present = dict.fromkeys(expected), dict.fromkeys(found)
    missing = [key for key in wanted if key not in present]
    unexpected = [key for key in present if key not in wanted]
    if not missing and not unexpected:
        return
    lines = [f"{where} belongs to another task, or to this one with other settings:"]
    if missing:
        lines.append(f"  {len(missing)} missing: {first_names(missing)}")
    if unexpected:
        lines.append(f"  {len(unexpected)} unexpected: {first_names(unexpected)}")
    raise CheckpointError("\n".join([*lines, _remedy(missing, unexpected)]))


def check_shapes(expected: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if tensors of the same name differ in shape; `where` names the checkpoint."""
    differing = [
        f"{key}: {tuple(found[key].shape)} saved, {tuple(tensor.shape)} expected"
        for key, tensor in expected.items()
        if isinstance(tensor, Tensor) and isinstance(found.get(key), Tensor) and found[key].shape != tensor.shape
    ]
    if differing:
        shown = "\n".join(f"  {line}" for line in differing[:NAMES_SHOWN])
        more = f"\n  and {len(differing) - NAMES_SHOWN} more" if len(differing) > NAMES_SHOWN else ""
        raise CheckpointError(
            f"{where} has tensors of other shapes than the task:\n{shown}{more}\n"
            f"  Give the task the settings it was trained with; they are in the run folder's config.yaml."
        )


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share exactly if they are the same bytes in the same arrangement."""
    storage = tensor.untyped_storage()
    return (
        storage.device,
        storage.data_ptr(),
        storage.nbytes(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


class PayloadVisitor:
    """Converts a payload, container by container, and calls `take` with every tensor and its place in the payload."""

    def __init__(self, take: Callable[[Tensor, str], Tensor]) -> None:
        self._take = take
        self._open: set[int] = set()

    def convert(self, value: Any, place: str) -> Any:
        """Return the value with its tensors replaced by `take`; raises UserError for a value that cannot be saved."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._take(_plain_tensor(value, place), place)
        if type(value) in _SEQUENCES or type(value) in _MAPPINGS:
            return self._container(value, place)
        if type(value) is torch.Size:
            return tuple(value)
        return self._numpy(value, place)

    def _container(self, value: Any, place: str) -> Any:
        if id(value) in self._open:
            raise UserError(f"The checkpoint's value at '{place}' contains itself and cannot be saved.")
        self._open.add(id(value))
        try:
            if type(value) in _MAPPINGS:
                return self._mapping(value, place)
            return type(value)([self.convert(item, f"{place}[{index}]") for index, item in enumerate(value)])
        finally:
            self._open.discard(id(value))

    def _mapping(self, value: Any, place: str) -> Any:
        converted = type(value)()
        for key, item in value.items():
            inner = f"{place}.{key}" if place else str(key)
            # The place after a key is its name, so a key is never a tensor.
            if isinstance(key, Tensor):
                raise _not_plain(key, f"{inner} (the key)")
            plain_key = self.convert(key, f"{inner} (the key)")
            converted[plain_key] = self.convert(item, inner)
        versions = getattr(value, "_metadata", None)  # of a module's state dict: load_state_dict reads it
        if versions is not None:
            converted._metadata = self.convert(versions, f"{place}._metadata")
        return converted

    def _numpy(self, value: Any, place: str) -> Any:
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            item = value.item()
            if type(item) in _PLAIN:
                return item
        if numpy is not None and type(value) is numpy.ndarray:
            try:
                return self._take(torch.from_numpy(value.copy()), place)
            except TypeError:
                raise _not_plain(value, place) from None
        raise _not_plain(value, place)


def _plain_tensor(tensor: Tensor, place: str) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
        raise _not_plain(tensor, place)
    return tensor.detach()


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _not_plain(value: Any, place: str) -> UserError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Tensor) and value.is_meta:
        name = "a tensor without data (device 'meta')"
    return UserError(
        f"A checkpoint cannot hold the value at '{place}': {name}. Only tensors, numbers, text, bytes, None and "
        f"list, tuple, set, dict of these can be read back without running code: save str(value), float(value), "
        f"a dict of its attributes, or value.state_dict() instead."
    )


def _with_shards(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content with the tensors that several ranks have written."""
    from trainkit.checkpoint.shard_files import load_shards  # which takes half a second to import

    check_shards(path, CheckpointEntry.of(path, content[HEADER], size=0, digest="").shards)
    return load_shards(content, shards_folder(path))


def _unpickled(file: FileIO, path: Path, *, verified: bool) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise _holds_code(path, error) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if verified:
            raise
        # An altered archive makes torch raise errors of any kind.
        raise DamagedCheckpoint(f"{path} is damaged: {str(error).splitlines()[0]}.") from error


def _check_archive(file: FileIO, path: Path) -> None:
    start = file.read(4)
    if start[:2] == b"\x80\x02" or start[:1] in b"(}]c":
        raise CheckpointError(
            f"{path} is a pickle, which can run code when it is read; trainkit reads only its own checkpoints. "
            f"If you trust it, load it in your task's constructor with torch.load."
        )
    try:
        with zipfile.ZipFile(file) as archive:
            # torch skips a part that is marked as a folder, and then reads memory that nobody has written.
            odd = [part.filename for part in archive.infolist() if part.external_attr or part.compress_type]
            damaged = odd[0] if odd else archive.testzip()
    except Exception as error:
        # An altered archive makes zipfile raise a dozen kinds of errors.
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


def _not_a_checkpoint(path: Path, content: object) -> CheckpointError:
    keys = f" Its keys: {', '.join(map(str, list(content)[:10]))}." if isinstance(content, dict) else ""
    return CheckpointError(
        f"{path} was not saved by trainkit, so there is no run to continue in it.{keys} To start from its weights, "
        f"load them in your task's constructor: self.load_state_dict(torch.load(path, weights_only=True))"
    )


def _remedy(missing: list[str], unexpected: list[str]) -> str:
    prefixes = {key.split(".", 1)[0] + "." for key in unexpected if "." in key}
    for prefix in sorted(prefixes):
        if missing and {prefix + key for key in missing} <= set(unexpected):
            return f"  The keys have the prefix '{prefix}' in front: it was saved from inside a wrapper."
    near = nearest(missing[0], unexpected) if missing else ""
    return f" {near} Give the task the settings it was trained with; they are in the run folder's config.yaml."
