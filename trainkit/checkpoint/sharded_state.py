"""State of which each rank holds shards: ShardedState as it is saved, StoredTensor as it is read from the disk."""

from __future__ import annotations

import copy
import mmap
import re
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit.errors import DamagedCheckpoint
from trainkit.files import first_line

PLACE = "trainkit_shard"
"""The key of a placeholder under which the name of its tensor stands."""
_CONTENT = re.compile(r"[^/]+/data/\d+")  # the name of a tensor's bytes in an archive of torch.save
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a part of a zip archive: its name and extra fields follow, then its bytes


@dataclass(frozen=True)
class TensorShard:
    """Consecutive elements of a tensor that this rank holds, in the order in which they lie in memory."""

    name: str  # of the tensor; the same on every rank
    elements: Tensor  # (elements,)
    start: int
    numel: int  # elements of the complete tensor

    @property
    def place(self) -> str:
        """A name that no other shard of this rank has."""
        return f"{self.name} from {self.start}"


@dataclass
class ShardedState:
    """The state of a task and its optimizers with placeholders for tensors, and this rank's shards of these."""

    task: dict[str, Any]
    optimizers: list[dict[str, Any]]
    shards: list[TensorShard] = field(default_factory=list)


def shard_placeholder(name: str, like: Tensor) -> dict[str, Any]:
    """Return the value that represents a sharded tensor in a payload."""
    return {PLACE: name, "shape": tuple(like.shape), "stride": tuple(like.stride()), "dtype": like.dtype}


def replace_placeholders(payload: Any, by: Callable[[dict[str, Any]], Any]) -> None:
    """Replace each placeholder in a payload that was read from a file by what `by` returns for it."""
    items = payload.items() if isinstance(payload, dict) else enumerate(payload)
    for key, value in list(items):
        if isinstance(value, dict) and PLACE in value:
            payload[key] = by(value)
        elif isinstance(value, (dict, list)):
            replace_placeholders(value, by)


@dataclass(frozen=True)
class StoredChunk:
    """The elements `start` to `stop` of a tensor, in an archive of torch.save within a file."""

    path: Path
    offset: int  # of the archive, in bytes
    length: int
    start: int
    stop: int


class StoredTensor:
    """A tensor on the disk, in chunks that several ranks may have written.

    Its elements are numbered in the order in which they lie in memory.

    Args:
        like: A tensor on the meta device with the shape, strides and dtype.
        chunks: All elements, in order.

    """

    def __init__(self, like: Tensor, chunks: Sequence[StoredChunk]) -> None:
        self.chunks, self._like = chunks, like
        self.shape, self.dtype = like.shape, like.dtype

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self._like.dim()

    def stride(self) -> tuple[int, ...]:
        """Return the strides, in elements."""
        return self._like.stride()

    def read(self, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to `stop`, shape (stop - start,); no others are read.

        Raises DamagedCheckpoint if they are not in the files.
        """
        size = self.dtype.itemsize
        # Bytes, since NumPy, through which they are filled, has no bfloat16.
        content = torch.empty((stop - start) * size, dtype=torch.uint8)
        for chunk in self.chunks:
            first, last = max(start, chunk.start), min(stop, chunk.stop)
            if first < last:
                into = content.numpy().data[(first - start) * size : (last - start) * size]
                _read_elements(chunk, first, into, size=size)
        return content.view(self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return the tensor in memory, as a copy of a tensor that is mapped from a file is."""
        return self.read(0, self.shape.numel()).as_strided(self.shape, self.stride())


class TensorOfShards(StoredTensor):
    """A tensor of shards that ranks have left in files, from which they are mapped.

    Raises ValueError unless `shards` are all elements of the tensor that the placeholder stands for.
    """

    def __init__(self, placeholder: dict[str, Any], shards: Sequence[TensorShard]) -> None:
        shape, self._shards = placeholder["shape"], sorted(shards, key=lambda shard: shard.start)
        like = torch.empty(prod(shape), dtype=placeholder["dtype"], device="meta")
        super().__init__(like.as_strided(shape, placeholder["stride"]), ())
        starts = [0, *accumulate(len(shard.elements) for shard in self._shards)]
        if starts != [*(shard.start for shard in self._shards), prod(shape)]:
            raise ValueError(f"the shards of {placeholder[PLACE]} are not all of its {prod(shape):,} elements")

    def read(self, start: int, stop: int) -> Tensor:
        parts = [shard.elements[max(start - shard.start, 0) : max(stop - shard.start, 0)] for shard in self._shards]
        return torch.cat([torch.empty(0, dtype=self.dtype), *parts])


def in_memory(state: Any) -> Any:
    """Return a copy of the state of a checkpoint with all of its tensors in memory."""
    # Torch copies no compressed sparse tensors. Each container is visited once: a hostile file shares them.
    copies: dict[int, Any] = {}
    visited: set[int] = set()
    rest = [state]
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor) and value.layout not in (torch.strided, torch.sparse_coo):
            copies[id(value)] = value.clone()
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in visited:
            visited.add(id(value))
            rest += value.values() if isinstance(value, Mapping) else value
    return copy.deepcopy(state, copies)


def elements(saved: Tensor | StoredTensor, start: int, stop: int, *, like: Tensor) -> Tensor:
    """Return in memory the elements from `start` to `stop` in the order of those of `like`, shape (stop - start,).

    `like` has the same shape and no gaps. Others are read only if they lie in another order in the file.
    """
    dimensions = zip(saved.shape, saved.stride(), like.stride(), strict=True)
    # The stride of a dimension of size 1 does not matter: no element lies beyond it.
    if any(saved_stride != other for size, saved_stride, other in dimensions if size > 1):
        ordered = torch.empty_strided(like.shape, like.stride(), dtype=saved.dtype)
        saved = ordered.copy_(saved if isinstance(saved, Tensor) else in_memory(saved))
    if isinstance(saved, StoredTensor):
        return saved.read(start, stop)
    return saved.detach().as_strided((saved.numel(),), (1,))[start:stop].clone()


def _read_elements(chunk: StoredChunk, first: int, into: memoryview, *, size: int) -> None:
    """Fill `into` with elements of a chunk, from the number `first` on, each of `size` bytes."""
    try:
        with open(chunk.path, "rb") as file:
            with mmap.mmap(file.fileno(), chunk.offset + chunk.length, access=mmap.ACCESS_READ) as view:
                content, num_bytes = _content_of_archive(view)
            if content < chunk.offset or num_bytes != (chunk.stop - chunk.start) * size:
                _raise_damaged(chunk, "the sizes of its tensors are wrong")
            file.seek(content + (first - chunk.start) * size)
            if file.readinto(into) != len(into):
                _raise_damaged(chunk, "it is cut off")
    except DamagedCheckpoint:
        raise
    except OSError as error:
        raise DamagedCheckpoint(f"{chunk.path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # an altered archive makes zipfile raise a dozen kinds of errors
        _raise_damaged(chunk, first_line(error), error)


def _content_of_archive(view: mmap.mmap) -> tuple[int, int]:
    """Return the position and number of the bytes of the one tensor in the archive at the end of `view`."""
    with zipfile.ZipFile(view) as archive:  # type: ignore[call-overload] # it reads and seeks as a file does
        (part,) = (part for part in archive.infolist() if _CONTENT.fullmatch(part.filename))
    if part.compress_type:
        raise ValueError("a tensor in it is compressed")
    name, extra = _LOCAL_HEADER.unpack_from(view, part.header_offset)
    return part.header_offset + _LOCAL_HEADER.size + name + extra, part.file_size


def _raise_damaged(chunk: StoredChunk, what: str, cause: Exception | None = None) -> NoReturn:
    raise DamagedCheckpoint(f"{chunk.path} is damaged: {what}.") from cause
