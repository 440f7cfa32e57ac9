"""Deferred initialization: bit for bit the values of the constructor, in little memory, and what is refused by name."""

from __future__ import annotations

import copy
import io
import math
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainkit.strategies.single import SingleStrategy

from tests.marks import EVERY_CASE
from trainkit import TaskModule, Trainer, UserError, deferred_init
from trainkit.model.deferred_init import (
    Operation,
    Recording,
    TensorRef,
    _named_tensors,
    execution_order,
    live_operations,
    make_real,
    records_of,
    replay,
)
from trainkit.task import is_deferred

Build = Callable[[], nn.Module]


def both(build: Build) -> tuple[nn.Module, nn.Module]:
    """Return the module built as usual and in `deferred_init`; both leave the same random numbers."""
    torch.manual_seed(5)
    expected = build()
    drawn = torch.rand(3)
    torch.manual_seed(5)
    with deferred_init():
        module = build()
    assert torch.equal(torch.rand(3), drawn)
    return expected, module


def assert_equal(module: nn.Module, expected: nn.Module) -> None:
    tensors, others = dict(_named_tensors(module)), dict(_named_tensors(expected))
    assert list(tensors) == list(others)
    for name, other in others.items():
        tensor = tensors[name]
        assert torch.equal(tensor, other) and tensor.stride() == other.stride() and tensor.dtype == other.dtype, name
        assert type(tensor) is type(other) and tensor.requires_grad == other.requires_grad, name
    own, theirs = ([id(tensor) for tensor in found.values()] for found in (tensors, others))
    assert [own.index(number) for number in own] == [theirs.index(number) for number in theirs], (
        "the same ones are tied"
    )


def check(build: Build) -> nn.Module:
    expected, module = both(build)
    assert is_deferred(module) and all(tensor.is_meta for tensor in module.parameters())
    copied = copy.deepcopy(module)
    torch.manual_seed(99)  # the recording has its own
    before = torch.get_rng_state()
    for deferred in (module, copied):
        make_real(deferred)
        assert_equal(deferred, expected)
        assert not is_deferred(deferred) and vars(deferred).keys() == vars(expected).keys()
    assert torch.equal(torch.get_rng_state(), before)
    return module


class Embedded(nn.Module):
    """Tied layers, statistics, masks and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight
        self.norm = nn.BatchNorm1d(8)
        self.mask = torch.tril(torch.ones(4, 4))  # an attribute
        self.register_buffer("positions", torch.arange(8.0)[None].expand(2, 8).clone(), persistent=False)
        self.first_positions = self.positions
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]
        self.scale = nn.Parameter(torch.tensor(2.0) * torch.ones(3))
        self.levels = [torch.zeros(3, device=self.head.weight.device), self.head.weight.new_tensor([1.0, 2.0])]
        self.copied = copy.deepcopy(self.norm)
        self.cast = nn.Parameter(self.scale.data.to(device="cpu", dtype=torch.float64))
        self.skipped = nn.utils.skip_init(nn.Linear, 3, 3)
        nn.init.normal_(self.skipped.weight)
        nn.init.zeros_(self.skipped.bias)
        self.to("cpu")
        assert not self.scale.is_meta and self.scale.device.type == "cpu", "as without deferred_init"


def transformer() -> nn.Module:
    """Return a transformer with an initialization of its own."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)

    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.5, a=-0.6, b=0.6)
            nn.init.zeros_(module.bias)

    model.apply(initialize)
    for name, parameter in model.named_parameters():
        if name.endswith("linear2.weight"):
            parameter.data.mul_(1 / math.sqrt(6))
        elif name.endswith("linear1.weight"):
            nn.init.orthogonal_(parameter)
        elif name.endswith("norm1.weight"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                nn.init.normal_(parameter)
        elif name.endswith("norm2.weight"):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    return model


class Views(nn.Module):
    """Parameters that are views of one storage, written through other views."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.empty(6, 8)
        memory.normal_()
        memory.t()[2:5].uniform_(-1, 1)
        memory.view(4, 12)[:, ::3].mul_(2).add_(memory[0, 0])
        memory[1:3].copy_(memory[3:5].flip(0))
        memory.as_strided((3, 3), (9, 1), 2).fill_(0.5)
        memory.view(torch.int32)[5, 5:] = 7
        torch.empty(1).set_(memory.untyped_storage(), 4, (2, 2), (2, 1)).fill_(0.25)
        self.first, self.second = nn.Parameter(memory[:3]), nn.Parameter(memory[3:].t())
        self.register_buffer("all", memory.view(-1))
        self.register_buffer("complex", torch.view_as_complex(torch.randn(3, 2)) * 2)


class Values(nn.Module):
    """A constructor that reads values of tensors, and shapes that depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9))
        if self.weight.sum() > 0:
            nn.init.normal_(self.weight)
        self.large = self.weight[self.weight > 0].detach() * 2
        self.largest = float(self.weight.detach().max())
        self.listed, self.array = self.weight.tolist(), self.weight.detach().numpy().sum()
        self.kept = nn.Parameter(torch.bernoulli(self.weight.detach().sigmoid()))
        self.after = nn.Parameter(torch.randn(2))
        saved = io.BytesIO()
        torch.save({"weight": torch.tensor([[1.0, 2.0]])}, saved)
        self.loaded = nn.Linear(2, 1, bias=False)
        self.loaded.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
        known = torch.tensor([1.0, 2.0])
        known.mul_(torch.full((2,), 3.0)).add_(torch.rand_like(known))
        self.register_buffer("known", known)
        array = np.arange(3, dtype=np.float32)
        self.copied = nn.Parameter(torch.empty(3))
        self.copied.data.copy_(torch.from_numpy(array))
        array[:] = 7


def in_default_fp64() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(2, 3), nn.ParameterList([torch.full((2,), 0.1), torch.rand(3)]))
    finally:
        torch.set_default_dtype(torch.float32)


def spectral() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 5)), parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Linear(2, 2)
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        Embedded,
        lambda: nn.LSTM(3, 4, 2, bidirectional=True),
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
        lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(torch.float64).requires_grad_(False),
        in_default_fp64,
        transformer,
        Views,
    ],
    ids=[
        *["mlp", "embedded", "lstm", "attention", "transformer", "channels_last", "fp64"],
        *["default_fp64", "own_init", "views"],
    ],
)
def test_values_are_those_of_the_constructor(build):
    pickled = pickle.loads(pickle.dumps(both(build)[1]))
    make_real(pickled)
    assert_equal(pickled, check(build))


def test_a_constructor_may_read_values():
    expected, module = both(Values)
    make_real(module)
    assert_equal(module, expected)
    assert (module.largest, module.listed, module.array) == (expected.largest, expected.listed, expected.array)


def test_parametrized_modules_have_their_values():
    module = check(spectral)
    assert parametrize.is_parametrized(module[1], "weight") and module[1].weight.shape == (5, 4)


def test_views_share_their_storage_as_before():
    expected, module = both(Views)
    make_real(module)
    for built in (expected, module):
        with torch.no_grad():
            built.all.fill_(3.0)
        assert built.first.sum() == 72 and built.second.sum() == 72


def test_a_recurrent_module_finds_its_weights_again():
    module = check(lambda: nn.LSTM(3, 4))
    assert all(one is other for one, other in zip(module._flat_weights, module.parameters(), strict=True))
    module(torch.ones(2, 1, 3))[0].sum().backward()


def test_weights_keep_their_attributes_and_references():
    with deferred_init():
        module = nn.Linear(2, 2)
        module.weight.no_decay = True
    weight, reference = module.weight, weakref.ref(module.weight)
    make_real(module)
    assert module.weight is weight and reference() is weight and weight.no_decay and not weight.is_meta


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_models_of_transformers_have_the_values_of_their_constructor(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 8, "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")(num_attention_heads=2, **sizes)
    config.intermediate_size = 16
    check(lambda: transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the tasks' own constructors
def test_tasks_of_the_zoo_have_the_values_of_their_constructor():
    pytest.importorskip("transformers")
    from tests.strategies.pipeline.zoo.tasks import LIBRARY, TASKS

    refused, unequal = [], []
    for name, build in (TASKS | LIBRARY if EVERY_CASE else TASKS).items():
        expected, task = both(build)
        try:
            make_real(task)
        except UserError:
            refused.append(name)
            continue
        values = {name: t for name, t in _named_tensors(task) if t.is_leaf and not t.is_meta and not is_lazy(t)}
        others = {name: t for name, t in _named_tensors(expected) if t.is_leaf and not t.is_meta and not is_lazy(t)}
        if list(values) != list(others) or not all(torch.equal(values[name], others[name]) for name in others):
            unequal.append(name)
    assert unequal == []
    assert refused == ["a hook on a shared weight", "a late hook on a shared weight", "registered hooks"]


# ---- Any constructor


VIEWS: list[Callable[[Tensor, int], Tensor]] = [
    lambda tensor, n: tensor,
    lambda tensor, n: tensor[n % len(tensor) :] if len(tensor) > 1 else tensor,
    lambda tensor, n: tensor.t() if tensor.dim() == 2 else tensor,
    lambda tensor, n: tensor[..., :: 1 + n % 3],
    lambda tensor, n: tensor.unflatten(0, (-1, 1)).flatten(0, 1),
    lambda tensor, n: tensor.select(-1, n % tensor.shape[-1]) if tensor.dim() == 2 else tensor,
]
WRITES: list[Callable[[Tensor, Tensor, int], Any]] = [
    lambda tensor, other, n: tensor.normal_(0, 1 + n),
    lambda tensor, other, n: tensor.uniform_(-n, 1),
    lambda tensor, other, n: tensor.fill_(n),
    lambda tensor, other, n: tensor.zero_(),
    lambda tensor, other, n: tensor.mul_(1.5).add_(n),
    lambda tensor, other, n: tensor.copy_(other.reshape(-1)[0].clone()),
    lambda tensor, other, n: tensor.add_(other.mean()),
    lambda tensor, other, n: tensor.copy_(tensor.flip(0)),
    lambda tensor, other, n: tensor.bernoulli_(0.5),
    lambda tensor, other, n: torch.exp(tensor.clamp(-1, 1), out=tensor),
    lambda tensor, other, n: nn.init.trunc_normal_(tensor),
    lambda tensor, other, n: torch.manual_seed(n) if n == 3 else tensor.random_(n + 2),
]
numbers = st.integers(0, 3)
writes = st.tuples(
    numbers, st.lists(st.tuples(st.integers(0, 5), numbers), max_size=3), st.integers(0, 11), numbers, numbers
)


class Written(nn.Module):
    def __init__(self, program: list[Any]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (5,), (2, 6), (1, 4))])
        with torch.no_grad():
            for target, views, write, other, n in program:
                view: Tensor = self.tensors[target].data
                for kind, number in views:
                    view = VIEWS[kind](view, number)
                WRITES[write](view, self.tensors[other], n)


@settings(max_examples=60, deadline=None)
@given(st.lists(writes, max_size=12))
def test_any_writes_to_any_views_give_the_same_bits(program):
    expected, module = both(lambda: Written(program))
    make_real(module)
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        assert one.detach().numpy().tobytes() == other.detach().numpy().tobytes()


# ---- Memory


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes of storages that were alive at once, of those that were made in this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._sizes = 0, dict[int, tuple[Any, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            tensor = getattr(leaf, "_local_tensor", leaf)  # a DTensor is the memory of its shard
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._sizes = {key: entry for key, entry in self._sizes.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._sizes.values()))
        return result


def wide() -> nn.Module:
    """Return a model whose layers are all initialized, initialized again, and then scaled."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))
    for layer in layers:
        nn.init.normal_(layer.weight)
    for layer in layers:
        layer.weight.data.mul_(0.5).add_(torch.eye(64))
    return layers


LAYER = 4 * 64 * 65


def test_a_recording_and_its_replay_hold_one_tensor_at_a_time():
    with LiveBytes() as recording, deferred_init():
        module = wide()
    with LiveBytes() as replay:
        make_real(module, take=lambda tensor, value: True)
    assert recording.most <= LAYER and replay.most <= 2 * LAYER  # a weight and an eye


def test_a_recording_keeps_only_what_matters():
    with deferred_init():
        module = nn.Linear(2, 2)
        nn.init.normal_(module.weight)
        torch.randn(1000).add_(1)
    recording = records_of(module)["weight"].recording
    assert [operation.name for operation in recording.operations] == ["aten.uniform_.default", "aten.normal_.default"]


def test_what_is_made_gets_the_recorded_layout():
    made = TensorRef(0, torch.float32, (2, 3), (1, 2), 0)
    eye = Operation("aten.eye.m", (2, 3), {}, (made,), frozenset(), frozenset([0]), frozenset([0]), None)
    memory: list[list[float]] = []
    replay(
        Recording([eye], [24]),
        [0],
        lambda _, storage: memory.append(torch.tensor([], dtype=made.dtype).set_(storage).tolist()),
    )
    assert memory == [[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]  # column by column


def test_a_module_may_be_built_in_several_parts():
    def build(context: Any) -> nn.Module:
        torch.manual_seed(1)
        with context():
            module = nn.Linear(2, 2)
        with context():
            module.extra, module.more = nn.Parameter(torch.randn(2)), nn.Linear(2, 2)
        return module

    module = build(deferred_init)
    make_real(module)
    assert_equal(module, build(nullcontext))


def operation(name: str, *, reads: str = "", writes: str = "", overwrites: str = "") -> Operation:
    sets = [frozenset(map(ord, storages)) for storages in (reads, writes, overwrites)]
    return Operation(name, (), {}, (), *sets, None)


def test_operations_that_are_overwritten_unread_are_skipped():
    operations = [
        operation("normal_ a", writes="a", overwrites="a"),
        operation("normal_ a again", writes="a", overwrites="a"),
        operation("normal_ b", writes="b", overwrites="b"),
        operation("copy_ a to c", reads="a", writes="c", overwrites="c"),
        operation("mul_ a", reads="a", writes="a"),
        operation("zero_ a", writes="a", overwrites="a"),
    ]
    names = [[each.name for each in live_operations(operations, [ord(wanted)])] for wanted in "abc"]
    assert names == [["zero_ a"], ["normal_ b"], ["normal_ a again", "copy_ a to c"]]


@pytest.mark.parametrize(
    ("touched", "order"),
    [
        # normal_ a, normal_ b, mul_ a, eye c, add_ c to a, mul_ b
        (["a", "b", "a", "c", "ac", "b"], [0, 2, 3, 4, 1, 5]),
        # normal_ s, copy_ s to a, copy_ s to b, mul_ a, mul_ b
        (["s", "sa", "sb", "a", "b"], [0, 1, 3, 2, 4]),
        (["a"] * 5000, list(range(5000))),
    ],
    ids=["awaited", "copied", "long"],
)
def test_operations_on_a_storage_follow_on_each_other(touched, order):
    assert list(execution_order([set(map(ord, storages)) for storages in touched])) == order


# ---- What is refused by name


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))


def test_a_task_on_the_meta_device_without_a_recording_is_refused():
    with torch.device("meta"):
        task = Task()
    with pytest.raises(UserError, match=r"seen of Task is on the meta device.*with trainkit.deferred_init"):
        Trainer(SingleStrategy(device="cpu")).check(task, torch.utils.data.DataLoader([1]), resume=None)
    with pytest.raises(UserError, match=r"seen of Task is on the meta device"):
        make_real(task)


def test_what_is_changed_after_the_recording_is_refused():
    with deferred_init():
        tasks = [Task() for _ in range(4)]
    nn.init.zeros_(tasks[0].layer.weight)
    tasks[1].double()
    tasks[2].layer.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    tasks[3].layer.bias.register_hook(lambda gradient: gradient)
    for task, message in zip(
        tasks,
        ["layer.weight of Task was changed", "seen of Task is on the meta", "layer.weight of Task is on", "has a hook"],
        strict=True,
    ):
        with pytest.raises(UserError, match=message):
            records_of(task)


def test_what_cannot_be_recorded_is_refused():
    outside = torch.empty(2, device="meta")
    with deferred_init():
        with pytest.raises(
            UserError, match=r"aten.mul_.Tensor uses a tensor that is on the meta device and was made ou"
        ):
            torch.ones(2).mul_(outside)
        with pytest.raises(UserError, match=r"sparse.*trainer.deferred_init=false"):
            torch.eye(2).to_sparse() @ torch.ones(2, 2)
        with pytest.raises(UserError, match="cannot be recorded"):
            pickle.dumps(torch.ones(2))
        with pytest.raises(ValueError, match="read-only"):
            torch.ones(2).numpy()[0] = 3
        with pytest.raises(UserError, match="inside another"), deferred_init():
            pass


def test_an_error_of_the_constructor_is_its_own():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"), deferred_init():
        nn.Linear(2, 3)(torch.ones(4, 5))
    assert not torch.ones(2).is_meta, "the recording has ended"
