"""Shards on the disk: what one rank holds of a payload's tensors, through torch.distributed.checkpoint.

step_100.shards/
__0_0.distcp       the pieces that process 0 holds
__1_0.distcp
.metadata          which piece is where; read as data, never as code
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from trainkit.checkpoint.entry import CheckpointError, DamagedCheckpoint, ShardFile
from trainkit.checkpoint.files import digest_of, fastest_algorithm
from trainkit.checkpoint.shards import TensorShard, wanted_tensors, with_tensors

_ALLOWED = {  # of what `.metadata` may name
    "torch": {"Size", "device"},
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
AllGather = Callable[[Any], list[Any]]
T = TypeVar("T")


class ShardWriter:
    """Every process's pieces on their way into files of one folder, on a file system that all processes share."""

    def __init__(self, folder: Path, pieces: Sequence[TensorShard], *, process: int, all_gather: AllGather) -> None:
        """Know which process writes what; collective. Raises CheckpointError on every process if one of them failed."""
        self._folder, self._process = folder, process
        self._planner = _PiecePlanner(pieces)
        self._writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self._planner.set_up_planner({}, is_coordinator=process == 0)
        self._writer.set_up_storage_writer(process == 0)
        plans = check_all_ranks(
            all_gather(capture_error(lambda: self._writer.prepare_local_plan(self._planner.create_local_plan())))
        )
        plans, self._metadata = self._planner.create_global_plan(plans)
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[process])

    def write(self) -> ShardResult:
        """Leave this process's pieces in files, on the disk; may be called in any thread."""
        results = self._writer.write_data(self._plan, self._planner).wait()
        return ShardResult(results, _described(self._folder, f"__{self._process}_*"))

    def finish(self, wrote: Sequence[ShardResult]) -> list[ShardFile]:
        """Describe on the main process what all have written, and return all files."""
        self._writer.finish(self._metadata, [part.results for part in wrote])
        return [*(file for part in wrote for file in part.files), *_described(self._folder, ".metadata")]


class ShardResult(NamedTuple):
    """What one process has written."""

    results: list[WriteResult]
    files: list[ShardFile]


def load_shards(payload: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the payload with its tensors, read from the shards in the folder, which have been checked."""
    wanted = wanted_tensors(payload)
    flats = {name: torch.empty(elements, dtype=dtype) for name, (elements, dtype) in wanted.items()}
    _read(folder, {name: flat for name, flat in flats.items() if len(flat)})
    return with_tensors(payload, flats)


def _read(folder: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of `state`, whole, by reading in this process alone."""
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _PiecePlanner(DefaultSavePlanner):
    """Plans to write pieces, each as a part of a one-dimensional tensor."""

    def __init__(self, pieces: Sequence[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {(piece.name, piece.start): piece for piece in pieces if len(piece.elements)}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(piece) for piece in self._pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        assert index.offset is not None
        return self._pieces[index.fqn, index.offset[0]].elements.detach()


def _item(piece: TensorShard) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size([piece.start]), sizes=piece.elements.size())
    properties = TensorProperties(dtype=piece.elements.dtype)
    return WriteItem(
        index=MetadataIndex(piece.name, torch.Size([piece.start])),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size([piece.whole])),
    )


class _Reader(FileSystemReader):
    """Reads the metadata as what it is: numbers, names, and the few classes that hold them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        metadata = _Unpickler(io.BytesIO(path.read_bytes()), path).load()
        if not isinstance(metadata, Metadata):
            raise DamagedCheckpoint(f"{path} holds no description of shards.")
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


def _described(folder: Path, pattern: str) -> list[ShardFile]:
    files = []
    for path in sorted(folder.glob(pattern)):
        with open(path, "rb", buffering=0) as file:
            files.append(ShardFile(path.name, *digest_of(file, fastest_algorithm())))
    return files


def capture_error(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return what the work returns, or why it failed: the other processes wait to be told."""
    try:
        return work(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def check_all_ranks(told: Sequence[tuple[Any, str | None]]) -> list[Any]:
    """Return what all processes have come to; raise CheckpointError if one of them failed."""
    for process, (_, why) in enumerate(told):
        if why is not None:
            raise CheckpointError(
                f"process {process} could not write its shard: {why}. Earlier checkpoints are intact."
            )
    return [value for value, _ in told]
