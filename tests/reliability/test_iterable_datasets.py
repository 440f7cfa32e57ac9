"""Iterable datasets train to the weights of one device under every strategy, and go on on other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.equality import Perceptron
from tests.tasks import on_cpu
from trainkit import Callback, Data, Trainer
from trainkit.testing import run_ranks

LENGTHS = {"shards": [9, 3, 8, 6], "one shard": [0, 9]}
"""Samples of each shard: the last global batches, or all of them, have samples of one rank only."""
STRATEGIES: dict[str, tuple[str, dict[str, int]]] = {
    **{name: (name, {}) for name in ("ddp", "torch_ddp", "fusion", "fsdp")},
    "pipeline": ("pipeline", {"stages": 2}),
    "pipeline with replicas": ("pipeline", {"stages": 1, "replicas": 2}),
}


def sample(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, generator=generator).double(), torch.randn(1, generator=generator).double()


class Shard(IterableDataset[Any]):
    def __init__(self, first: int, length: int) -> None:
        self.first, self.length, self.position = first, length, 0

    def __iter__(self) -> Any:
        while self.position < self.length:
            self.position += 1
            yield sample(self.first + self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.position = saved["position"]


class Sharded(IterableDataset[Any]):
    """Shards of unequal lengths, which are not known before they are read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.num_shards = lengths, len(lengths)

    def shard(self, num_shards: int, index: int) -> Shard:
        return Shard(100 * index, self.lengths[index])

    def __iter__(self) -> Any:
        raise AssertionError("the shards are read")


class Batches(IterableDataset[Any]):
    """Global batches of unequal sizes; one has fewer samples than there are ranks."""

    def __iter__(self) -> Any:
        for number, size in enumerate((6, 1, 5, 8)):
            rows = map(sample, range(100 * number, 100 * number + size))
            yield tuple(torch.stack(column) for column in zip(*rows, strict=True))


def data(kind: str, num_workers: int = 0) -> Data:
    if kind == "batches":
        return Data(
            train=DataLoader(Batches(), batch_size=None, num_workers=num_workers),
            validation=DataLoader(Batches(), batch_size=None),
        )
    return Data(train=Sharded(LENGTHS[kind]), validation=Sharded(LENGTHS[kind]), batch_size=4, num_workers=num_workers)


class Losses(Callback):
    """Notes the samples of each step, and saves after the last one."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def on_step_end(self, run: Any) -> None:
        self.samples.append(run.state.samples)

    def on_fit_end(self, run: Any) -> None:
        run.checkpointer.save(reason="test")


def fit(
    strategy: Any, run_dir: Path, *, kind: str, num_workers: int = 0, until: str = "2epoch", resume: Path | None = None
) -> tuple[dict[str, Tensor], dict[str, float], list[int]]:
    task, losses = Perceptron(), Losses()
    settings: dict[str, Any] = {"callbacks": [losses], "loggers": [], "report": False, "num_sanity_batches": 0}
    settings["evaluate_every"] = None  # validated at the end
    trainer = Trainer(strategy, max_duration=until, precision="fp64", run_dir=run_dir, **settings)
    trainer.fit(task, data(kind, num_workers), resume=resume)
    return dict(task.state_dict()), trainer.validate(task, data(kind, num_workers)), losses.samples


def fit_on_ranks(name: str, folder: Path) -> dict[str, Any]:
    several = 2 if name == "ddp" else 0  # other strategies read by the same loader
    num_workers = {**dict.fromkeys(LENGTHS, several), "batches": several // 2}
    kind_of_strategy, settings = STRATEGIES[name]
    return {
        kind: fit(on_cpu(kind_of_strategy, **settings), folder / kind, kind=kind, num_workers=number)
        for kind, number in num_workers.items()
    }


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-9, atol=1e-12)
    assert one[1] == pytest.approx(other[1], rel=1e-9)
    assert one[2] == other[2]


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights, metrics and samples by kind of dataset."""
    folder = tmp_path_factory.mktemp("one")
    return {kind: fit(on_cpu("single"), folder / kind, kind=kind) for kind in (*LENGTHS, "batches")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*LENGTHS, "batches"])
def test_two_replicas_train_an_iterable_dataset_to_the_weights_of_one(
    kind: str, of_one_device: dict[str, Any], tmp_path: Path
) -> None:
    replicas = fit(on_cpu("dp"), tmp_path / "dp", kind=kind)
    assert_same(replicas, of_one_device[kind])


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_train_every_iterable_dataset_to_the_weights_of_one(
    name: str, of_one_device: dict[str, Any], tmp_path: Path
) -> None:
    for of_rank in run_ranks(fit_on_ranks, 2, name, tmp_path):
        for kind, expected in of_one_device.items():
            assert_same(of_rank[kind], expected)


def go_on(folder: Path, name: str, until: str, resume: str) -> Any:
    strategy = on_cpu("ddp")
    return fit(strategy, folder / name, kind="shards", num_workers=2, until=until, resume=folder / resume)


@pytest.mark.slow
def test_a_run_goes_on_from_one_rank_on_two_and_then_on_three(tmp_path: Path) -> None:
    single = on_cpu("single")
    whole = fit(single, tmp_path / "whole", kind="shards")
    assert sum(LENGTHS["shards"]) == 26 and whole[2] == [4, 8, 12, 16, 20, 24, 26, 30, 34, 38, 42, 46, 50, 52]
    fit(single, tmp_path / "one", kind="shards", num_workers=1, until="3step")
    run_ranks(go_on, 2, tmp_path, "two", "9step", "one")
    for weights, metrics, samples in run_ranks(go_on, 3, tmp_path, "three", "2epoch", "two"):
        assert_same((weights, metrics, samples), (*whole[:2], whole[2][9:]))
