"""Tensor parallelism of the strategy `fsdp`: the weights of a plain loop, trials of units, and what is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.ema import EMA
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fsdp import tensor_operations, tensor_parallel
from trainkit.strategies.fsdp.strategy import OLDEST_FOR_TENSOR_PARALLEL, FSDPStrategy
from trainkit.strategies.fsdp.tensor_plan import Division, choose_tensor_units, divisions
from trainkit.strategies.single import SingleStrategy

from tests.strategies.pipeline.training import Training
from tests.tasks import fit as train
from trainkit import Callback, Data, TaskModule, UserError
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.testing import run_ranks

pytestmark = pytest.mark.skipif(
    torch.__version__ < OLDEST_FOR_TENSOR_PARALLEL, reason=f"needs torch {OLDEST_FOR_TENSOR_PARALLEL}"
)
WORDS, WIDTH, HEADS = 11, 8, 4
SAMPLES = torch.randint(0, WORDS, (13, 6), generator=torch.Generator().manual_seed(0))  # ragged: batches of 8 and 5
BATCH, EPOCHS, LR, CLIP = 8, 3, 0.01, 0.5


class Attention(nn.Module):
    """Queries, keys and values in one layer, and a norm of each head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH // HEADS), dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=2))
        query, key, value = parts
        attended = functional.scaled_dot_product_attention(
            self.norm(query), key, value, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 12, bias=False), nn.Linear(WIDTH, 12)
        self.down, self.dropout = nn.Linear(12, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(functional.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention, self.network = nn.LayerNorm(WIDTH), Attention(dropout), Gated(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.network(x)


class Language(TaskModule):
    """Blocks between tied layers, with a scale (a scalar) and optionally weights of samples."""

    def __init__(self, *, dropout: float = 0.0, weighted: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
            self.scale = nn.Parameter(torch.ones(()))
        self.weighted = weighted

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        mask = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        return functional.linear(self.scale * x, self.words.weight)

    def training_step(self, batch: Any) -> Any:
        losses = functional.cross_entropy(self(batch[0]).transpose(1, 2), batch[0], reduction="none")
        if not self.weighted:
            return losses.mean()
        counted = (batch[0] > 2).to(losses.dtype)
        return {"loss": (losses * counted).sum() / counted.sum(), "weight": counted.sum()}

    def validation_step(self, batch: Any) -> Any:
        return {"loss": functional.cross_entropy(self(batch[0]).transpose(1, 2), batch[0])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        optimizer.register_step_post_hook(count_steps)  # a trial of a hook has the task without units
        return optimizer


def count_steps(optimizer: Any, *_: Any) -> None:
    optimizer.num_steps = getattr(optimizer, "num_steps", 0) + 1


def plain_loop(task: TaskModule, *, epochs: int = EPOCHS) -> dict[str, Tensor]:
    """Train in fp64 with a clipped gradient, and return the weights."""
    task = task.double().train()
    optimizer = torch.optim.AdamW(task.parameters(), lr=LR)
    for _ in range(epochs):
        for batch in SAMPLES.split(BATCH):
            returned = task.training_step((batch,))
            (returned["loss"] if isinstance(returned, dict) else returned).backward()
            nn.utils.clip_grad_norm_(task.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return task.state_dict()


def data() -> Data:
    return Data(train=TensorDataset(SAMPLES), validation=TensorDataset(SAMPLES[:5]), batch_size=BATCH, shuffle=False)


def fit(task: TaskModule, *callbacks: Callback, devices: int = 2, tensor_parallel: int = 2, **settings: Any) -> Any:
    keys = ("accumulate", "units", "tensor_plan", "replicate", "on_rank_loss")
    of_strategy = {key: settings.pop(key) for key in keys if key in settings}
    strategy = FSDPStrategy(
        devices=devices, device="cpu", tensor_parallel=tensor_parallel, min_unit_mb=0, **of_strategy
    )
    settings = {
        "max_duration": f"{EPOCHS}epoch",
        "precision": "fp64",
        "max_grad_norm": CLIP,
        **settings,
    }
    return train(strategy, task, data(), *callbacks, **settings)


def assert_same(task: nn.Module, expected: dict[str, Tensor], *, bound: float = 1e-9) -> None:
    state = task.state_dict()
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert (state[name] - tensor).abs().max() <= bound, name


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # runs in one folder that begin in the same second have the same name


# ---- Equality


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        ({}, {}),
        ({"devices": 4, "accumulate": 2}, {"weighted": True}),
        ({"devices": 4, "tensor_parallel": 4, "units": []}, {}),
        pytest.param({"devices": 8, "replicate": 2}, {}, marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_a_plain_loop(settings: dict[str, Any], task: dict[str, Any], caplog: Any) -> None:
    trained = Language(**task)
    result = fit(trained, **settings)
    assert_same(trained, plain_loop(Language(**task)))
    assert result.steps == 2 * EPOCHS


class NotesGathering(Callback):
    """Returns the names of the units that gather their weights, and checks what a rank holds."""

    def __init__(self) -> None:
        self.gathering: list[str] = []
        self.elements = 0

    def on_fit_end(self, run: Any) -> None:
        units = run.strategy._sharded.parallel._units
        self.gathering = [unit.name for unit in units if unit.gathers]
        self.elements = sum(shard.local.numel() for shard in run.strategy._sharded.shards)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


def test_a_rank_holds_its_part_of_divided_layers_and_computes_no_unit_with_gathered_weights() -> None:
    notes, task = NotesGathering(), Language()
    fit(task, notes)
    divided = sum(
        parameter.numel()
        for name, parameter in task.named_parameters()
        if any(part in name for part in ("qkv", "out.weight", "gate", "up", "down.weight"))
    )
    whole = sum(parameter.numel() for parameter in task.parameters()) - 1  # but the scalar
    assert notes.gathering == []
    assert notes.elements == whole - divided // 2


def test_dropout_draws_the_numbers_of_one_process() -> None:
    tasks = [Language(dropout=0.3), Language(dropout=0.3)]
    fit(tasks[0])
    settings = {"max_duration": f"{EPOCHS}epoch", "precision": "fp64", "max_grad_norm": CLIP}
    train(SingleStrategy(device="cpu"), tasks[1], data(), **settings)
    assert_same(tasks[0], tasks[1].state_dict())


def test_the_norm_counts_each_element_once() -> None:
    norms = []
    for strategy in (SingleStrategy(device="cpu"), FSDPStrategy(devices=4, device="cpu", tensor_parallel=2)):
        settings = {
            "max_duration": "2step",
            "precision": "fp64",
            "max_grad_norm": CLIP,
            "log_every": "1step",
        }
        norms.append(train(strategy, Language(), data(), **settings).metrics["train/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


@pytest.mark.parametrize("how", ["trainer", "blocks"])
def test_recomputed_activations_change_nothing(how: str) -> None:
    class Recomputed(Language):
        def forward(self, words: Tensor) -> Tensor:
            x = self.words(words)
            for block in self.blocks:
                x = checkpoint(block, x, None, use_reentrant=False)
            return functional.linear(self.scale * x, self.words.weight)

    kind = Recomputed if how == "blocks" else Language
    task = kind()
    settings = {} if how == "blocks" else {"activation_checkpointing": ["blocks.*.attention", "blocks.*.network"]}
    fit(task, **settings)
    assert_same(task, plain_loop(kind()))


# ---- State


class Doubles(Callback):
    """Reads whole shapes, and changes a divided weight, between steps."""

    def on_step_end(self, run: Any) -> None:
        weight = run.task.blocks[0].network.down.weight
        assert (weight.shape, weight.size(1), weight.numel()) == (torch.Size([WIDTH, 12]), 12, 12 * WIDTH)
        if run.state.step == 2:
            with run.whole_task() as task, torch.no_grad():
                assert task.blocks[0].attention.qkv.weight.shape == (3 * WIDTH, WIDTH)
                task.blocks[0].attention.qkv.weight.mul_(2.0)
                task.blocks[1].network.down.weight.mul_(2.0)


def test_a_callback_finds_and_changes_whole_weights() -> None:
    tasks = [Language(), Language()]
    for task, strategy in zip(tasks, (None, SingleStrategy(device="cpu")), strict=True):
        settings = {"max_duration": "5step", "precision": "fp64"}
        if strategy is None:
            fit(task, Doubles(), EMA(decay=0.5), devices=4, **settings, max_grad_norm=None)
        else:
            train(strategy, task, data(), Doubles(), EMA(decay=0.5), **settings)
    assert_same(tasks[0], tasks[1].state_dict())


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_is_resumed_by_every_layout(sharded: bool, tmp_path: Path) -> None:
    expected = plain_loop(Language())
    settings = {"max_duration": f"{EPOCHS}epoch", "precision": "fp64", "max_grad_norm": CLIP}
    fit(Language(), Checkpoint(every="3step", sharded=sharded), devices=4, max_duration="3step", run_dir=tmp_path / "a")
    layouts: list[Callable[..., Any]] = [
        partial(train, SingleStrategy(device="cpu")),
        partial(train, FSDPStrategy(devices=2, device="cpu", tensor_parallel=2)),
    ]
    for resume_run in layouts:
        task = Language()
        resume_run(task, data(), resume=tmp_path / "a", run_dir=tmp_path / f"b{id(task)}", **settings)
        assert_same(task, expected)


def test_a_checkpoint_of_ddp_is_resumed(tmp_path: Path) -> None:
    strategy = DDPStrategy(devices=2, device="cpu")
    settings = {"precision": "fp64", "max_grad_norm": CLIP, "max_duration": "3step", "run_dir": tmp_path / "a"}
    train(strategy, Language(), data(), Checkpoint(every="3step"), **settings)
    task = Language()
    fit(task, resume=tmp_path / "a", run_dir=tmp_path / "b")
    assert_same(task, plain_loop(Language()))


# ---- Trials


class Normalized(TaskModule):
    """Has running statistics of activations that would be divided."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(WORDS, WIDTH)
            self.network = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH))

    def training_step(self, batch: Any) -> Any:
        return self.network(self.words(batch[0].flatten())).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LR)


def test_a_unit_that_changes_a_buffer_gathers_its_weights(capfd: Any) -> None:
    task, notes = Normalized(), NotesGathering()
    fit(task, notes, units=[])
    assert_same(task, plain_loop(Normalized()))
    assert notes.gathering == ["network"]
    assert "network (Sequential) is computed with gathered weights" in capfd.readouterr().err


def test_a_unit_of_a_plan_by_names_that_differs_ends_the_run() -> None:
    plan = {"network.0": "columns", "network.3": "rows"}
    with pytest.raises(UserError, match=r"divides network \(Sequential\), but computed in parts it changes a buffer"):
        fit(Normalized(), units=[], tensor_plan=plan)


class Breaks(Language):
    """Breaks the computation in parts on each rank, as an error of PyTorch or of this project would."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def on_rank(self) -> None:
        if self.fault == "a sum is left out":
            tensor_parallel.whole = lambda tensor, mesh: tensor.to_local().clone()
        elif self.fault == "a bias is added on each rank":
            tensor_parallel.Replicate = Partial
        elif self.fault == "parts are taken for those of another dimension":
            Division.placement = property(lambda division: Shard(1 - division.dim))
        else:
            tensor_operations._IN_PARTS[Tensor.split] = lambda mesh, function, tensor, size, dim=0: tuple(
                reversed(tensor_operations._blocks(tensor, mesh, 3, dim) or ())
            )


class Breaking(Callback):
    def on_fit_start(self, run: Any) -> None:
        run.task.on_rank()


@pytest.mark.parametrize(
    "fault",
    [
        "a sum is left out",
        "a bias is added on each rank",
        "parts are taken for those of another dimension",
        "queries, keys and values are exchanged",
    ],
)
def test_a_fault_of_the_computation_in_parts_is_found_and_changes_no_weight(fault: str) -> None:
    task, notes = Breaks(fault), NotesGathering()
    fit(task, Breaking(), notes)
    assert notes.gathering
    assert_same(task, plain_loop(Language()))


# ---- Refusals


class Penalized(Language):
    def __init__(self, use: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.use = use

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch) + self.use(self.blocks[0].network)


def _square(network: nn.Module) -> Tensor:
    return network.up.weight.square().sum()


def _call(network: nn.Module) -> Tensor:
    return network.up(torch.ones(1, WIDTH, dtype=torch.float64)).sum()


def _transposed(network: nn.Module) -> Tensor:
    return network.up.weight.T[0].sum()


def _detached(network: nn.Module) -> Tensor:
    return network.up.weight.detach().sum()


@pytest.mark.parametrize("use", [_square, _call, _transposed, _detached])
def test_a_divided_weight_outside_of_its_unit_is_refused(use: Callable[[nn.Module], Tensor]) -> None:
    with pytest.raises(
        UserError, match=r"up.weight is used outside of the module that tensor-parallel ranks compute together"
    ):
        fit(Penalized(use), units=[])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 3}, r"tensor_parallel=2 must divide the 3 ranks; set strategy.tensor_parallel=1 or 3"),
        ({"tensor_plan": {"blocks.*.network.upp": "columns"}}, r"matches no linear layer. Did you mean"),
        ({"tensor_plan": {"blocks.*.network.up": "rows"}, "tensor_parallel": 3, "devices": 3}, "which has 8 inputs"),
        ({"tensor_plan": {"blocks.*.network.up": "column"}}, "tensor_plan"),
        ({"compile": True}, "compile does not work with FSDPStrategy and tensor_parallel"),
        (
            {
                "units": ["blocks.*.network.up"],
                "tensor_plan": {"blocks.*.network.up": "columns", "blocks.*.network.down": "rows"},
            },
            "is a unit of its own",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit(Language(), **settings)


class Hooked(Language):
    def configure_optimizers(self) -> Any:
        self.blocks[0].network.up.weight.register_hook(lambda gradient: gradient / gradient.norm())
        return super().configure_optimizers()


def test_a_hook_on_the_gradient_of_a_divided_weight_is_refused() -> None:
    with pytest.raises(UserError, match=r"a hook on the gradient of blocks.0.network.up.weight would get a part of it"):
        fit(Hooked())


# ---- The plan


def linears(*widths: tuple[int, int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(*pair) for pair in widths)


class Parts(nn.Module):
    def __init__(self, *widths: tuple[int, int]) -> None:
        super().__init__()
        self.layers = linears(*widths)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("widths", "kinds"),
    [
        ([(8, 24), (8, 8), (8, 32), (32, 8)], ["qkv", "rows", "columns", "rows"]),
        ([(8, 8), (8, 8), (8, 8), (8, 8)], ["columns", "columns", "columns", "rows"]),
        ([(8, 16), (8, 4), (8, 4), (16, 8)], ["columns", "columns", "columns", "rows"]),  # grouped queries
        ([(8, 32), (8, 32), (32, 8)], ["columns", "columns", "rows"]),
        ([(8, 32), (32, 8), (8, 8)], ["columns", "rows", None]),
        ([(8, 8), (8, 8), (8, 8)], [None, None, None]),  # of an attention whose output is elsewhere
        ([(8, 3), (3, 8)], [None, None]),
    ],
)
def test_layers_whose_widths_fit_are_divided(widths: list[tuple[int, int]], kinds: list[str | None]) -> None:
    task = nn.ModuleDict({"block": Parts(*widths)})
    units = choose_tensor_units(task, "auto", size=2)
    expected = {f"block.layers.{index}": kind for index, kind in enumerate(kinds) if kind is not None}
    assert {name: kind for unit in units for name, kind in unit.kinds.items()} == expected
    assert [unit.name for unit in units] == (["block"] if expected else [])


def test_shared_and_parametrized_layers_are_whole() -> None:
    block = Parts((8, 32), (32, 8))
    torch.nn.utils.parametrizations.weight_norm(block.layers[0])
    tied = Parts((8, 16), (16, 8))
    task = nn.ModuleDict({"block": block, "tied": tied, "head": nn.Linear(8, 16)})
    task["head"].weight = tied.layers[0].weight
    assert choose_tensor_units(task, "auto", size=2) == []


@given(st.integers(1, 3), st.sampled_from([(0, 1), (0, 3), (1, 1)]), st.integers(1, 4))
def test_parts_are_joined_to_the_whole(unit: int, how: tuple[int, int], size: int) -> None:
    dim, blocks = how
    shape = [3, 3]
    shape[dim] = unit * size * blocks
    whole, division = torch.arange(math.prod(shape)).view(shape), Division(dim, blocks)
    parts = [division.part(whole, rank, size) for rank in range(size)]
    assert torch.equal(division.join(parts), whole)
    assert {division.whole_shape(part.shape, size) for part in parts} == {whole.shape}


def _placed() -> bool:
    mesh = DeviceMesh("cpu", range(dist.get_world_size()))
    layer, equal = nn.Linear(6, 12), True
    for kind in ("columns", "rows"):
        for name, division in divisions(layer, kind).items():
            whole = getattr(layer, name).detach()
            local = distribute_tensor(whole, mesh, [division.placement]).to_local()
            equal &= torch.equal(local, division.part(whole, dist.get_rank(), dist.get_world_size()))
    return equal


def test_parts_are_those_of_a_dtensor() -> None:
    assert run_ranks(_placed, 2) == [True, True]


# ---- Code of a unit that is not closed


class Feed(nn.Module):
    """A unit whose code a case changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.shrink = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.calls, self.scale, self.kept = 0, 1.0, torch.zeros(())
        self.seen: list[Any] = []

    def hidden(self, x: Tensor) -> Tensor:
        return functional.gelu(self.widen(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(self.hidden(x))


class Counts(Feed):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.shrink(self.hidden(x)) * self.calls


class Averages(Feed):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.scale = 0.9 * self.scale + 0.1 * float(hidden.detach().abs().mean())
        return x + self.shrink(hidden) * self.scale


class Stores(Feed):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.kept = hidden.square().mean()
        return x + self.shrink(hidden)


class Collects(Feed):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.seen.append(hidden)
        return x + self.shrink(hidden)


class WritesInPlace(Feed):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        hidden[:, 2] = hidden[:, 5]
        return x + self.shrink(hidden)


class Branches(Feed):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return x + self.shrink(hidden) * (2.0 if hidden.abs().mean().item() > 0.2 else 1.0)


class Cumulates(Feed):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(self.hidden(x).cumsum(-1))


class Reads(Feed):
    def forward(self, x: Tensor) -> Tensor:
        known = isinstance(self.widen.weight, nn.Parameter) and self.widen.weight.shape == (16, WIDTH)
        return x + self.shrink(self.hidden(x)) * (1.0 + known)


class Draws(Feed):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return x + self.shrink(hidden * torch.rand_like(hidden))


class DrawsLater(Feed):
    """Has code that runs for the first time after the unit was tried."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return x + self.shrink(hidden * torch.rand_like(hidden) if self.scale > 1.0 else hidden)


class ClampsWeights(Feed):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.widen.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampsData(Feed):
    def forward(self, x: Tensor) -> Tensor:
        self.widen.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Hooks(Feed):
    def __init__(self) -> None:
        super().__init__()
        self.widen.register_forward_hook(lambda module, inputs, output: output / output.norm())


class Checkpoints(Feed):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(checkpoint(self.hidden, x, use_reentrant=False))


class Feeds(TaskModule):
    """A step around two units, and what a case does outside of them."""

    def __init__(self, unit: type[nn.Module], outside: Callable[[Feeds, Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.feeds, self.outside = nn.Linear(WIDTH, WIDTH), nn.ModuleList([unit(), unit()]), outside
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for feed in self.feeds:
            x = feed(x)
        return x

    def training_step(self, batch: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == 3:
            for feed in self.feeds:
                feed.scale *= 2.0
        loss = self(batch).square().mean()
        return loss if self.outside is None else loss + self.outside(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _stored(task: Feeds, batch: Tensor) -> Tensor:
    return sum(feed.kept for feed in task.feeds)


def _collected(task: Feeds, batch: Tensor) -> Tensor:
    losses = [feed.seen.pop().square().mean() for feed in task.feeds]
    return torch.stack(losses).sum()


def _hooked(task: Feeds, batch: Tensor) -> float:
    if task.steps == 1:
        task.feeds[0].widen.register_forward_hook(lambda module, inputs, output: output / output.norm())
    return 0.0


def _gradient_penalty(task: Feeds, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(task.feeds[1](x).sum(), x, create_graph=True)
    return gradient.square().mean()


GATHERED, DIVIDED, REFUSED = "gathered", "divided", "refused"
CASES: dict[str, tuple[type[nn.Module], Any, str]] = {
    "a plain unit": (Feed, None, DIVIDED),
    "a counter": (Counts, None, GATHERED),
    "an average of activations in a number": (Averages, None, GATHERED),
    "an activation in an attribute": (Stores, _stored, GATHERED),
    "activations in a list": (Collects, _collected, GATHERED),
    "a write to activations": (WritesInPlace, None, GATHERED),
    "a branch on the mean of activations": (Branches, None, GATHERED),
    "an operation that DTensor computes by parts": (Cumulates, None, GATHERED),
    "the class and shape of a weight": (Reads, None, DIVIDED),
    "random numbers": (Draws, None, GATHERED),
    "a hook that changes activations": (Hooks, None, GATHERED),
    "a hook that comes later": (Feed, _hooked, f"{REFUSED}: widen has hooks"),
    "random numbers that begin later": (DrawsLater, None, f"{REFUSED}: it calls rand_like of a tensor that is divided"),
    "a weight that is clamped": (ClampsWeights, None, f"{REFUSED}: a weight of feeds.0 was changed"),
    "data of a weight that are clamped": (ClampsData, None, f"{REFUSED}: had its data or gradient read"),
    "a checkpoint inside": (Checkpoints, None, f"{REFUSED}: recomputed in backward by a checkpoint inside"),
    "gradients of gradients": (Feed, _gradient_penalty, f"{REFUSED}: gradients of gradients"),
}


def _outcomes(names: list[str]) -> dict[str, str]:
    """Return for each case what became of its units, or how it differs from a plain loop."""
    found = {}
    logging.disable(logging.WARNING)
    for name in names:
        unit, outside, _ = CASES[name]
        task, alone = Feeds(unit, outside), Feeds(unit, outside).double()
        training = Training(task.double(), FSDPStrategy(device="cpu", tensor_parallel=2, units=[]))
        batches = [
            torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(4)
        ]
        try:
            for seed, batch in enumerate(batches):
                torch.manual_seed(seed)
                training.step(StepBatch([MicroBatch(batch, len(batch))], len(batch), len(batch), False))
            units = training.strategy._sharded.parallel._units
            outcome = GATHERED if any(unit.gathers for unit in units) else DIVIDED
        except UserError as error:
            found[name] = f"{REFUSED}: {error}"
            training.strategy.teardown()
            continue
        training.strategy.final_state_dict(task)
        training.strategy.teardown()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for seed, batch in enumerate(batches):
            torch.manual_seed(seed)
            alone.training_step(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        difference = max((a - b).abs().max().item() for a, b in zip(task.parameters(), alone.parameters(), strict=True))
        found[name] = outcome if difference <= 1e-9 else f"differs by {difference:.1e}"
    return found


def test_code_of_a_unit_that_would_compute_with_parts_gathers_its_weights_or_is_refused() -> None:
    for outcomes in run_ranks(_outcomes, 2, list(CASES)):
        unexpected = {
            name: outcomes[name]
            for name, (_, _, expected) in CASES.items()
            if expected.removeprefix(f"{REFUSED}: ") not in outcomes[name]
        }
        assert unexpected == {}
