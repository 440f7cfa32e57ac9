"""What a checkpoint may hold: tensors, and plain Python values and containers."""

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

from trainkit.checkpoint.entry import (
    FORMAT_VERSION,
    HEADER,
    NAMES_SHOWN,
    CheckpointEntry,
    CheckpointError,
    DamagedCheckpoint,
    ShardFile,
    first_names,
    shards_of,
    too_new,
)
from trainkit.checkpoint.files import ALGORITHMS, FileDigest, digest_of
from trainkit.errors import UserError, nearest

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_SEQUENCES: tuple[type, ...] = (list, tuple, set)
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)


def plain(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the payload as it can be saved: without numpy's types, and with each tensor's own bytes only.

    A view of a larger storage (a gradient bucket, a fusion buffer) is copied, since `torch.save` would write the whole
    storage; tensors that are the same bytes stay one. Raises UserError with the place of a value that would need
    code to be read back.
    """
    copies: dict[tuple[object, ...], Tensor] = {}

    def own_bytes(tensor: Tensor, place: str) -> Tensor:
        if tensor.layout is not torch.strided or _bytes_of(tensor) >= tensor.untyped_storage().nbytes():
            return tensor
        identity = storage_key(tensor)
        if identity not in copies:
            copies[identity] = tensor.clone()
        return copies[identity]

    converted: dict[str, Any] = PayloadVisitor(own_bytes).convert(payload, "")
    return converted


def payload_bytes(payload: object) -> int:
    """Return about how many bytes the payload takes in a file."""
    if isinstance(payload, Tensor):
        return _bytes_of(payload) + 256
    if isinstance(payload, dict):
        return sum(payload_bytes(key) + payload_bytes(value) for key, value in payload.items())
    if isinstance(payload, (list, tuple, set)):
        return sum(map(payload_bytes, payload))
    return len(payload) + 8 if isinstance(payload, (str, bytes)) else 8


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common exactly when they are the same bytes in the same arrangement."""
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
    """Converts a payload, container by container, and gives every tensor to `take` with its place in the payload."""

    def __init__(self, take: Callable[[Tensor, str], Tensor]) -> None:
        self._take = take
        self._open: set[int] = set()

    def convert(self, value: Any, place: str) -> Any:
        """Return the value with its tensors as `take` returned them; raise UserError for what cannot be saved."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._take(_plain_tensor(value, place), place)
        if type(value) in _SEQUENCES or type(value) in _MAPPINGS:
            return self._container(value, place)
        if type(value) is torch.Size:
            return tuple(value)
        return self._foreign(value, place)

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
            # What follows a key is a name, so a key is never a tensor.
            if isinstance(key, Tensor):
                raise _refused(key, f"{inner} (the key)")
            plain_key = self.convert(key, f"{inner} (the key)")
            converted[plain_key] = self.convert(item, inner)
        versions = getattr(value, "_metadata", None)  # of a module's state dict: load_state_dict reads it
        if versions is not None:
            converted._metadata = self.convert(versions, f"{place}._metadata")
        return converted

    def _foreign(self, value: Any, place: str) -> Any:
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            item = value.item()
            if type(item) in _PLAIN:
                return item
        if numpy is not None and type(value) is numpy.ndarray:
            try:
                return self._take(torch.from_numpy(value.copy()), place)
            except TypeError:
                raise _refused(value, place) from None
        raise _refused(value, place)


def _plain_tensor(tensor: Tensor, place: str) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
        raise _refused(tensor, place)
    return tensor.detach()


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _refused(value: Any, place: str) -> UserError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Tensor) and value.is_meta:
        name = "a tensor without data (device 'meta')"
    return UserError(
        f"A checkpoint cannot hold the value at '{place}': {name}. Only tensors, numbers, text, bytes, None and "
        f"list, tuple, set, dict of these can be read back without running code: save str(value), float(value), "
        f"a dict of its attributes, or value.state_dict() instead."
    )


def with_metadata(
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
            check_digest(file, path, FileDigest(entry.size, entry.digest))
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


def check_digest(file: FileIO, path: Path, saved: FileDigest) -> None:
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
            check_digest(file, name, FileDigest(shard.size, shard.digest))


def _with_shards(content: dict[str, Any], path: Path, *, map_location: Any) -> dict[str, Any]:
    """Return the content with the tensors that several ranks have written."""
    from trainkit.checkpoint.shard_files import load_shards  # which takes half a second to import

    check_shards(path, CheckpointEntry.of(path, {**content[HEADER], "size": 0, "digest": ""}).shards)
    whole = load_shards(content, shards_of(path))
    if str(map_location) == "cpu":
        return whole
    moved: dict[str, Any] = PayloadVisitor(lambda tensor, place: tensor.to(map_location)).convert(whole, "")
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


def check_state_dict_keys(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raise UserError with the keys that are missing in `found` or not expected there; `where` names the checkpoint."""
    wanted, present = list(expected), list(found)
    missing = [key for key in wanted if key not in set(present)]
    unexpected = [key for key in present if key not in set(wanted)]
    if not missing and not unexpected:
        return
    lines = [f"{where} belongs to another task, or to this one with other settings:"]
    if missing:
        lines.append(f"  {len(missing)} missing: {first_names(missing)}")
    if unexpected:
        lines.append(f"  {len(unexpected)} unexpected: {first_names(unexpected)}")
    raise CheckpointError("\n".join([*lines, _remedy(missing, unexpected)]))


def check_shapes(expected: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    """Raise UserError with the tensors that have the same name but another shape; `where` names the checkpoint."""
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


def _remedy(missing: list[str], unexpected: list[str]) -> str:
    prefixes = {key.split(".", 1)[0] + "." for key in unexpected if "." in key}
    for prefix in sorted(prefixes):
        if missing and {prefix + key for key in missing} <= set(unexpected):
            return f"  The keys have the prefix '{prefix}' in front: it was saved from inside a wrapper."
    near = nearest(missing[0], unexpected) if missing else ""
    return f" {near} Give the task the settings it was trained with; they are in the run folder's config.yaml."
