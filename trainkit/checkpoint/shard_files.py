"""The shards of one checkpoint on the disk, through torch.distributed.checkpoint.

    step_100.shards/
        __0_0.distcp       the shards that process 0 holds
        __1_0.distcp
        .metadata          the file and position of each shard; read as data, never as code

Importing this module takes half a second, so others import it when they need it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from trainkit.checkpoint.sharded_state import PLACE, StoredChunk, StoredTensor, TensorShard, replace_placeholders
from trainkit.distributed.collectives import Collectives, same_errors
from trainkit.errors import CheckpointError, DamagedCheckpoint
from trainkit.files import ShardFile, disk_error_in, disk_error_text, fastest_algorithm, file_digest, first_line

_ALLOWED = {  # classes and functions that `.metadata` may name
    "torch": {"Size", "device"},
    # Private names of torch, which FileSystemWriter pickles.
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
}


class ShardResult(NamedTuple):
    """The files that one process has written."""

    results: list[WriteResult]
    files: list[ShardFile]


class ShardWriter:
    """Writes the shards of all processes to one folder, on a file system that they share.

    Making one is collective: processes learn which of them writes which shards. Raises CheckpointError on every process
    if one of them failed.
    """

    def __init__(self, folder: Path, shards: Sequence[TensorShard], comm: Collectives) -> None:
        self.folder, self._process = folder, comm.process
        self._planner = _ShardPlanner(shards)
        # One file for each process, synced: the checkpoint is listed only after all shards are on the disk.
        self._writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        # An empty state dict, since `_ShardPlanner` makes the items of its shards itself.
        self._planner.set_up_planner({}, is_coordinator=comm.is_main)
        self._writer.set_up_storage_writer(comm.is_main)
        # Each process makes the global plan by itself, from the plans of all: torch's coordinator would have to
        # broadcast it.
        with same_errors(comm), self._errors_named():
            plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        plans, self._metadata = self._planner.create_global_plan(comm.all_gather_object(plan))
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[comm.process])

    def write(self) -> ShardResult:
        """Write this process's shards to files, on the disk afterwards; may be called in any thread."""
        with self._errors_named():
            # Without a collective, so that a background thread may call it.
            results = self._writer.write_data(self._plan, self._planner).wait()
            return ShardResult(results, _shard_files(self.folder, f"__{self._process}_*"))

    def finish(self, results: Sequence[ShardResult]) -> list[ShardFile]:
        """Write `.metadata` on the main process, from the results of all processes; return all files."""
        self._writer.finish(self._metadata, [result.results for result in results])
        return [*(file for result in results for file in result.files), *_shard_files(self.folder, ".metadata")]

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Replace an error by a CheckpointError that names this process."""
        try:
            yield
        except Exception as error:
            why, refused = f"{type(error).__name__}: {error}", disk_error_in(error)  # which torch may have replaced
            if refused is not None:
                why = disk_error_text(refused, self.folder, needed=self._planner.num_bytes)
                why = f"{self.folder.parent}: {why}"
            raise CheckpointError(
                f"process {self._process} could not write its shard: {why.rstrip('.')}. Earlier checkpoints are intact."
            ) from error


def load_shards(payload: dict[str, Any], folder: Path, shards: Sequence[ShardFile]) -> None:
    """Replace the placeholders in the payload by tensors in the folder, whose files have been verified."""
    try:
        metadata = _read_metadata(folder)
        sizes = {shard.file: shard.size for shard in shards}
        # A path that leads out of the folder is not among the shards, whose names and hashes the manifest gives.
        unknown = {storage.relative_path for storage in metadata.storage_data.values()} - set(sizes)
        if unknown:
            raise DamagedCheckpoint(f"{folder} is damaged: it names {len(unknown)} files that are not its shards.")
        # A placeholder's shape is data: one of 2**60 elements must not be allocated.
        remaining = sum(sizes.values())
        made: dict[str, StoredTensor] = {}

        def stored(placeholder: dict[str, Any]) -> StoredTensor:
            nonlocal remaining
            name, shape, stride = placeholder[PLACE], placeholder["shape"], placeholder["stride"]
            if name in made:  # a shared tensor, which is read once
                return made[name]
            numel, last = prod(shape), sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            remaining -= numel * placeholder["dtype"].itemsize
            # The others: strides that lead beyond the elements, or before them, would read other memory.
            if remaining < 0 or (numel and last >= numel) or any(step < 0 for step in stride):
                raise ValueError(f"{name} of {numel:,} elements is larger than its shards")
            like = torch.empty(numel, dtype=placeholder["dtype"], device="meta").as_strided(shape, stride)
            made[name] = StoredTensor(like, _chunks(metadata, name, numel, folder=folder, sizes=sizes))
            return made[name]

        replace_placeholders(payload, stored)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # of any kind: what the shards say about themselves was altered
        raise DamagedCheckpoint(f"{folder} is damaged: {first_line(error)}.") from error


def _chunks(metadata: Metadata, name: str, numel: int, *, folder: Path, sizes: Mapping[str, int]) -> list[StoredChunk]:
    """Return the chunks of a tensor in order; raises ValueError unless they are all of its elements, in the files."""
    saved = metadata.state_dict_metadata.get(name)
    chunks, position = [], 0
    # In order, so that a gap, an overlap or a missing end is seen by the position.
    for chunk in sorted(getattr(saved, "chunks", ()), key=lambda chunk: tuple(chunk.offsets)):
        (start,), (count,) = chunk.offsets, chunk.sizes
        storage = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        if start != position or not 0 <= storage.offset <= sizes[storage.relative_path] - storage.length:
            raise ValueError(f"its elements of {name} from {start:,} on are misplaced")
        position += count
        chunks.append(StoredChunk(folder / storage.relative_path, storage.offset, storage.length, start, position))
    if position != numel:
        raise ValueError(f"it has {position:,} elements of {name}, which has {numel:,}")
    return chunks


def _shard_files(folder: Path, pattern: str) -> list[ShardFile]:
    files = []
    for path in sorted(folder.glob(pattern)):
        with open(path, "rb", buffering=0) as file:
            # Read back from the disk, after torch has written it: torch gives no hash.
            files.append(ShardFile(path.name, *file_digest(file, fastest_algorithm())))
    return files


class _ShardPlanner(DefaultSavePlanner):
    """Plans to write shards, each as a chunk of a one-dimensional tensor."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        # False, or `create_global_plan` would merge the paths of flattened state dicts, which these plans do not have.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # An empty shard has no place in the metadata; another one may start at the same element.
        self._shards = {(shard.name, shard.start): shard for shard in shards if len(shard.elements)}
        self.num_bytes = sum(shard.elements.nbytes for shard in shards)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(shard) for shard in self._shards.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        assert index.offset is not None
        return self._shards[index.fqn, index.offset[0]].elements.detach()


def _item(shard: TensorShard) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size([shard.start]), sizes=shard.elements.size())
    properties = TensorProperties(dtype=shard.elements.dtype)
    return WriteItem(
        index=MetadataIndex(shard.name, torch.Size([shard.start])),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size([shard.numel])),
    )


def _read_metadata(folder: Path) -> Metadata:
    """Return the metadata of the shards, as numbers, names and the few classes that hold them."""
    path = folder / ".metadata"
    metadata = _Unpickler(io.BytesIO(path.read_bytes()), path).load()
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpoint(f"{path} does not describe shards.")
    return metadata


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"{self._path} names {module}.{name}, which can run code, so it is refused.")
