"""A run is resumed on any strategy and any number of ranks (contracts C2 and C6).

saved by ddp on 3 ranks       | in the middle of epoch 1
single, dp, ddp on 2 ranks,   |   continues with exactly the samples that are left, in the same order
fusion, pipeline              |
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.dp import DataParallelStrategy
from trainkit.strategies.fusion import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import StopAt, assert_same_bits, fit
from trainkit import Callback, Data, LRSchedule, TaskModule
from trainkit.checkpoint.store import load_from
from trainkit.testing import run_ranks

NUM_SAMPLES = 50  # four batches of 12 and one of 2: fewer than there are ranks
STEPS_PER_EPOCH = 5
STOP = 7

Weights = dict[str, Tensor]
Reads = list[tuple[int, int, list[int]]]  # rank, step, indices of the samples that the rank read for it


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Notes which samples are read."""

    def __init__(self) -> None:
        self.inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.inputs[index], self.inputs[index].sum().sin()


class Regression(TaskModule):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(8, 16)
            self.middle = nn.Linear(16, 16)
            self.last = nn.Linear(16, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(inputs)))
        return self.last(torch.tanh(self.middle(hidden))).squeeze(1)

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        by_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
        return optimizer, [by_step, LRSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), every="epoch")]


class Notes(Callback):
    def __init__(self) -> None:
        self.reads: Reads = []
        self.weights: Weights = {}

    def on_step_end(self, run: Any) -> None:
        read = run.data.dataset("train").read
        self.reads.append((run.strategy.comm.rank, run.state.step, list(read)))
        read.clear()

    def on_fit_end(self, run: Any) -> None:
        whole = run.strategy.state_dict(run.task)  # of all stages of a pipeline
        self.weights = {name: tensor.clone() for name, tensor in whole.items()}


def train(
    strategy: Any, run_dir: Path, *, stop: int | None = None, dropout: float = 0.0, resume: bool = False
) -> tuple[Weights, Reads]:
    """Train three epochs, or go on with them, and return the weights and what this rank read."""
    notes = Notes()
    callbacks = [notes] if stop is None else [notes, StopAt(stop)]
    settings = {"max_duration": "3epoch", "run_dir": run_dir, "resume": run_dir if resume else None}
    fit(strategy, Regression(dropout=dropout), Data(train=Samples(), batch_size=12), *callbacks, **settings)
    return notes.weights, notes.reads


def in_global_order(reads: Reads) -> dict[int, list[int]]:
    """Return the samples of each step in the order of their positions: rank r has every W-th."""
    by_step: dict[int, dict[int, list[int]]] = {}
    for rank, step, indices in reads:
        assert by_step.setdefault(step, {}).setdefault(rank, indices) == indices  # all stages read the same
    ordered = {}
    for step, ranks in by_step.items():
        whole = [-1] * sum(map(len, ranks.values()))
        for rank, indices in ranks.items():
            whole[rank :: len(ranks)] = indices
        ordered[step] = whole
    return ordered


def assert_close(actual: Weights, expected: Weights) -> None:
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at} {text}"
        )


# ---- On three ranks


def on_three_ranks(folder: Path) -> tuple[Weights, Weights, Reads]:
    """Return the weights with dropout of a whole and of a resumed run; leave a run without dropout in mid-epoch."""

    def ddp() -> DDPStrategy:
        return DDPStrategy(device="cpu")

    whole, _ = train(ddp(), folder / "whole", dropout=0.3)
    train(ddp(), folder / "parts", dropout=0.3, stop=STOP)
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(dist.get_rank())  # what came between must not matter
    resumed, _ = train(ddp(), folder / "parts", dropout=0.3, resume=True)
    _, reads = train(ddp(), folder / "saved", stop=STOP)
    return whole, resumed, reads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def three_ranks(folder: Path) -> Any:
    return run_ranks(on_three_ranks, 3, folder)


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Weights, Reads]:
    """The weights and reads of one device over three uninterrupted epochs."""
    return train(SingleStrategy(device="cpu"), folder / "single")


def test_on_the_same_ranks_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(three_ranks):
    for whole_weights, resumed_weights, _ in three_ranks:
        assert_same_bits(resumed_weights, whole_weights)
        assert_same_bits(resumed_weights, three_ranks[0][0])


def test_until_the_save_three_ranks_have_read_the_samples_of_one_device(three_ranks, whole):
    # Ranks ask each other to stop without waiting for the answer, so the run went on for some steps after its save.
    read = in_global_order([entry for _, _, reads in three_ranks for entry in reads if entry[1] <= STOP])
    expected = in_global_order(whole[1])
    assert read == {step: expected[step] for step in range(1, STOP + 1)}
    epoch = [index for step in range(1, STEPS_PER_EPOCH + 1) for index in read[step]]
    assert sorted(epoch) == list(range(NUM_SAMPLES))


# ---- On other layouts


def saved_copy(folder: Path, name: str) -> Path:
    """Return a run folder with the checkpoint of three ranks alone in it."""
    copy = folder / name
    (copy / "checkpoints").mkdir(parents=True)
    for file in (folder / "saved" / "checkpoints").iterdir():
        (copy / "checkpoints" / file.name).write_bytes(file.read_bytes())
    return copy


def assert_continues_like(whole: tuple[Weights, Reads], weights: Weights, reads: Reads) -> None:
    expected = in_global_order(whole[1])
    assert in_global_order(reads) == {step: expected[step] for step in range(STOP + 1, 3 * STEPS_PER_EPOCH + 1)}
    assert_close(weights, whole[0])


@pytest.mark.usefixtures("three_ranks")
@pytest.mark.parametrize("name", ["single", "accumulating", "dp"])
def test_one_process_continues_with_the_samples_that_three_ranks_left(folder, whole, name):
    strategy = {
        "single": lambda: SingleStrategy(device="cpu"),
        "accumulating": lambda: SingleStrategy(device="cpu", micro_batch_size=5),
        "dp": lambda: DataParallelStrategy(devices=["cpu", "cpu"]),
    }[name]()
    assert_continues_like(whole, *train(strategy, saved_copy(folder, name), resume=True))


def on_two_ranks(copies: dict[str, Path]) -> dict[str, tuple[Weights, Reads, float]]:
    """Return the weights and reads of each strategy of two ranks over the rest, and a random number after it."""
    strategies = {
        "ddp": lambda: DDPStrategy(device="cpu"),
        "fusion": lambda: FusionStrategy(device="cpu"),
        "sharded": lambda: FusionStrategy(device="cpu", shard_optimizer=True),
        "pipeline": lambda: PipelineStrategy(device="cpu", stages=2, stages_per_rank=1, schedule="gpipe", accumulate=2),
    }
    return {name: (*train(strategies[name](), copy, resume=True), random.random()) for name, copy in copies.items()}


@pytest.fixture(scope="module")
def two_ranks(folder: Path, three_ranks: Any) -> Any:
    names = ("ddp", "fusion", "sharded", "pipeline")
    return run_ranks(on_two_ranks, 2, {name: saved_copy(folder, f"two_{name}") for name in names})


def test_two_ranks_continue_with_the_samples_that_three_ranks_left(two_ranks, whole):
    first, second = two_ranks
    for name in first:
        assert_continues_like(whole, first[name][0], first[name][1] + second[name][1])
        if name != "pipeline":  # whose ranks hold a part of the task each
            assert_same_bits(first[name][0], second[name][0])


@pytest.mark.parametrize("name", ["ddp", "fusion"])
def test_on_another_number_of_ranks_each_draws_its_own_random_numbers(two_ranks, name):
    first, second = two_ranks
    assert first[name][2] != second[name][2]


@pytest.mark.usefixtures("three_ranks")
def test_resuming_reads_nothing_again(folder):
    reads = train(SingleStrategy(device="cpu"), saved_copy(folder, "again"), resume=True)[1]
    assert len(reads[0][2]) == 12
    state = load_from(folder / "again").payload["state"]
    assert (state["step"], state["epoch"], state["position"]) == (STOP, 1, 24)
