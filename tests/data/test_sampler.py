"""The samples of a global batch that a rank takes."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from tests.tasks import Regression, regression_data
from trainkit import UserError
from trainkit.data.order import (
    GlobalOrder,
    LengthGroupedOrder,
    SamplerOrder,
    ShardSampler,
    WeightedOrder,
    fingerprint,
)
from trainkit.rng import seed_everything


def samplers(num_samples, world_size, *, seed=0, shuffle=True):
    order = GlobalOrder(num_samples, seed=seed, shuffle=shuffle)
    return [ShardSampler(range(num_samples), order, rank=rank, world_size=world_size) for rank in range(world_size)]


def test_a_rank_takes_every_wth_sample_of_each_global_batch():
    first, second = samplers(10, 2, shuffle=False)
    starts = [(0, 4), (4, 8), (8, 10)]
    assert [first.shard(0, *batch).tolist() for batch in starts] == [[0, 2], [4, 6], [8]]
    assert [second.shard(0, *batch).tolist() for batch in starts] == [[1, 3], [5, 7], [9]]


@given(
    num_samples=st.integers(1, 30),
    batch_size=st.integers(1, 12),
    world_size=st.integers(1, 6),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 100),
)
def test_the_shards_of_all_ranks_make_each_global_batch(num_samples, batch_size, world_size, epoch, seed):
    ranks = samplers(num_samples, world_size, seed=seed)
    order = GlobalOrder(num_samples, seed=seed).slice(epoch, 0, num_samples)
    for start in range(0, num_samples, batch_size):
        stop = min(start + batch_size, num_samples)
        shards = [sampler.shard(epoch, start, stop) for sampler in ranks]
        interleaved = [int(shards[k % world_size][k // world_size]) for k in range(stop - start)]
        assert interleaved == order[start:stop].tolist()
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(
    per_rank=st.integers(1, 12),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 100),
    shuffle=st.booleans(),
)
def test_it_is_torchs_distributed_sampler_where_that_neither_pads_nor_drops(per_rank, world_size, epoch, seed, shuffle):
    num_samples = per_rank * world_size
    for rank, sampler in enumerate(samplers(num_samples, world_size, seed=seed, shuffle=shuffle)):
        expected = DistributedSampler(
            range(num_samples), num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed
        )
        expected.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert list(sampler) == list(expected)
        assert len(sampler) == len(expected)


@given(num_samples=st.integers(1, 40), world_size=st.integers(1, 6))
def test_iterated_over_an_epoch_ranks_give_each_sample_once(num_samples, world_size):
    ranks = samplers(num_samples, world_size)
    lists = [list(sampler) for sampler in ranks]
    assert sorted(index for items in lists for index in items) == list(range(num_samples))
    assert [len(sampler) for sampler in ranks] == [len(items) for items in lists]


def test_a_custom_sampler_draws_the_same_in_the_same_epoch_and_differently_in_another():
    def drawn(epoch, seed=0):
        torch.rand(7)  # the state of the global generator does not matter
        return SamplerOrder(RandomSampler(range(20)), seed=seed).slice(epoch, 0, 20).tolist()

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, seed=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GlobalOrder(20, seed=0),
        lambda: GlobalOrder(20, seed=0, computed_above=0),
        lambda: WeightedOrder(torch.rand(20, generator=torch.Generator().manual_seed(0)), 20, seed=0),
        lambda: LengthGroupedOrder([1 + index % 7 for index in range(20)], batch_size=2, seed=0, batches_per_group=3),
        lambda: SamplerOrder(RandomSampler(range(20)), seed=0),
    ],
    ids=["kept", "computed", "weighted", "by length", "sampler"],
)
def test_a_slice_is_that_of_the_whole_epoch_in_any_epoch_first(make):
    for epoch in (0, 1, 2):
        whole = make().slice(epoch, 0, 20)
        assert len(whole) == 20
        assert torch.equal(make().slice(epoch, 3, 17, 2), whole[3:17:2])


def test_drawing_from_a_custom_sampler_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    SamplerOrder(RandomSampler(range(20)), seed=0).slice(0, 0, 20)
    assert torch.equal(torch.get_rng_state(), state)


class Drawing(Sampler):
    """Shuffles with the generator that is named."""

    def __init__(self, library):
        self.library, self.own = library, np.random.default_rng()

    def __len__(self):
        return 20

    def __iter__(self):
        order = list(range(20))
        if self.library == "random":
            random.shuffle(order)
        elif self.library == "numpy":
            np.random.shuffle(order)
        else:
            self.own.shuffle(order)
        return iter(order)


@pytest.mark.parametrize("library", ["random", "numpy"])
def test_ranks_draw_the_same_from_a_sampler_that_uses_python_or_numpy(library):
    def drawn(rank, epoch=0):
        seed_everything(rank)  # as ranks are
        order = SamplerOrder(Drawing(library), seed=0).slice(epoch, 0, 20).tolist()
        return order, random.random(), np.random.rand(), float(torch.rand(()))

    (first, *after), (second, *_) = drawn(0), drawn(1)
    assert first == second != drawn(0, epoch=1)[0]
    seed_everything(0)
    assert after == [random.random(), np.random.rand(), float(torch.rand(()))]  # what the run draws is untouched


def test_a_sampler_that_differs_between_ranks_is_refused_and_one_that_cannot_repeat_warns():
    orders = [SamplerOrder(Drawing("own"), seed=0) for _ in range(2)]
    with pytest.raises(UserError, match="Drawing draws another order on each rank"):
        orders[0].check([fingerprint(order) for order in orders])
    assert "cannot seed" in orders[0].check([fingerprint(orders[0])])
    for library in ("random", "numpy"):
        order = SamplerOrder(Drawing(library), seed=0)
        assert order.check([fingerprint(order), fingerprint(order)]) is None


def test_a_run_warns_at_its_start_of_a_sampler_that_a_resume_changes(make_trainer, caplog):
    loader = DataLoader(regression_data(20), batch_size=4, sampler=Drawing("own"))
    make_trainer(max_duration="1step").fit(Regression(), loader)
    assert "a resumed run would use another order" in caplog.text


def test_set_epoch_of_a_custom_sampler_is_called():
    class Epochs(Sampler):
        epoch = None

        def __len__(self):
            return 3

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch] * 3)

    order = SamplerOrder(Epochs(), seed=0)
    assert order.slice(4, 0, 3).tolist() == [4, 4, 4]
    assert order.slice(5, 1, 3).tolist() == [5, 5]
    assert order.slice(4, 0, 3, 2).tolist() == [4, 4]


@pytest.mark.parametrize("given", [10, 14])
def test_a_custom_sampler_that_gives_another_number_than_its_length_is_refused(given):
    class Wrong(Sampler):
        def __len__(self):
            return 12

        def __iter__(self):
            return iter(range(given))

    with pytest.raises(UserError, match=rf"Wrong.* {given} .*12"):
        SamplerOrder(Wrong(), seed=0).slice(0, 0, 4)
