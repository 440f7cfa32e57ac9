"""One checkpoint file: metadata, tensors and plain containers; nothing in a file can run code."""

from __future__ import annotations

import os
import re
import socket
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from trainkit.checkpoint.sharded_state import StoredTensor, in_memory
from trainkit.distributed.collectives import Collectives, same_errors
from trainkit.errors import CheckpointError, DamagedCheckpoint, UserError, nearest
from trainkit.files import ALGORITHMS, FileDigest, ShardFile, file_digest, first_line

if TYPE_CHECKING:
    from typing import NotRequired

FORMAT_VERSION = 2
"""1: one file for each checkpoint; 2: shards beside it."""
HEADER = "trainkit_checkpoint"
"""The key under which a checkpoint file holds its own metadata."""
NUMPY = "trainkit_numpy"
"""The key under which a file holds, as a tensor, an array (`array`) or a number (`scalar`) of numpy."""
NAMES_SHOWN = 10  # of a list in a message
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")
"""A checkpoint's name."""
DAMAGED_TEXT = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Errors of reading JSON or a state that was altered."""
RUN_STATE: dict[str, type | tuple[type, ...]] = {
    "task": dict,
    "optimizer": dict,
    "schedules": (list, dict),
    "spikes": list,
    "scaler": dict,
    "state": dict,
    "loader": dict,
    "rng": list,
    "callbacks": dict,
}
"""The keys of a run's payload that a resumed run reads, and the types of their values."""
_ON_DISK = ("task", "optimizer", "evaluation_weights", "callbacks", "strategy")
"""Keys of a payload whose tensors are read when they are used."""
_COUNTERS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("step", "epoch", "position", "samples"), int),
    "seconds": (int, float),
    "metrics": dict,
    "evaluation_due": bool,
}

_NOT_FINITE = ("nan", "inf", "-inf")  # as text, in a manifest
_SHARD = re.compile(r"[.]?[A-Za-z0-9_][A-Za-z0-9_.]*")  # the name of its file
# Exact types: a subclass may carry code or attributes that reading would not bring back.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_SEQUENCES: tuple[type, ...] = (list, tuple, set)
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)


class Labels(TypedDict):
    """The metadata of a checkpoint that its saver gives."""

    name: str  # letters, digits and '_.=+-'
    step: int
    epoch: int
    metrics: NotRequired[Mapping[str, float]]
    reason: NotRequired[str]


def with_metadata(payload: dict[str, Any], labels: Labels) -> dict[str, Any]:
    """Return the content of a file: the payload, with the metadata that the manifest lists in front."""
    check_name(labels["name"])
    if HEADER in payload:
        raise UserError(f"The key '{HEADER}' of a checkpoint is reserved; use another one.")
    header = {
        "name": labels["name"],
        "step": int(labels["step"]),
        "epoch": int(labels["epoch"]),
        "metrics": {key: float(value) for key, value in labels.get("metrics", {}).items()},
        "reason": labels.get("reason", "interval"),
        "saved_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "format_version": FORMAT_VERSION,
    }
    return {HEADER: header, **plain(payload)}


def check_name(name: str) -> None:
    """Raise UserError unless the name can be a checkpoint's."""
    if not NAME.fullmatch(name):
        raise UserError(f"A checkpoint's name consists of letters, digits and '_.=+-', got {name!r}.")


def plain(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the payload in the form that is saved: numpy's types marked as such, each tensor with its own bytes only.

    A view of a larger storage (a gradient bucket, a fusion buffer) is copied, since `torch.save` would write all of the
    storage; tensors that share their bytes share the copy. Raises UserError with the place of a value that could not
    be read back without running code.
    """
    copies: dict[tuple[object, ...], Tensor] = {}

    def own_bytes(tensor: Tensor, path: str) -> Tensor:
        # Sparse tensors have no storage to compare with.
        if tensor.layout is not torch.strided or _bytes_of(tensor) >= tensor.untyped_storage().nbytes():
            return tensor
        key = storage_key(tensor)
        if key not in copies:
            copies[key] = tensor.clone()
        return copies[key]

    converted: dict[str, Any] = PayloadVisitor(own_bytes).convert(payload)
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


def read_checkpoint(path: Path, saved: FileDigest | None, comm: Collectives) -> dict[str, Any]:
    """Return the content of a checkpoint file, its header included, after verifying that it is what was saved.

    Tensors of the state of the task and of its optimizers stay on the disk until they are read: they are mapped into
    memory, or a StoredTensor if ranks have written shards. Without a digest the file is verified by the checksums
    inside it. Each file is verified by one process of each machine. Collective; errors are raised on every process.
    """
    neighbours = _processes_of_this_machine(comm)
    # One process of each machine hashes the file: reading it once for each rank would keep the disk busy for longer.
    first, turn = comm.process == neighbours[0], neighbours.index(comm.process)
    # Separate blocks, each with a collective at its end: no process may unpickle before the file is verified.
    with same_errors(comm), open_file(path) as file:
        if saved is not None and first:
            _check_digest(file, path, saved)
        _check_archive(file, path, checksums=saved is None and first)
    with same_errors(comm), open_file(path):
        content: dict[str, Any] = _unpickled(path, verified=saved is not None)
        header = _header_of(content, path)
        # Before `_with_numpy`, which visits every place.
        _check_is_tree(content, path)
        with refuse_altered_state(str(path)):
            _with_numpy(content)
    shards = [ShardFile(**shard) for shard in header.get("shards", ())]
    if not shards:
        return content
    from trainkit.checkpoint.shard_files import load_shards  # which takes half a second to import

    with same_errors(comm):
        # The processes of a machine share the files, which are large.
        verify_shards(path, shards[turn :: len(neighbours)])
    with same_errors(comm):
        load_shards(content, shards_folder(path), shards)
    return content


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ValueError unless a checkpoint's metadata, from its own file or a manifest, have the right types."""
    integers = dict.fromkeys(("step", "epoch", "format_version", "number", "size"), int)
    kinds = {**integers, "name": str, "metrics": dict, "reason": str, "saved_at": str, "digest": str, "shards": list}
    optional = {"number": 0, "size": 0, "digest": "", "shards": []}
    fields = {**optional, **header}
    wrong = [key for key, kind in kinds.items() if type(fields.get(key)) is not kind]
    wrong += [key for key in integers if key not in wrong and not 0 <= fields[key] < 2**63]
    # The name becomes a file's: it must not lead to another folder.
    if not wrong and not NAME.fullmatch(fields["name"]):
        wrong.append("name")
    metrics = [] if wrong else fields["metrics"].items()
    # JSON has no NaN and no infinity: in a manifest they are text.
    if not all(isinstance(key, str) and (_is_number(value) or value in _NOT_FINITE) for key, value in metrics):
        wrong.append("metrics")
    if not wrong and not all(map(_is_shard, fields["shards"])):
        wrong.append("shards")
    if wrong:
        raise ValueError(f"its header has no valid {', '.join(wrong)}")


def check_payload(payload: Mapping[str, Any], where: str, *, keys: Iterable[str] = RUN_STATE) -> None:
    """Raise CheckpointError unless the payload has the keys of a run's; `where` names the checkpoint."""
    wrong = [key for key in keys if not isinstance(payload.get(key), RUN_STATE[key])]
    if not isinstance(payload.get("strategy", {}), dict):
        wrong.append("strategy")
    if "state" in keys and "state" not in wrong:
        counters = payload["state"]
        wrong += [f"state.{key}" for key, kind in _COUNTERS.items() if not isinstance(counters.get(key), kind)]
        wrong += [f"state.{key}" for key, value in counters.items() if isinstance(value, int) and value < 0]
        metrics = [] if wrong else counters["metrics"].items()
        if not all(isinstance(key, str) and _is_number(value) for key, value in metrics):
            wrong.append("state.metrics")
    if wrong:
        raise CheckpointError(f"{where} was not saved by a run: it has no valid {', '.join(wrong)}.")


@contextmanager
def refuse_altered_state(where: str) -> Iterator[None]:
    """Raise CheckpointError for an error of the block, which restores the state in the checkpoint `where`."""
    try:
        yield
    # It names the cause and the remedy already.
    except UserError:
        raise
    except DAMAGED_TEXT as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{where} holds a state that cannot be restored ({what}).") from error


def saved_weights(payload: Mapping[str, Any], where: str, *, to_evaluate: bool = True) -> dict[str, Any]:
    """Return a run's parameters and buffers, or those that it was validated with; raises CheckpointError."""
    check_payload(payload, where, keys=["task"])
    weights = payload.get("evaluation_weights") if to_evaluate else None
    chosen: dict[str, Any] = weights if isinstance(weights, dict) else payload["task"]
    return chosen


def verify_file(path: Path, saved: FileDigest) -> None:
    """Raise DamagedCheckpoint unless the file has the size and hash that were saved."""
    with open_file(path) as file:
        _check_digest(file, path, saved)


def verify_shards(path: Path, shards: Iterable[ShardFile]) -> None:
    """Raise DamagedCheckpoint unless the shards of the checkpoint at `path` are the files that were saved."""
    for shard in shards:
        verify_file(shards_folder(path) / shard.file, FileDigest(shard.size, shard.digest))


@contextmanager
def open_file(path: Path) -> Iterator[FileIO]:
    """Open the file for reading; raises DamagedCheckpoint if it is missing or cannot be read."""
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for its writer
            raise DamagedCheckpoint(f"{path} is not a file.")
        with open(path, "rb", buffering=0) as file:
            yield file
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing.") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}.") from error


def check_state_dict(expected: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError unless `saved` has the expected keys and shapes; `where` names the checkpoint."""
    missing = [key for key in expected if key not in saved]
    unexpected = [key for key in saved if key not in expected]
    if missing or unexpected:
        lines = [f"{where} belongs to another task, or to this one with other settings:"]
        if missing:
            lines.append(f"  {len(missing)} missing: {first_names(missing)}")
        if unexpected:
            lines.append(f"  {len(unexpected)} unexpected: {first_names(unexpected)}")
        raise CheckpointError("\n".join([*lines, _remedy(missing, unexpected)]))
    kinds = (Tensor, StoredTensor)
    wrong = [key for key, value in expected.items() if isinstance(value, Tensor) and not isinstance(saved[key], kinds)]
    if wrong:
        raise CheckpointError(f"{where} has values that are not tensors: {first_names(wrong)}.")
    differing = [
        f"{key}: {tuple(saved[key].shape)} saved, {tuple(tensor.shape)} expected"
        for key, tensor in expected.items()
        if isinstance(tensor, Tensor) and saved[key].shape != tensor.shape
    ]
    if differing:
        shown = "\n".join(f"  {line}" for line in differing[:NAMES_SHOWN])
        more = f"\n  and {len(differing) - NAMES_SHOWN} more" if len(differing) > NAMES_SHOWN else ""
        raise CheckpointError(
            f"{where} has tensors of other shapes than the task:\n{shown}{more}\n"
            f"  Give the task the settings it was trained with; they are in the run folder's config.yaml."
        )


def shards_folder(path: Path) -> Path:
    """Return the folder beside the checkpoint at `path` that holds its shards."""
    return path.with_suffix(".shards")


def too_new(path: Path, version: int) -> CheckpointError:
    """Return the error of a file that a later version of trainkit wrote."""
    return CheckpointError(
        f"{path} was written by a newer trainkit (format {version}, this one reads up to {FORMAT_VERSION}). "
        f"Type: pip install --upgrade trainkit-torch"
    )


def first_names(names: Sequence[str]) -> str:
    """Return the first of many names, for a message."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share exactly if they are the same bytes in the same arrangement."""
    storage = tensor.untyped_storage()
    # Not id(): each access makes a new object for the same storage.
    memory = storage.device, storage.data_ptr(), storage.nbytes()
    return *memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class PayloadVisitor:
    """Converts a payload, container by container, and calls `take` with every tensor and its place in the payload."""

    def __init__(self, take: Callable[[Tensor, str], Tensor]) -> None:
        self._take = take
        self._open: set[int] = set()  # ids of the containers around the present value, which keeps them alive
        # Alive until all is converted, or two of them could be taken for one at the same address.
        self._arrays: list[Tensor] = []

    def convert(self, value: Any, path: str = "") -> Any:
        """Return the value with its tensors replaced by `take`; raises UserError for a value that cannot be saved."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            # A subclass, such as a DTensor, and a tensor without data cannot be read back with weights_only.
            if type(value) not in (Tensor, torch.nn.Parameter) or value.is_meta:
                raise _not_plain(value, path)
            # Detached: a graph cannot be saved, and a Parameter would be saved with its class.
            return self._take(value.detach(), path)
        if type(value) in _SEQUENCES or type(value) in _MAPPINGS:
            return self._container(value, path)
        if type(value) is torch.Size:
            return tuple(value)
        return self._numpy(value, path)

    def _hashable(self, value: Any, path: str) -> Any:
        """Return a key or an element of a set: a number of numpy's as Python's, which is equal to it."""
        converted = self.convert(value, path)
        return value.item() if type(converted) is dict else converted

    def _container(self, value: Any, path: str) -> Any:
        # Otherwise the recursion would not end.
        if id(value) in self._open:
            raise UserError(f"The checkpoint's value at '{path}' contains itself and cannot be saved.")
        self._open.add(id(value))
        try:
            if type(value) in _MAPPINGS:
                return self._mapping(value, path)
            convert = self._hashable if type(value) is set else self.convert
            return type(value)([convert(item, f"{path}[{index}]") for index, item in enumerate(value)])
        finally:
            self._open.discard(id(value))

    def _mapping(self, value: Any, path: str) -> Any:
        converted = type(value)()
        for key, item in value.items():
            inner = f"{path}.{key}" if path else str(key)
            # The place after a key is its name, so a key is never a tensor.
            if isinstance(key, Tensor):
                raise _not_plain(key, f"{inner} (the key)")
            plain_key = self._hashable(key, f"{inner} (the key)")
            converted[plain_key] = self.convert(item, inner)
        versions = getattr(value, "_metadata", None)  # of a module's state dict: load_state_dict reads it
        if versions is not None:
            converted._metadata = self.convert(versions, f"{path}._metadata")
        return converted

    def _numpy(self, value: Any, path: str) -> Any:
        import numpy as np

        if isinstance(value, (np.str_, np.bytes_)):
            return value.item()
        if type(value) is np.ndarray or isinstance(value, np.generic):
            kind = "array" if type(value) is np.ndarray else "scalar"
            with suppress(TypeError, ValueError):  # of Python objects, dates, the other byte order
                self._arrays.append(torch.from_numpy(np.array(value, order="C")))
                return {NUMPY: kind, "value": self._take(self._arrays[-1], path)}
        raise _not_plain(value, path)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _not_plain(value: Any, path: str) -> UserError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Tensor) and value.is_meta:
        name = "a tensor without data (device 'meta')"
    return UserError(
        f"A checkpoint cannot hold the value at '{path}': {name}. Only tensors, numbers, text, bytes, None and "
        f"list, tuple, set, dict of these can be read back without running code: save str(value), float(value), "
        f"a dict of its attributes, or value.state_dict() instead."
    )


def _check_digest(file: FileIO, path: Path, saved: FileDigest) -> None:
    algorithm = saved.digest.partition(":")[0]
    # A later version may hash differently; it is not damage.
    if algorithm not in ALGORITHMS:
        raise too_new(path, FORMAT_VERSION + 1)
    # The size first: it tells a file that was cut off without reading it.
    size = os.fstat(file.fileno()).st_size
    if size != saved.size:
        raise DamagedCheckpoint(f"{path} is cut off or altered: it has {size:,} bytes, {saved.size:,} were saved.")
    if file_digest(file, algorithm).digest != saved.digest:
        raise DamagedCheckpoint(f"{path} was altered after it was saved: its {algorithm} hash is another one.")


def _processes_of_this_machine(comm: Collectives) -> list[int]:
    hosts = comm.all_gather_object(socket.gethostname())
    return [process for process, host in enumerate(hosts) if host == hosts[comm.process]]


def _header_of(content: Any, path: Path) -> dict[str, Any]:
    """Return the header of a file's content; raises CheckpointError unless this version of trainkit can read it."""
    header = content.get(HEADER) if isinstance(content, dict) else None
    if not isinstance(header, dict):
        keys = f" Its keys: {', '.join(map(str, list(content)[:10]))}." if isinstance(content, dict) else ""
        raise CheckpointError(
            f"{path} was not saved by trainkit, so there is no run to continue in it.{keys} To start from its weights, "
            f"load them in your task's constructor: self.load_state_dict(torch.load(path, weights_only=True))"
        )
    version = header.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise too_new(path, version)
    if isinstance(version, int) and version < 1:
        raise CheckpointError(f"{path} has format {version}, which no released trainkit wrote; it cannot be read.")
    try:
        check_header(header)
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}.") from None
    checked: dict[str, Any] = header
    return checked


def _check_is_tree(content: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if a container is in two places, as in no file of ours.

    Whoever visits all places of lists that are shared n levels deep visits 2**n.
    """
    # The ids stay unique: `content` holds every container.
    seen: set[int] = set()
    rest: list[Any] = [content]
    while rest:
        value = rest.pop()
        if type(value) not in (*_SEQUENCES, *_MAPPINGS) or not value:
            continue
        if id(value) in seen:
            raise CheckpointError(f"{path} was not saved by trainkit: a list or mapping in it has two places.")
        seen.add(id(value))
        rest += [*value, *value.values()] if type(value) in _MAPPINGS else value
        # An OrderedDict of a state dict has attributes, such as `_metadata`, which are pickled too.
        rest += vars(value).values() if hasattr(value, "__dict__") else ()


def _unpickled(path: Path, *, verified: bool) -> Any:
    """Return the content of a file, in memory except for what a rank may need a part of."""
    try:
        # mmap: a rank reads from the disk only the tensors that it holds, not the state of all ranks.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if isinstance(content, dict):
            # A later save may remove the file, and small values are not worth keeping it mapped.
            content.update(in_memory({key: value for key, value in content.items() if key not in _ON_DISK}))
        return content
    except UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        what = f" (it names {match[1]})" if match else ""
        raise CheckpointError(
            f"{path} holds Python objects{what}, and reading these can run code, so it is refused: a checkpoint holds "
            f"only tensors and plain values. If you trust the file, load it in your task's constructor with torch.load."
        ) from error
    except OSError:
        raise
    except MemoryError as error:
        raise CheckpointError(f"{path} needs more memory than there is.") from error
    except Exception as error:
        # An altered archive makes torch raise errors of any kind.
        kind, what = (CheckpointError, "cannot be read") if verified else (DamagedCheckpoint, "is damaged")
        raise kind(f"{path} {what}: {first_line(error)}.") from error


def _with_numpy(value: Any) -> Any:
    """Return the content of a file with the arrays and numbers of numpy's that were saved; changes its containers."""
    if type(value) in _MAPPINGS:
        tensor = value.get("value") if NUMPY in value else None
        if isinstance(tensor, Tensor):
            array = tensor.clone().numpy()  # not of the file, which a later save may replace
            return array if value[NUMPY] == "array" else array[()]
        for key, item in value.items():
            value[key] = _with_numpy(item)
    elif type(value) is list:
        value[:] = map(_with_numpy, value)
    return tuple(map(_with_numpy, value)) if type(value) is tuple else value


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1023)  # float() fails beyond


def _is_shard(shard: object) -> bool:
    kinds = {"file": str, "size": int, "digest": str}
    if not isinstance(shard, dict) or {key: type(value) for key, value in shard.items()} != kinds:
        return False
    return _SHARD.fullmatch(shard["file"]) is not None


def _check_archive(file: FileIO, path: Path, *, checksums: bool) -> None:
    # The first bytes of a pickle of torch before 1.6 and of protocols 0 to 2; a zip archive begins with PK.
    start = file.read(4)
    if start[:2] == b"\x80\x02" or start[:1] in b"(}]c":
        raise CheckpointError(
            f"{path} is a pickle, which can run code when it is read; trainkit reads only its own checkpoints. "
            f"If you trust it, load it in your task's constructor with torch.load."
        )
    try:
        with zipfile.ZipFile(file) as archive:
            # torch skips a part that is marked as a folder, and then reads memory that nobody has written.
            # A compressed part could fill the memory.
            odd = [part.filename for part in archive.infolist() if part.external_attr or part.compress_type]
            damaged = odd[0] if odd else archive.testzip() if checksums else None
    except Exception as error:
        # An altered archive makes zipfile raise a dozen kinds of errors.
        raise DamagedCheckpoint(f"{path} is not a checkpoint, or is cut off: {error}.") from error
    if damaged is not None:
        raise DamagedCheckpoint(f"{path} is damaged: its part '{damaged}' is not what was saved.")
    file.seek(0)


def _remedy(missing: list[str], unexpected: list[str]) -> str:
    prefixes = {key.split(".", 1)[0] + "." for key in unexpected if "." in key}
    for prefix in sorted(prefixes):
        if missing and {prefix + key for key in missing} <= set(unexpected):
            return f"  The keys have the prefix '{prefix}' in front: it was saved from inside a wrapper."
    near = nearest(missing[0], unexpected) if missing else ""
    return f" {near} Give the task the settings it was trained with; they are in the run folder's config.yaml."
