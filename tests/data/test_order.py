from itertools import permutations
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DistributedSampler

from trainkit.data.data import check_sample_weights
from trainkit.data.order import GlobalOrder, LengthGroupedOrder, WeightedOrder, _hash, sample_seed

HUGE = 2**40


@pytest.mark.parametrize("num_samples", [1, 7, 64, 1001])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_kept_order_is_that_of_distributed_sampler(num_samples: int, world_size: int) -> None:
    order = GlobalOrder(num_samples, seed=5)
    for epoch in (0, 1, 9):
        for rank in range(world_size):
            sampler = DistributedSampler(range(num_samples), world_size, rank, seed=5)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            ours = order.slice(epoch, rank, num_samples, world_size).tolist()
            # The sampler repeats its first samples to fill up the ranks; we give a rank fewer instead.
            assert ours == list(sampler)[: len(ours)]
            assert len(ours) == len(range(rank, num_samples, world_size))


def test_order_without_shuffling_counts() -> None:
    assert GlobalOrder(10, seed=1, shuffle=False).slice(3, 2, 9, 3).tolist() == [2, 5, 8]


@given(num_samples=st.integers(0, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_computed_order_holds_each_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = GlobalOrder(num_samples, seed=seed, computed_above=0)
    assert sorted(order.slice(epoch, 0, num_samples).tolist()) == list(range(num_samples))


@given(
    num_samples=st.integers(1, 60_000),
    bounds=st.tuples(st.integers(0, 61_000), st.integers(0, 20_000)),
    step=st.integers(1, 40),
    kept=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_slice_is_the_slice_of_the_whole_epoch(
    num_samples: int, bounds: tuple[int, int], step: int, kept: bool
) -> None:
    order = GlobalOrder(num_samples, seed=1, computed_above=num_samples if kept else 0)
    start, stop = bounds[0], bounds[0] + bounds[1]
    expected = GlobalOrder(num_samples, seed=1, computed_above=num_samples if kept else 0).slice(2, 0, num_samples)
    order.slice(1, start, stop)  # what another epoch left behind must not show
    assert torch.equal(order.slice(2, start, stop, step), expected[start:stop:step])


@given(
    num_samples=st.integers(1, 120),
    batch_size=st.integers(1, 50),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    computed=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_each_sample_comes_once_when_the_world_changes_at_any_step(
    num_samples: int, batch_size: int, worlds: list[int], computed: bool
) -> None:
    seen: list[int] = []
    for step, start in enumerate(range(0, num_samples, batch_size)):
        world_size = worlds[step % len(worlds)]
        # Every run begins with a new order: nothing but (seed, epoch, position) may matter.
        order = GlobalOrder(num_samples, seed=3, computed_above=0 if computed else num_samples)
        for rank in range(world_size):
            seen += order.slice(1, start + rank, min(start + batch_size, num_samples), world_size).tolist()
    assert sorted(seen) == list(range(num_samples))


def test_orders_of_a_million_million_samples_do_not_repeat() -> None:
    order = GlobalOrder(HUGE, seed=0)
    parts = [order.slice(0, start, start + 20_000) for start in (0, HUGE // 3, HUGE - 20_000)]
    samples = torch.cat(parts)
    assert samples.unique().numel() == 60_000
    assert int(samples.min()) >= 0 and int(samples.max()) < HUGE
    assert order.slice(0, HUGE - 5, HUGE + 100).numel() == 5


@pytest.mark.parametrize("num_samples", [2**62, 2**61 + 12345])
def test_the_largest_orders_do_not_overflow(num_samples: int) -> None:
    order = GlobalOrder(num_samples, seed=7)
    samples = torch.cat([order.slice(1, 0, 10_000), order.slice(1, num_samples - 10_000, num_samples)])
    assert samples.unique().numel() == 20_000
    assert int(samples.min()) >= 0 and int(samples.max()) < num_samples
    assert abs(z_of_uniform_cells(samples // (num_samples // 256 + 1), 256)) < 5


@pytest.mark.parametrize("num_samples", [12_345_678, 10**9 + 7, HUGE])
def test_computed_order_scatters_neighbours_evenly(num_samples: int) -> None:
    count, cells = 100_000, 32
    for seed in range(2):
        samples = GlobalOrder(num_samples, seed=seed).slice(seed, 1000, 1000 + count)
        cell = samples * cells // num_samples if num_samples < 2**50 else samples // (num_samples // cells)
        assert abs(z_of_uniform_cells(cell, cells)) < 5
        # Pairs of neighbours, and of neighbours' neighbours: 32 x 32 cells.
        assert abs(z_of_uniform_cells(cell[:-1] * cells + cell[1:], cells**2)) < 5
        assert abs(z_of_uniform_cells(cell[:-2] * cells + cell[2:], cells**2)) < 5
        # The low bits too.
        assert abs(z_of_uniform_cells(samples % 61, 61)) < 5
        assert abs(correlation(samples[:-1], samples[1:])) < 5 / sqrt(count)
        assert abs(correlation(torch.arange(count), samples)) < 5 / sqrt(count)


def test_computed_orders_of_two_epochs_or_seeds_are_unrelated() -> None:
    count, num_samples = 100_000, 50_000_000
    first = GlobalOrder(num_samples, seed=0).slice(0, 0, count)
    for seed, epoch in ((0, 1), (1, 0), (2**40, 0)):
        second = GlobalOrder(num_samples, seed=seed).slice(epoch, 0, count)
        pairs = (first * 50 // num_samples) * 50 + second * 50 // num_samples
        assert abs(z_of_uniform_cells(pairs, 2500)) < 5
        assert abs(z_of_uniform_cells((first - second) % 64, 64)) < 5


@pytest.mark.parametrize("num_samples", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_every_permutation_of_a_few_samples_is_equally_likely(num_samples: int) -> None:
    numbers = {found: number for number, found in enumerate(permutations(range(num_samples)))}
    draws = 300 if num_samples == 3 else 1200  # 50 or 10 for each permutation
    drawn = [
        numbers[tuple(GlobalOrder(num_samples, seed=seed, computed_above=0).slice(0, 0, num_samples).tolist())]
        for seed in range(draws)
    ]
    assert abs(z_of_uniform_cells(torch.tensor(drawn), len(numbers))) < 5


def test_computed_order_has_as_many_fixed_points_as_chance_gives() -> None:
    num_samples, orders = 1000, 200
    positions = torch.arange(num_samples)
    fixed = sum(
        int((GlobalOrder(num_samples, seed=seed, computed_above=0).slice(0, 0, num_samples) == positions).sum())
        for seed in range(orders)
    )
    assert abs(fixed - orders) < 5 * sqrt(orders)


def test_orders_are_the_same_in_every_release() -> None:
    order = GlobalOrder(10**9, seed=42)
    assert order.slice(3, 123_456_789, 123_456_794).tolist() == COMPUTED_ORDER
    assert GlobalOrder(25, seed=42, computed_above=0).slice(3, 0, 6).tolist() == [18, 7, 19, 2, 8, 14]
    grouped = LengthGroupedOrder([7 * index % 11 for index in range(60)], batch_size=1, seed=42)
    assert grouped.slice(3, 47, 53).tolist() == [4, 58, 33, 34, 32, 8]
    draws = WeightedOrder(torch.ones(1000), HUGE, seed=42)
    assert draws.slice(3, 2**33 - 3, 2**33 + 3).tolist() == WEIGHTED_DRAWS


def test_slice_owns_its_memory() -> None:
    for order in (GlobalOrder(1000, seed=0), GlobalOrder(1000, seed=0, computed_above=0)):
        assert order.slice(0, 5, 10).untyped_storage().nbytes() == 5 * 8
        order.slice(0, 0, 1000).zero_()
        assert int(order.slice(0, 0, 1000).sum()) == 999 * 500


def test_slices_ignore_the_default_device() -> None:
    with torch.device("meta"):
        for order in (GlobalOrder(10, seed=0), GlobalOrder(10, seed=0, computed_above=0)):
            assert order.slice(0, 0, 10).device.type == "cpu"
            assert order.slice(0, 10, 10).device.type == "cpu"
        assert WeightedOrder([1.0, 2.0], 10, seed=0).slice(0, 0, 10).device.type == "cpu"


@pytest.mark.parametrize("arguments", [(-1, 5, 1), (0, -5, 1), (0, 5, 0), (0, 5, -1)])
def test_positions_that_go_backwards_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="positions start at 0"):
        GlobalOrder(10, seed=0).slice(0, *arguments)


@pytest.mark.parametrize("num_samples", [-1, 2**62 + 1])
def test_sizes_that_cannot_be_are_refused(num_samples: int) -> None:
    with pytest.raises(ValueError, match="num_samples"):
        GlobalOrder(num_samples, seed=0)
    with pytest.raises(ValueError, match="num_samples"):
        WeightedOrder([1.0], num_samples, seed=0)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_that_torch_would_not_take_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be between"):
        GlobalOrder(1, seed=seed)
    with pytest.raises(ValueError, match="seed must be between"):
        WeightedOrder([1.0], 1, seed=seed)
    largest = GlobalOrder(3, seed=2**63 - 1)
    assert sorted(largest.slice(10**6, 0, 3).tolist()) == [0, 1, 2]


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0, 0.5, 0.0])
    count = 200_000
    drawn = WeightedOrder(weights, count, seed=1).slice(0, 0, count)
    counts = torch.bincount(drawn, minlength=len(weights)).double()
    expected = weights.double() / weights.sum() * count
    assert counts[expected == 0].sum() == 0
    chance = expected > 0
    z = ((counts - expected)[chance] / expected[chance].sqrt()).abs().max()
    assert z < 5


@pytest.mark.parametrize(("uniform", "drawn"), [(0.0, 1), (0.25, 3), (1 - 2.0**-53, 3), (1.0, 3)])
def test_sample_of_weight_zero_is_not_drawn_at_the_borders_either(
    monkeypatch: pytest.MonkeyPatch, uniform: float, drawn: int
) -> None:
    monkeypatch.setattr(
        "trainkit.data.order._uniform", lambda positions, *_: torch.full(positions.shape, uniform, dtype=torch.float64)
    )
    assert WeightedOrder([0.0, 1.0, 0.0, 3.0, 0.0], 1, seed=0).slice(0, 0, 1).tolist() == [drawn]


def test_weighted_draws_of_neighbours_and_epochs_are_unrelated() -> None:
    count = 100_000
    order = WeightedOrder(torch.ones(16), count, seed=1)
    first, second = order.slice(0, 0, count), order.slice(1, 0, count)
    assert abs(z_of_uniform_cells(first[:-1] * 16 + first[1:], 256)) < 5
    assert abs(z_of_uniform_cells(first * 16 + second, 256)) < 5
    far = WeightedOrder(torch.ones(16), HUGE, seed=1).slice(0, 2**32, 2**32 + count)
    assert abs(z_of_uniform_cells(first * 16 + far, 256)) < 5


def test_no_two_words_share_a_hash() -> None:
    words = torch.randint(2**32, (1_000_000,), generator=torch.Generator().manual_seed(0)).unique()
    assert _hash(words, (1, 2)).unique().numel() == words.numel()  # of random numbers a hundred would be equal


@given(start=st.integers(0, 50_000), length=st.integers(0, 20_000), step=st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_weighted_slice_is_the_slice_of_the_whole_epoch(start: int, length: int, step: int) -> None:
    weights = [1.0, 0.0, 3.0, 2.5]
    expected = WeightedOrder(weights, 40_000, seed=2).slice(4, 0, 40_000)
    assert torch.equal(
        WeightedOrder(weights, 40_000, seed=2).slice(4, start, start + length, step),
        expected[start : start + length : step],
    )


def test_huge_and_tiny_weights_are_drawn() -> None:
    assert set(WeightedOrder([1e308, 1e308, 0.0], 100, seed=0).slice(0, 0, 100).tolist()) == {0, 1}
    assert WeightedOrder([0.0, 5e-324, 0.0], 100, seed=0).slice(0, 0, 100).tolist() == [1] * 100


@pytest.mark.parametrize("weights", [[], [[1.0]], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf")]])
def test_unusable_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be"):
        check_sample_weights(weights)


def test_sample_seeds_are_the_same_in_every_release() -> None:
    assert [sample_seed(0, 0, 0), sample_seed(1, 2, 3), sample_seed(-1, 0, 2**40)] == SAMPLE_SEEDS


def test_samples_of_an_epoch_never_share_a_seed() -> None:
    seeds = {sample_seed(7, 1, index) for index in range(50_000)}
    assert len(seeds) == 50_000
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_bit_of_seed_epoch_and_index_turns_half_of_the_result(place: int) -> None:
    for bit in range(0, 40, 3):
        turned = []
        for trial in range(100):
            numbers = [trial, trial * 7, trial * 31]
            before = sample_seed(*numbers)
            numbers[place] ^= 1 << bit
            turned.append((before ^ sample_seed(*numbers)).bit_count())
        assert 30 < sum(turned) / len(turned) < 34
        assert min(turned) > 10


def test_order_of_numbers_matters_to_a_sample_seed() -> None:
    assert len({sample_seed(*numbers) for numbers in permutations((1, 2, 3))}) == 6


def z_of_uniform_cells(cells: Tensor, num_cells: int) -> float:
    """Return how many standard deviations the chi-square statistic is off when all cells are equally likely."""
    counts = torch.bincount(cells, minlength=num_cells).double()
    assert counts.numel() == num_cells
    expected = cells.numel() / num_cells
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - (num_cells - 1)) / sqrt(2 * (num_cells - 1))


def correlation(first: Tensor, second: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.double(), second.double()]))[0, 1])


COMPUTED_ORDER = [599661547, 370260919, 814842122, 809878173, 476945088]
WEIGHTED_DRAWS = [121, 573, 845, 118, 671, 316]
SAMPLE_SEEDS = [2558736989570252433, 16914669369030367833, 504330199755280741]
