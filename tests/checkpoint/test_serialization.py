import copy
import json
import os
import pickle
import resource
import shutil
import zipfile
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.checkpoint.test_store import forge
from tests.tasks import Fitting, sgd
from trainkit import Data, Trainer
from trainkit.checkpoint.serialization import HEADER, check_header, payload_bytes, plain
from trainkit.checkpoint.store import CheckpointStore, Monitor, load_from, resolve
from trainkit.errors import CheckpointError, UserError
from trainkit.files import FileDigest, file_digest
from trainkit.optim.chained_optimizer import ChainedOptimizer


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


def test_numpy_values_come_back_and_keys_become_python_values(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::-1]
    payload = {
        "best": np.float64(0.5), "flag": np.bool_(True), "count": np.int32(3), np.int64(7): 1,
        "text": np.str_("a"), "array": array, "words": np.arange(3, dtype=np.uint32),
    }  # fmt: skip
    store = CheckpointStore(tmp_path)
    loaded = store.load(store.save(payload, name="a", step=0, epoch=0))
    kinds = [type(loaded[key]) for key in ("best", "flag", "count", "text")]
    assert kinds == [np.float64, np.bool_, np.int32, str]
    assert (loaded["best"], loaded["flag"], loaded["count"], loaded[7], loaded["text"]) == (0.5, True, 3, 1, "a")
    assert loaded["array"].tolist() == array.tolist()
    assert loaded["words"].dtype == np.uint32
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


# ---- Hostile files

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("../x") | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["name", "step", "epoch", "metrics", "reason", "saved_at", "size", "digest", "format_version", "shards"]
CHANGES = st.dictionaries(st.sampled_from([*FIELDS, "number", "file", "path", "other"]), JSON_VALUES, max_size=3)
PATCHES = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=4)


def digest_of(path: Path) -> FileDigest:
    with open(path, "rb", buffering=0) as file:
        return file_digest(file, "sha256")


def patched(content: bytes, patches: list[tuple[int, int, bytes]]) -> bytes:
    for number, removed, added in patches:
        place = number % (len(content) + 1)
        content = content[:place] + added + content[place + removed :]
    return content


def with_record(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the pickle in a checkpoint file, whose checksums are right afterwards."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(name), change(content) if name.endswith("data.pkl") else content)


def loads_or_refuses(folder: Path) -> None:
    store = CheckpointStore(folder)
    file = folder / "step_1.pt"
    calls: list[Callable[[], object]] = [
        lambda: load_from(folder),
        lambda: load_from(file),
        lambda: resolve(folder, "best"),
        lambda: store.ranked("loss", "min"),
        lambda: [str(entry) for entry in store.entries()],
    ]
    for call in calls:
        with suppress(CheckpointError):
            call()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    store = CheckpointStore(folder, monitor=Monitor("loss", "min"))
    store.save({"task": {"weight": torch.arange(4.0)}}, name="step_1", step=1, epoch=0, metrics={"loss": 1.0})
    return folder


@pytest.fixture
def forged(original: Path, tmp_path: Path) -> Callable[[], Path]:
    def copy() -> Path:
        shutil.rmtree(tmp_path / "forged", ignore_errors=True)
        return Path(shutil.copytree(original, tmp_path / "forged"))

    return copy


SHARED = hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])


@SHARED
@hypothesis.given(changes=CHANGES, removed=st.none() | st.sampled_from(FIELDS), listed=st.booleans())
def test_any_header_loads_or_is_refused(
    forged: Callable[[], Path], changes: dict[str, Any], removed: str | None, listed: bool
) -> None:
    folder = forged()
    file, manifest = folder / "step_1.pt", folder / "manifest.json"
    content = torch.load(file, weights_only=True)
    content[HEADER] |= changes
    content[HEADER].pop(removed, None)
    torch.save(content, file)
    if listed:
        forge(manifest, lambda document: document["checkpoints"][0].update(digest_of(file)._asdict()))
    else:
        manifest.unlink()
    loads_or_refuses(folder)


SHARD = {"file": "0.pt", "size": 1, "digest": "sha256:0"}


@pytest.mark.parametrize(
    "shard",
    [[], {}, SHARD | {"size": "1"}, SHARD | {"file": "../0.pt"}, SHARD | {"file": "/0.pt"}, SHARD | {"more": 1}],
)
def test_shards_that_are_not_files_of_the_checkpoint_are_refused(original: Path, shard: object) -> None:
    header = torch.load(original / "step_1.pt", weights_only=True)[HEADER]
    check_header(header | {"shards": [SHARD]})
    with pytest.raises(ValueError, match="no valid shards"):
        check_header(header | {"shards": [SHARD, shard]})


@SHARED
@hypothesis.given(patches=PATCHES)
def test_any_pickle_in_a_file_loads_or_is_refused(forged: Callable[[], Path], patches: Any) -> None:
    folder = forged()
    with_record(folder / "step_1.pt", lambda content: patched(content, patches))
    loads_or_refuses(folder)
    forge(
        folder / "manifest.json",
        lambda document: document["checkpoints"][0].update(digest_of(folder / "step_1.pt")._asdict()),
    )
    loads_or_refuses(folder)


@SHARED
@hypothesis.given(changes=CHANGES, document=CHANGES | JSON_VALUES, removed=st.none() | st.sampled_from(FIELDS))
def test_any_manifest_loads_or_is_refused(
    forged: Callable[[], Path], changes: dict[str, Any], document: Any, removed: str | None
) -> None:
    folder = forged()

    def change(manifest: dict[str, Any]) -> None:
        manifest["checkpoints"][0].update(changes)
        manifest["checkpoints"][0].pop(removed, None)
        if isinstance(document, dict):
            manifest.update(document)
        else:
            manifest["monitor"] = document

    forge(folder / "manifest.json", change)
    loads_or_refuses(folder)
    (folder / "manifest.json").write_text(json.dumps(document))
    loads_or_refuses(folder)


@SHARED
@hypothesis.given(patches=PATCHES)
def test_any_bytes_of_a_manifest_load_or_are_refused(forged: Callable[[], Path], patches: Any) -> None:
    folder = forged()
    manifest = folder / "manifest.json"
    manifest.write_bytes(patched(manifest.read_bytes(), patches))
    loads_or_refuses(folder)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"checkpoints":' * 200_000, "9" * 10_000])
def test_deep_and_long_manifests_are_rebuilt(forged: Callable[[], Path], text: str) -> None:
    folder = forged()
    (folder / "manifest.json").write_text(text)
    assert load_from(folder).entry.step == load_from(folder / "step_1.pt").entry.step == 1
    CheckpointStore(folder).save({}, name="step_2", step=2, epoch=0)
    assert load_from(folder).entry.step == 2


def test_manifest_that_is_too_large_or_a_pipe_is_rebuilt(forged: Callable[[], Path]) -> None:
    folder = forged()
    os.truncate(folder / "manifest.json", 1 << 40)
    assert load_from(folder).entry.step == 1
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    os.mkfifo(folder / "step_3.pt")
    assert load_from(folder).entry.step == 1


def large_tensor(content: bytes) -> bytes:
    shape = content.index(b"K\x00K\x04\x85")  # offset 0, shape (4,)
    return content[: shape + 2] + pickle.LONG1 + b"\x06" + (1 << 40).to_bytes(6, "little") + content[shape + 4 :]


def large_storage(content: bytes) -> bytes:
    end = content.index(b"K\x04t")
    return content[:end] + pickle.LONG1 + b"\x06" + (1 << 40).to_bytes(6, "little") + content[end + 2 :]


def large_array(content: bytes) -> bytes:
    size = pickle.LONG1 + b"\x06" + (1 << 40).to_bytes(6, "little")
    return b"\x80\x02cbuiltins\nbytearray\n" + size + b"\x85R."


@pytest.mark.parametrize("change", [large_tensor, large_storage, large_array])
@pytest.mark.parametrize("listed", [True, False])
def test_tensor_that_claims_more_than_the_file_holds_is_refused(
    forged: Callable[[], Path], change: Callable[[bytes], bytes], listed: bool
) -> None:
    folder = forged()
    file = folder / "step_1.pt"
    with_record(file, change)
    if listed:
        forge(folder / "manifest.json", lambda document: document["checkpoints"][0].update(digest_of(file)._asdict()))
    else:
        (folder / "manifest.json").unlink()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        load_from(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10  # KiB


def test_compressed_record_is_refused(forged: Callable[[], Path]) -> None:
    file = forged() / "step_1.pt"
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    forge(file.parent / "manifest.json", lambda document: document["checkpoints"][0].update(digest_of(file)._asdict()))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_from(file)


def test_header_without_a_format_names_the_field(forged: Callable[[], Path]) -> None:
    file = forged() / "step_1.pt"
    content = torch.load(file, weights_only=True)
    content[HEADER]["format_version"] = "2"
    torch.save(content, file)
    file.with_name("manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_1\.pt is damaged: its header has no valid format_version"):
        load_from(file)


@pytest.fixture
def resume_altered(make_trainer: Any, tmp_path: Path) -> Callable[..., None]:
    """Return a function that resumes a run with changes in its checkpoint."""
    data = Data(train=TensorDataset(torch.ones(4, 1)), batch_size=2)
    make_trainer(callbacks=["checkpoint"], run_dir=tmp_path / "run").fit(Fitting(torch.nn.Linear(1, 1), sgd), data)
    [file] = (tmp_path / "run" / "checkpoints").glob("*.pt")
    content = torch.load(file, weights_only=True)

    def resume(section: str, value: object) -> None:
        whole = isinstance(content[section], dict) and isinstance(value, dict)
        torch.save({**content, section: {**content[section], **value} if whole else value}, tmp_path / "altered.pt")
        trainer = make_trainer(max_duration="2epoch", callbacks=["checkpoint"])
        trainer.fit(Fitting(torch.nn.Linear(1, 1), sgd), data, resume=tmp_path / "altered.pt")

    return resume


COUNTERS = [
    *({"step": "x"}, {"samples": -1}, {"seconds": None}),
    *({"metrics": {"loss": value}} for value in ([], "9" * 9, "nan", 10**400, torch.zeros(()))),
    {"metrics": {5: 1.0}},
]


@pytest.mark.parametrize("key", ["task", "optimizer", "state", "loader", "strategy"])
def test_run_state_that_is_missing_is_named(resume_altered: Any, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"altered\.pt was not saved by a run: it has no valid {key}\."):
        resume_altered(key, None)


@pytest.mark.parametrize("counters", COUNTERS, ids=str)
def test_a_counter_of_another_kind_is_named(resume_altered: Any, counters: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=rf"it has no valid state\.{next(iter(counters))}\."):
        resume_altered("state", counters)


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("optimizer", {"param_groups": [{}]}),
        ("optimizer", {"param_groups": 3}),
        ("spikes", []),
        ("state", {"skipped_steps": 3}),
        ("means", [3]),
        ("rng", [3]),
    ],
)
def test_state_that_cannot_be_restored_is_refused(resume_altered: Any, section: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"altered\.pt holds a state that cannot be restored"):
        resume_altered(section, value)


def adam(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, lr=0.1, **settings)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": adam(),
    "fused": adam(fused=True),
    "amsgrad": adam(amsgrad=True),
    "tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False),
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe"),
    "chained": lambda parameters: ChainedOptimizer(*(torch.optim.Adam([each]) for each in parameters)),
    "subclass": lambda parameters: Subclass(parameters, lr=0.1),
    "limited": lambda parameters: Limited(parameters, lr=0.1, fused=True),
    "own": lambda parameters: Own(parameters, {"lr": 0.1, "plan": {"warm": 1}, "later": None, "history": []}),
    "rows": lambda parameters: Rows(parameters, lr=0.1),
}


class Subclass(torch.optim.Adam):
    """Steps as torch's, and keeps a list in its groups."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.register_step_post_hook(lambda *_: self.param_groups[0].setdefault("history", []).append(1.0))


class Limited(torch.optim.Adam):
    """Its step is its own, and ends in torch's fused kernel."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Own(torch.optim.Optimizer):
    """Keeps all that torch's optimizers do not: nested containers, and state of no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["later"], group["history"] = {"mean": 3}, [*group["history"], 1.0]
            for parameter in group["params"]:
                self.state[parameter].setdefault("past", []).append([parameter.grad[:1].clone(), (3, None, "text")])
        self.state["all"] = {"count": torch.ones(4), "mask": torch.ones(1).expand(2, 3)}


class Rows(torch.optim.SGD):
    """Its step is its own: a momentum for each row, and of a vector nothing but a tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 1:
                    self.state[parameter] = parameter.grad.clone()
                else:
                    self.state[parameter]["momentum_buffer"] = parameter.grad.mean(1)


COLUMNS = Data(train=TensorDataset(torch.ones(4, 3)), batch_size=2)


def columns(optimizer: str) -> Fitting:
    return Fitting(torch.nn.Linear(3, 2), lambda task: OPTIMIZERS[optimizer](task.parameters()))


@pytest.fixture(scope="module")
def saved_states(tmp_path_factory: Any) -> Callable[[str], dict[str, Any]]:
    """Return a function that returns the content of a checkpoint of `columns`, by the name of its optimizer."""
    contents: dict[str, dict[str, Any]] = {}

    def content(name: str) -> dict[str, Any]:
        if name not in contents:
            folder = tmp_path_factory.mktemp(name)
            settings: dict[str, Any] = {"callbacks": ["checkpoint"], "report": False, "max_duration": "1epoch"}
            Trainer(**settings, run_dir=folder).fit(columns(name), COLUMNS)
            [file] = (folder / "checkpoints").glob("*.pt")
            contents[name] = torch.load(file, weights_only=True)
        return copy.deepcopy(contents[name])

    return content


def resume_columns(make_trainer: Any, name: str, content: dict[str, Any], path: Path) -> None:
    torch.save(content, path)
    trainer = make_trainer(max_duration="2epoch", callbacks=["checkpoint"])
    trainer.fit(columns(name), COLUMNS, resume=path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_is_resumed(
    make_trainer: Any, saved_states: Any, tmp_path: Path, name: str
) -> None:
    resume_columns(make_trainer, name, saved_states(name), tmp_path / "x.pt")


def of_moment(value: object, name: str = "exp_avg") -> Callable[[Any], None]:
    return lambda optimizer: optimizer["state"][0].update({name: value})


def of_group(name: str, value: object) -> Callable[[Any], None]:
    return lambda optimizer: optimizer["param_groups"][0].update({name: value})


ALTERED: list[tuple[str, Callable[[Any], Any], str]] = [
    (
        "fused",
        of_moment(torch.zeros(0)),
        r"state\[0\]\.exp_avg is a tensor of the shape \(0,\), and its parameter .*\(2, 3\)",
    ),
    ("fused", of_moment(torch.zeros(())), r"state\[0\]\.exp_avg is a tensor of the shape \(\)"),
    ("fused", of_moment(torch.zeros(3, 2)), r"state\[0\]\.exp_avg is a tensor of the shape \(3, 2\)"),
    ("fused", of_moment(torch.zeros(12).as_strided((2, 3), (1, 1), 8)), r"state\[0\]\.exp_avg has more elements"),
    ("fused", of_moment(torch.zeros(0), "step"), r"state\[0\]\.step is a tensor of the shape \(0,\)"),
    (
        "Adam",
        of_moment(torch.zeros(1).expand(2**38)),
        r"state\[0\]\.exp_avg is a tensor of the shape \(274877906944,\)",
    ),
    ("Adam", of_moment(torch.zeros(1).expand(2, 3)), r"state\[0\]\.exp_avg has more elements than are saved"),
    ("Adam", of_moment(torch.zeros(2, 3, device="meta")), r"state\[0\]\.exp_avg is a tensor without plain values, of"),
    ("Adam", of_moment(3), r"state\[0\]\.exp_avg is a value of the type int"),
    ("Adam", of_moment(None), r"state\[0\]\.exp_avg is None"),
    ("Adam", lambda optimizer: optimizer["state"][0].pop("exp_avg_sq"), r"state\[0\]\.exp_avg_sq is missing"),
    ("Adam", of_group("amsgrad", True), r"state\[0\]\.max_exp_avg_sq is missing"),
    ("Adam", lambda optimizer: optimizer["state"].update({0: [3]}), r"state\[0\] is a value of the type list"),
    ("Adam", of_group("lr", "x"), r"param_groups\[0\]\.lr is 'x', and 0\.1 in this run"),
    ("Adam", of_group("lr", [0.1]), r"param_groups\[0\]\.lr is a value of the type list, and 0\.1"),
    ("Adam", of_group("lr", 10**400), r"param_groups\[0\]\.lr is a value of the type int"),
    ("Adam", of_group("lr", None), r"param_groups\[0\]\.lr is None"),
    ("Adam", of_group("betas", (0.9,)), r"param_groups\[0\]\.betas is not a list of 2 values"),
    ("Adam", of_group("params", [1, 0]), r"param_groups do not number the parameters"),
    ("momentum", of_moment(torch.zeros(1), "momentum_buffer"), r"state\[0\]\.momentum_buffer is a tensor"),
    ("Adafactor", of_moment(torch.zeros(2, 2), "row_var"), r"state\[0\]\.row_var is a tensor of the shape \(2, 2\)"),
    ("Adafactor", of_moment(torch.zeros(2), "row_var"), r"state\[0\]\.row_var is a tensor of the shape \(2,\)"),
    ("LBFGS", of_moment([torch.zeros(3)], "old_dirs"), r"state\[0\]\.old_dirs\[0\] has the shape \(3,\), not \(8,\)"),
    ("chained", of_moment(torch.zeros(0)), r"state\[0\]\.exp_avg is a tensor"),
    ("chained", of_group("optimizer", 5), r"param_groups\[0\]\.optimizer is not 0, as in this run"),
    ("subclass", of_moment(torch.zeros(0)), r"state\[0\]\.exp_avg is a tensor of the shape \(0,\)"),
    ("limited", of_moment(torch.zeros(0)), r"state\[0\]\.exp_avg is a tensor of the shape \(0,\)"),
    ("subclass", lambda optimizer: optimizer["state"][0].pop("step"), r"state\[0\]\.step is missing"),
    ("Adam", of_moment(torch.zeros(2, 3).to_sparse()), r"state\[0\]\.exp_avg is a tensor without plain values, of"),
    ("Adam", of_moment(torch.tensor(1j), "step"), r"state\[0\]\.step is a tensor of the shape \(\)"),
    (
        "own",
        of_moment([torch.zeros(1).expand(2**38)], "past"),
        r"state\[0\]\.past\[0\] has more elements than are saved",
    ),
    ("rows", of_moment(torch.zeros(1).expand(7), "mask"), r"state\[0\]\.mask has more elements than are saved"),
    ("rows", of_moment(torch.zeros(2, 3, device="meta"), "mask"), r"state\[0\]\.mask has more elements than are saved"),
]


@pytest.mark.parametrize("case", ALTERED, ids=[f"{name} {index}" for index, (name, *_) in enumerate(ALTERED)])
def test_an_altered_optimizer_state_is_refused(
    make_trainer: Any, saved_states: Any, tmp_path: Path, case: tuple[str, Callable[[Any], Any], str]
) -> None:
    name, change, message = case
    content = saved_states(name)
    change(content["optimizer"])
    with pytest.raises(CheckpointError, match=rf"x\.pt holds a state that .*: (optimizer\.)?({message})"):
        resume_columns(make_trainer, name, content, tmp_path / "x.pt")


def test_a_long_name_in_an_altered_optimizer_state_is_shortened(
    make_trainer: Any, saved_states: Any, tmp_path: Path
) -> None:
    content = saved_states("Adam")
    content["optimizer"]["state"][0]["x" * 10**6] = torch.zeros(1).expand(2, 3)
    with pytest.raises(CheckpointError, match=r"cannot continue from: state\[0\]\.xxx") as caught:
        resume_columns(make_trainer, "Adam", content, tmp_path / "x.pt")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("section", ["optimizer", "callbacks", "config"])
def test_containers_that_are_shared_many_levels_deep_are_refused_at_once(
    make_trainer: Any, saved_states: Any, tmp_path: Path, section: str
) -> None:
    content, shared = saved_states("Adam"), [1]
    for _ in range(200):
        shared = [shared, shared]
    content[section] = {"state": {0: {"exp_avg": shared}}, "param_groups": content["optimizer"]["param_groups"]}
    with pytest.raises(
        CheckpointError, match=r"x\.pt was not saved by trainkit: a list or mapping in it has two places"
    ):
        resume_columns(make_trainer, "Adam", content, tmp_path / "x.pt")


TENSORS = st.lists(st.integers(0, 4), max_size=3).map(torch.zeros)
LEAVES = TENSORS | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
STATES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@SHARED
@hypothesis.given(
    name=st.sampled_from(["momentum", "fused", "amsgrad", "AdamW"]),
    changes=st.dictionaries(st.sampled_from(["step", "exp_avg", "exp_avg_sq", "momentum_buffer", "x"]), STATES),
    settings=st.dictionaries(st.sampled_from(["lr", "betas", "eps", "momentum", "weight_decay", "x"]), STATES),
)
def test_any_optimizer_state_trains_or_is_refused(
    make_trainer: Any, saved_states: Any, changes: dict[str, Any], settings: dict[str, Any], name: str
) -> None:
    content = saved_states(name)
    content["optimizer"]["state"][0].update(changes)
    content["optimizer"]["param_groups"][0].update(settings)
    with suppress(UserError), TemporaryDirectory() as folder:
        resume_columns(make_trainer, name, content, Path(folder) / "x.pt")
