"""Tensors of a sharded checkpoint are read by ranges of their elements, and what the files say is checked first."""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from trainkit.checkpoint import shard_files, sharded_state
from trainkit.checkpoint.serialization import check_state_dict
from trainkit.checkpoint.shard_files import ShardWriter, load_shards
from trainkit.checkpoint.sharded_state import (
    StoredChunk,
    StoredTensor,
    TensorShard,
    elements,
    in_memory,
    shard_placeholder,
)
from trainkit.distributed.collectives import Collectives
from trainkit.errors import CheckpointError, DamagedCheckpoint
from trainkit.files import ShardFile
from trainkit.loops.rollback import is_finite_state

TENSORS = {
    "matrix": torch.randn(7, 5),
    "transposed": torch.randn(4, 6).t(),
    "image": torch.randn(2, 3, 2, 3).to(memory_format=torch.channels_last),
    "halves": torch.randn(11).bfloat16(),
    "flags": torch.rand(9) > 0.5,
    "phases": torch.randn(4, dtype=torch.complex128),
    "infinite": torch.tensor([0.0, torch.inf]),
    "one": torch.randn(1),
    "none": torch.empty(0, 3),
}


def in_order(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """Write each tensor in chunks of at most four elements; the function loads them."""
    parts = [
        TensorShard(name, in_order(tensor)[start : start + 4], start, tensor.numel())
        for name, tensor in TENSORS.items()
        for start in range(0, tensor.numel(), 4)
    ]
    writer = ShardWriter(tmp_path, parts, Collectives())
    files = writer.finish([writer.write()])

    def load(**changed: Any) -> dict[str, Any]:
        payload: Any = {"task": {n: {**shard_placeholder(n, tensor), **changed} for n, tensor in TENSORS.items()}}
        listed = [ShardFile(file.file, (tmp_path / file.file).stat().st_size, file.digest) for file in files]
        load_shards(payload, tmp_path, listed)
        return payload["task"]

    return load


def test_a_copy_in_memory_has_the_bits_and_strides_of_the_tensor(stored):
    for name, tensor in in_memory(stored()).items():
        assert torch.equal(tensor, TENSORS[name]), name
        assert (tensor.dtype, tensor.stride()) == (TENSORS[name].dtype, TENSORS[name].stride())


@pytest.mark.parametrize("name", TENSORS)
def test_every_range_of_elements_is_read(stored, name):
    tensor, flat = stored()[name], in_order(TENSORS[name])
    for start in range(len(flat) + 1):
        for stop in range(start, len(flat) + 1):
            assert torch.equal(tensor.read(start, stop), flat[start:stop])


@pytest.mark.parametrize("name", ["matrix", "transposed", "image"])
@pytest.mark.parametrize("is_stored", [True, False])
def test_elements_come_in_the_order_of_another_layout(stored, name, is_stored):
    saved = stored()[name] if is_stored else TENSORS[name]
    for like in (TENSORS[name], TENSORS[name].contiguous()):
        expected = torch.empty_strided(like.shape, like.stride()).copy_(TENSORS[name])
        found = elements(saved, 3, 17, like=like)
        assert torch.equal(found, in_order(expected)[3:17])
        found.zero_()  # a copy
    assert TENSORS[name].count_nonzero()


def test_only_the_bytes_of_a_range_are_read(stored, monkeypatch):
    matrix, read = stored()["matrix"], []

    def counted(chunk: Any, first: int, into: memoryview, **size: Any) -> None:
        read.append((chunk.start, first, len(into)))
        original(chunk, first, into, **size)

    original = sharded_state._read_elements
    monkeypatch.setattr(sharded_state, "_read_elements", counted)
    elements(matrix, 6, 13, like=TENSORS["matrix"])
    assert read == [(4, 6, 8), (8, 8, 16), (12, 12, 4)]


def test_a_copy_in_memory_keeps_the_versions_of_a_state_dict(stored, tmp_path):
    state = nn.BatchNorm1d(2).state_dict()
    payload = {"task": OrderedDict(state, weight=shard_placeholder("halves", TENSORS["halves"]))}
    payload["task"]._metadata = state._metadata
    load_shards(payload, tmp_path, [ShardFile(f.name, f.stat().st_size, "") for f in tmp_path.iterdir()])
    assert torch.equal(in_memory(payload)["task"]["weight"], TENSORS["halves"])
    assert in_memory(payload)["task"]._metadata == state._metadata != {}


def test_a_shared_tensor_is_read_once(stored, tmp_path):
    matrix = shard_placeholder("matrix", TENSORS["matrix"])
    payload = {"task": {"a": matrix, "b": dict(matrix)}}
    load_shards(payload, tmp_path, [ShardFile(f.name, f.stat().st_size, "") for f in tmp_path.iterdir()])
    assert len({tensor.data_ptr() for tensor in in_memory(payload["task"]).values()}) == 1


def test_a_stored_tensor_of_another_shape_is_refused_by_name(stored):
    saved = stored()
    expected = {**saved, "matrix": torch.zeros(5, 7)}
    with pytest.raises(CheckpointError, match=r"matrix: \(7, 5\) saved, \(5, 7\) expected"):
        check_state_dict(expected, saved, "here")


def test_a_rollback_finds_what_is_not_finite_on_the_disk(stored):
    assert not is_finite_state(stored())
    assert is_finite_state(stored(), except_for=["infinite"])


def altered(folder: Path, change: Callable[[Metadata], Any]) -> None:
    path = folder / ".metadata"
    metadata = shard_files._read_metadata(folder)
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.state_dict_metadata.pop("matrix"), "it has 0 elements of matrix, which has 35"),
        (lambda m: m.state_dict_metadata["matrix"].chunks.pop(), "it has 32 elements of matrix, which has 35"),
        (lambda m: m.state_dict_metadata["matrix"].chunks.pop(1), "its elements of matrix from 8 on are misplaced"),
        (lambda m: m.state_dict_metadata["matrix"].chunks.append(m.state_dict_metadata["one"].chunks[0]), "misplaced"),
        (lambda m: m.storage_data.pop(MetadataIndex("matrix", torch.Size([4]))), "is damaged: "),
        (lambda m: setattr(place_of(m), "offset", -1), "misplaced"),
        (lambda m: setattr(place_of(m), "offset", 2**62), "misplaced"),
        (lambda m: setattr(place_of(m), "length", 2**62), "misplaced"),
        (lambda m: setattr(place_of(m), "offset", "4"), "is damaged: "),
        (lambda m: setattr(place_of(m), "relative_path", "../other"), "names 1 files that are not its shards"),
    ],
)
def test_metadata_that_does_not_place_every_element_once_is_refused(stored, tmp_path, change, message):
    altered(tmp_path, change)
    with pytest.raises(DamagedCheckpoint, match=message):
        stored()


def place_of(metadata: Metadata) -> Any:
    return metadata.storage_data[MetadataIndex("matrix", torch.Size([4]))]


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": (2**40,), "stride": (1,)},
        {"shape": (2**40, 2**40), "stride": (0, 0)},
        {"shape": (7, 5), "stride": (100, 1)},
        {"shape": (7, 5), "stride": (-5, 1)},
        {"shape": (-3, -3), "stride": (3, 1)},
        {"shape": (3, 3), "stride": (1,)},
        {"shape": "33", "stride": (1, 1)},
        {"dtype": 4},
    ],
)
def test_a_placeholder_that_its_shards_cannot_fill_is_refused_before_memory_is_taken(stored, tmp_path, changed):
    payload = {"task": {"w": {**shard_placeholder("matrix", TENSORS["matrix"]), **changed}}}
    with pytest.raises(DamagedCheckpoint):
        load_shards(payload, tmp_path, [ShardFile(f.name, f.stat().st_size, "") for f in tmp_path.iterdir()])


def test_tensors_that_together_are_larger_than_their_shards_are_refused(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "_chunks", lambda *arguments, **settings: [])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    numel = size // (4 * len(TENSORS)) - 8
    stored(shape=(numel,), stride=(1,), dtype=torch.float32)
    with pytest.raises(DamagedCheckpoint, match="is larger than its shards"):
        stored(shape=(numel + 16,), stride=(1,), dtype=torch.float32)


@pytest.mark.parametrize("where", ["in the archive", "at its end", "everywhere"])
def test_an_altered_file_is_damaged_when_it_is_read(stored, tmp_path, where):
    tensors = stored()
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    if where == "everywhere":
        file.write_bytes(bytes(len(content)))
    elif where == "at its end":
        file.write_bytes(content[:-10])
    else:
        file.unlink()
    with pytest.raises(DamagedCheckpoint):
        in_memory(tensors)


@pytest.mark.parametrize(
    ("compression", "extra", "message"),
    [(zipfile.ZIP_DEFLATED, 0, "a tensor in it is compressed"), (zipfile.ZIP_STORED, 60_000, "it is cut off")],
)
def test_an_archive_that_torch_does_not_write_is_damaged(tmp_path, compression, extra, message):
    path = tmp_path / "a.distcp"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data/0", bytes(32))
    content = bytearray(path.read_bytes())
    content[28:30] = extra.to_bytes(2, "little")  # the length of what stands before a part's bytes
    path.write_bytes(content)
    tensor = StoredTensor(torch.empty(8, device="meta"), [StoredChunk(path, 0, len(content), 0, 8)])
    with pytest.raises(DamagedCheckpoint, match=message):
        in_memory(tensor)


def test_an_archive_of_another_size_than_its_chunk_is_damaged(stored):
    matrix = stored()["matrix"]
    chunk = matrix.chunks[0]
    longer = type(chunk)(chunk.path, chunk.offset, chunk.length, 0, 5)
    with pytest.raises(DamagedCheckpoint, match="the sizes of its tensors are wrong"):
        StoredTensor(matrix.read(0, 5), [longer]).read(0, 5)
