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
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from trainkit.checkpoints.digest import digest_of, fastest_algorithm
from trainkit.checkpoints.entry import CheckpointError, DamagedCheckpoint, ShardFile
from trainkit.checkpoints.shards import Piece, wanted_tensors, with_tensors

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


def write_pieces(folder: Path, pieces: Sequence[Piece], *, process: int, all_gather: AllGather) -> list[ShardFile]:
    """Leave every process's pieces in files of the folder, and return what all of them are; collective.

    Raises CheckpointError on every process if one of them failed. `folder` is there, and on a file system that all
    processes share.
    """
    planner = _PiecePlanner(pieces)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    planner.set_up_planner({}, is_coordinator=process == 0)
    writer.set_up_storage_writer(process == 0)
    own_plan, why = _or_failure(lambda: writer.prepare_local_plan(planner.create_local_plan()))
    plans = _agreed(all_gather((own_plan, why)))
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[process])
    results, why = _or_failure(lambda: writer.write_data(plan, planner).wait())
    files, unread = _or_failure(lambda: _described(folder, f"__{process}_*"))
    told = _agreed(all_gather(((results, files), why or unread)))
    if process != 0:
        return [file for _, found in told for file in found]
    writer.finish(metadata, [result for result, _ in told])
    return [*(file for _, found in told for file in found), *_described(folder, ".metadata")]


def filled(payload: dict[str, Any], folder: Path) -> dict[str, Any]:
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

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {(piece.name, piece.start): piece for piece in pieces if len(piece.elements)}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(piece) for piece in self._pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        assert index.offset is not None
        return self._pieces[index.fqn, index.offset[0]].elements.detach()


def _item(piece: Piece) -> WriteItem:
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


def _or_failure(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what the work returns, or why it failed: the other processes wait to be told."""
    try:
        return work(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _agreed(told: Sequence[tuple[Any, str | None]]) -> list[Any]:
    """Return what all processes have come to; raise CheckpointError if one of them failed."""
    for process, (_, why) in enumerate(told):
        if why is not None:
            raise CheckpointError(
                f"process {process} could not write its shard: {why}. Earlier checkpoints are intact."
            )
    return [value for value, _ in told]
