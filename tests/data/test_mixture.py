"""Epochs of several datasets, of batches grouped by length, and of packed rows, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.tasks import FakeRank, Regression, StopAt, assert_same_bits, regression_data
from trainkit import Data, TaskModule, UserError
from trainkit.data.loader import open_loader
from trainkit.data.mixture import Mixture, MixtureOrder, Sequential
from trainkit.data.order import LengthGroupedOrder, Order
from trainkit.data.packing import Packed, pack

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=4)
epochs = st.integers(0, 5)
seeds = st.integers(0, 3)


def whole(order: Order, epoch: int) -> list[int]:
    return order.slice(epoch, 0, order.num_samples).tolist()


def orders(lengths: list[int], seed: int) -> list[Order]:
    total = sum(lengths)
    counts = [(number + 1) * 7 % 11 + 1 for number in range(len(lengths))]
    return [
        MixtureOrder(lengths, counts, seed=seed, shuffle=True),
        MixtureOrder(lengths, lengths, seed=seed, shuffle=True, in_sequence=True),
        LengthGroupedOrder([n * 13 % 17 for n in range(total)], batch_size=4, seed=seed, batches_per_group=3),
    ]


@given(lengths, epochs, seeds, st.tuples(st.integers(0, 50), st.integers(0, 60), st.integers(1, 4)))
def test_any_slice_is_that_of_the_whole_epoch(
    lengths: list[int], epoch: int, seed: int, part: tuple[int, int, int]
) -> None:
    """So ranks, micro-batches and resumed runs see the same order, asked for in any pieces."""
    start, stop, step = part
    for order, again in zip(orders(lengths, seed), orders(lengths, seed), strict=True):
        assert again.slice(epoch, start, stop, step).tolist() == whole(order, epoch)[start:stop:step]


@given(lengths, epochs, seeds)
def test_a_sequence_and_groups_of_lengths_hold_each_sample_once(lengths: list[int], epoch: int, seed: int) -> None:
    _, sequence, grouped = orders(lengths, seed)

    assert sorted(whole(sequence, epoch)) == sorted(whole(grouped, epoch)) == list(range(sum(lengths)))


@given(lengths, epochs, seeds)
def test_a_sequence_goes_through_its_datasets_in_turn(lengths: list[int], epoch: int, seed: int) -> None:
    number_of = [number for number, length in enumerate(lengths) for _ in range(length)]

    assert [
        number_of[index]
        for index in whole(MixtureOrder(lengths, lengths, seed=seed, shuffle=True, in_sequence=True), epoch)
    ] == number_of


@given(lengths, seeds)
def test_a_mixture_has_exact_counts_and_repeats_no_sample_before_all_others(lengths: list[int], seed: int) -> None:
    counts = [5, 1, 9, 3][: len(lengths)]
    order = MixtureOrder(lengths, counts, seed=seed, shuffle=True)
    number_of = [number for number, length in enumerate(lengths) for _ in range(length)]
    drawn: Counter[int] = Counter()

    for epoch in range(4):
        epoch_draws = whole(order, epoch)
        by_dataset = Counter(number_of[index] for index in epoch_draws)
        drawn.update(epoch_draws)
        assert [by_dataset[number] for number in range(len(lengths))] == counts
        for number, length in enumerate(lengths):
            first = sum(lengths[:number])
            times = [drawn[index] for index in range(first, first + length)]
            assert max(times) - min(times) <= 1


def test_the_counts_of_a_mixture_are_in_proportion_to_its_weights() -> None:
    datasets = {"web": list(range(50)), "code": list(range(9))}
    assert Mixture(datasets, weights={"code": 1, "web": 3}, num_samples=400).counts == [300, 100]
    assert Mixture(list(datasets.values()), weights=[2, 1], num_samples=10).counts == [7, 3]
    assert Mixture(datasets).counts == [50, 9]


def test_a_mixture_mixes_and_two_epochs_differ() -> None:
    order = MixtureOrder([100, 100], [50, 50], seed=0, shuffle=True)

    first, second = whole(order, 0), whole(order, 1)

    assert first != second
    assert 15 < sum(index < 100 for index in first[:50]) < 35


@given(st.lists(st.integers(1, 100), min_size=1, max_size=90), epochs)
def test_batches_of_a_group_are_of_equal_lengths(lengths: list[int], epoch: int) -> None:
    """Within a group no two batches overlap in length, except in equal lengths; a short batch is the last of all."""
    order = LengthGroupedOrder(lengths, batch_size=4, seed=0, batches_per_group=5)
    for begin in range(0, len(lengths), 20):
        group = [lengths[index] for index in order.slice(epoch, begin, begin + 20).tolist()]
        batches = sorted(
            (group[start : start + 4] for start in range(0, len(group), 4)), key=lambda b: (min(b), max(b))
        )
        for left, right in pairwise(batches):
            assert max(left) <= min(right)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_each_global_batch_of_a_mixture(world_size: int) -> None:
    parts = {"a": TensorDataset(torch.arange(10.0)), "b": TensorDataset(torch.arange(100.0, 130.0))}
    mixture = Mixture(parts, weights={"a": 1, "b": 3}, num_samples=24)
    stage_data = Data(train=mixture, batch_size=8).stage_data("train")

    def batches(rank: int, world: int) -> list[set[float]]:
        loader = open_loader(stage_data, FakeRank(rank, world), seed=0)
        assert loader.epoch_length == 24
        step_batches = loader.step_batches(1, 8)
        return [{v for m in step_batch.micro_batches for v in m.batch[0].tolist()} for step_batch in step_batches]

    alone = batches(0, 1)
    together = [batches(rank, world_size) for rank in range(world_size)]

    assert [set.union(*parts) for parts in zip(*together, strict=True)] == alone
    assert len(alone) == 2


@pytest.mark.parametrize("make", [lambda a, b: Mixture([a, b], weights=[1, 2]), lambda a, b: Sequential([a, b])])
def test_a_run_over_several_datasets_resumes_to_the_bit(make_trainer: Any, tmp_path: Any, make: Any) -> None:
    data = Data(train=make(regression_data(10), regression_data(23, seed=1)), batch_size=4)
    full, resumed = Regression(), Regression()

    make_trainer(max_duration="3epoch").fit(full, data)
    make_trainer(max_duration="3epoch", run_dir=tmp_path, callbacks=[StopAt(13)]).fit(Regression(), data)
    make_trainer(max_duration="3epoch", run_dir=tmp_path).fit(resumed, data, resume=tmp_path)

    assert_same_bits(resumed, full)


def test_sample_seeds_reach_datasets_with_get_sample() -> None:
    class Seeded(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def get_sample(self, index: int, seed: int) -> tuple[int, int]:
            return index, seed

    mixed = Sequential([[7, 8], Seeded()])

    assert mixed.get_sample(1, 5) == 8
    assert mixed.get_sample(4, 5) == (2, 5)
    assert len(mixed) == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture([]), "Mixture needs at least one dataset"),
        (lambda: Sequential({"a": [1], "b": []}), "Sequential: dataset 'b' has no samples"),
        (lambda: Mixture([[1], [2]], weights=[1.0]), "one number for each dataset"),
        (lambda: Mixture({"a": [1]}, weights={"b": 1.0}), r"weights have the names \['b'\], but datasets have \['a'\]"),
        (lambda: Data(train={"a": [1]}, batch_size=1).stage_data("train"), r"pass Mixture\(\.\.\.\) or Sequential"),
        (lambda: Data(validation={"a/b": [1]}, batch_size=1).stage_data("validation"), "needs a name for its metrics"),
        (
            lambda: Data(train=[1, 2], batch_size=1, lengths=[3]).stage_data("train"),
            "there are 1 lengths for 2 samples",
        ),
    ],
)
def test_mistakes_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


# ---- Packed rows


@given(st.lists(st.integers(1, 20), max_size=60))
def test_rows_hold_each_sequence_once_and_at_most_their_capacity(sizes: list[int]) -> None:
    rows = pack(sizes, 20)

    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in row) <= 20 for row in rows)
    assert len(rows) <= 2 * -(-sum(sizes) // 20) + 1


def test_a_row_has_the_positions_and_segments_of_its_sequences() -> None:
    sequences = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9, 10, 11, 12])]
    packed = Packed([(tokens, tokens * 10) for tokens in sequences], 6, padding=-1)

    rows = [packed[index] for index in range(len(packed))]

    assert [row["tokens"].tolist() for row in rows] == [[6, 7, 8, 9, 10, 11], [1, 2, 3, 4, 5, -1]]
    assert rows[1]["tokens_1"].tolist() == [10, 20, 30, 40, 50, -1]
    assert rows[1]["positions"].tolist() == [0, 1, 2, 0, 1, 0]
    assert rows[1]["segments"].tolist() == [1, 1, 1, 2, 2, 0]


class Sum(TaskModule):
    """The mean over tokens of a loss that depends on nothing but the token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 1, dtype=torch.float64)
        nn.init.constant_(self.table.weight, 0.5)

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        real = batch["segments"] > 0
        losses = (self.table(batch["tokens"]).squeeze(-1) - batch["tokens"]).square()
        return {"loss": (losses * real).sum() / real.sum(), "weight": real.sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_tokens_of_packed_rows_count_as_those_of_rows_with_padding(make_trainer: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(16, (size,), generator=generator) for size in (3, 9, 5, 2, 7, 4, 6, 1)]

    def trained(width: int) -> Tensor:
        rows = Packed(sequences, width)
        task = Sum()
        make_trainer(max_duration="1step").fit(task, Data(train=rows, batch_size=len(rows), shuffle=False))
        return task.table.weight.detach()

    assert len(Packed(sequences, 10)) == 4
    torch.testing.assert_close(trained(10), trained(40), rtol=1e-12, atol=0)
