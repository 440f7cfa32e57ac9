from collections import Counter, defaultdict, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainkit.checkpoint.serialization import payload_bytes, plain
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import UserError


class Level(IntEnum):
    HIGH = 1


class Marked(torch.Tensor):
    pass


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        (Path("x"), "Path"),
        (lambda: 1, "function"),
        (Level.HIGH, "Level"),
        (Pair(1, 2), "Pair"),
        (defaultdict(int), "defaultdict"),
        (frozenset({1}), "frozenset"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.ones(2).as_subclass(Marked), "Marked"),
        (torch.ones(2, device="meta"), "without data"),
        (np.array(["a"], dtype=object), "ndarray"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (torch.Generator(), "Generator"),
        (type, "type"),
    ],
)
def test_value_that_needs_code_to_be_read_is_refused_with_its_place(value: Any, kind: str) -> None:
    with pytest.raises(UserError, match=rf"'callbacks\.checkpoint\.best\[1\]': .*{kind}"):
        plain({"callbacks": {"checkpoint": {"best": [1, value]}}})


def test_key_that_needs_code_to_be_read_is_refused_with_its_place() -> None:
    with pytest.raises(UserError, match=r"the key"):
        plain({"a": {torch.ones(1): 1}})
    with pytest.raises(UserError, match=r"the key"):
        plain({"a": {Level.HIGH: 1}})


def test_numpy_values_become_python_values_and_tensors(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::-1]
    payload = {
        "best": np.float64(0.5), "flag": np.bool_(True), "count": np.int32(3), np.int64(7): 1,
        "text": np.str_("a"), "array": array, "words": np.arange(3, dtype=np.uint32),
    }  # fmt: skip
    store = CheckpointStore(tmp_path)
    loaded = store.load(store.save(payload, name="a", step=0, epoch=0))
    assert [type(loaded[key]) for key in ("best", "flag", "count", "text")] == [float, bool, int, str]
    assert (loaded["best"], loaded["flag"], loaded["count"], loaded[7], loaded["text"]) == (0.5, True, 3, 1, "a")
    assert loaded["array"].tolist() == array.tolist()
    assert loaded["words"].dtype == torch.uint32
    array[:] = 0
    assert loaded["array"].sum() == 15


def test_container_that_holds_itself_is_refused() -> None:
    ring: list[Any] = [1]
    ring.append({"inner": ring})
    with pytest.raises(UserError, match="contains itself"):
        plain({"ring": ring})
    shared = [1]
    assert plain({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


def test_containers_keep_their_kind() -> None:
    payload = {"size": torch.Size([1, 2]), "count": Counter("aab"), "tuple": (1, [2]), "set": {3}, "complex": 1j}
    converted = plain(payload)
    assert {key: type(value) for key, value in converted.items()} == {
        "size": tuple, "count": Counter, "tuple": tuple, "set": set, "complex": complex,
    }  # fmt: skip
    assert converted == {**payload, "size": (1, 2)}


def test_view_takes_its_own_bytes_only(tmp_path: Path) -> None:
    bucket = torch.randn(1_000_000)
    payload = {
        "weight": bucket[:10].view(2, 5),
        "tied": bucket[:10].view(2, 5),
        "transposed": bucket[:6].view(2, 3).t(),
    }
    store = CheckpointStore(tmp_path)
    entry = store.save(payload, name="a", step=0, epoch=0)
    assert entry.size < 20_000
    loaded = store.load(entry)
    for key, tensor in payload.items():
        assert torch.equal(loaded[key], tensor)
    assert loaded["weight"].data_ptr() == loaded["tied"].data_ptr()


def test_tied_tensors_are_saved_once(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(500, 100))
    store = CheckpointStore(tmp_path)
    entry = store.save({"embedding": weight, "head": weight, "alias": weight.detach()}, name="a", step=0, epoch=0)
    assert entry.size < 1.2 * weight.numel() * 4
    loaded = store.load(entry)
    assert type(loaded["head"]) is torch.Tensor and not loaded["head"].requires_grad
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.ones(1).expand(1000),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3).to(torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.randn(3).to(torch.float8_e4m3fn),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_tensors_of_every_kind_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    store = CheckpointStore(tmp_path)
    loaded = store.load(store.save({"x": tensor}, name="a", step=0, epoch=0))["x"]
    assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape and loaded.layout == tensor.layout
    if tensor.layout == torch.strided:
        assert loaded.stride() == tensor.stride()
    assert torch.equal(loaded.to_dense().to(torch.complex128), tensor.to_dense().to(torch.complex128))


def test_payload_is_not_changed_by_saving(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    inner = {"weight": parameter, "list": [1, 2]}
    payload = {"task": inner}
    CheckpointStore(tmp_path).save(payload, name="a", step=0, epoch=0)
    assert list(payload) == ["task"] and payload["task"] is inner and inner["weight"] is parameter


def test_size_is_estimated_to_a_few_percent(tmp_path: Path) -> None:
    payload = {
        "large": torch.ones(100_000),
        "many": {str(index): torch.ones(10) for index in range(100)},
        "text": "a" * 1000,
    }
    entry = CheckpointStore(tmp_path).save(payload, name="a", step=0, epoch=0)
    assert payload_bytes(payload) == pytest.approx(entry.size, rel=0.05)
