"""Augmentation by `get_sample(index, seed)` is the same for any number of workers and ranks, and after a resume."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset
from trainkit.strategies.single import SingleStrategy

from tests.tasks import FakeRank, Regression, StopAt, assert_close, assert_same_bits, regression_data, sgd
from trainkit import Data
from trainkit.data.loader import open_loader
from trainkit.data.order import sample_seed

NUM_SAMPLES = 18


class Seeds(Dataset):
    """Each sample is its index and its seed."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        raise AssertionError("get_sample comes first")

    def get_sample(self, index, seed):
        return torch.tensor([index, seed % 2**63])


class Noisy(Dataset):
    """Adds noise to each sample."""

    def __init__(self):
        self.inputs, self.targets = regression_data(NUM_SAMPLES).tensors

    def __len__(self):
        return NUM_SAMPLES

    def get_sample(self, index, seed):
        noise = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        return self.inputs[index] + noise, self.targets[index]


def sample_indices(dataset, *, epoch=0, position=0, rank=0, world_size=1, **settings):
    """Return the samples that a rank reads in an epoch, as rows."""
    data = Data(train=dataset, batch_size=4, **settings)
    loader = open_loader(data.stage_data("train"), FakeRank(rank, world_size), seed=3)
    step_batches = list(loader.step_batches(epoch, position))
    return [tuple(row) for w in step_batches for m in w.micro_batches for row in m.batch.tolist()]


def expected(epoch):
    return {(index, sample_seed(3, epoch, index) % 2**63) for index in range(NUM_SAMPLES)}


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_sample_gets_the_seed_of_its_epoch_and_index(epoch, workers):
    samples = sample_indices(Seeds(), epoch=epoch, num_workers=workers)
    assert len(samples) == NUM_SAMPLES
    assert set(samples) == expected(epoch)
    assert not expected(epoch) & expected(epoch + 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_give_their_samples_the_same_seeds(world_size):
    samples = [
        s for rank in range(world_size) for s in sample_indices(Seeds(), epoch=1, rank=rank, world_size=world_size)
    ]
    assert len(samples) == NUM_SAMPLES
    assert set(samples) == expected(1)


def test_a_resumed_epoch_gives_the_same_seeds():
    assert sample_indices(Seeds(), epoch=1, position=8, num_workers=1) == sample_indices(Seeds(), epoch=1)[8:]


def test_a_subset_and_a_loader_ask_for_seeds_too():
    chosen = sample_indices(Subset(Subset(Seeds(), range(2, 18)), [5, 0, 1, 3]), shuffle=False)
    assert chosen == [(2 + i, sample_seed(3, 0, place) % 2**63) for place, i in enumerate([5, 0, 1, 3])]
    loader = DataLoader(Seeds(), batch_size=4, shuffle=True)
    loader = open_loader(Data(train=loader).stage_data("train"), FakeRank(), seed=3)
    rows = {
        tuple(row) for step_batch in loader.step_batches(1, 0) for row in step_batch.micro_batches[0].batch.tolist()
    }
    assert rows == expected(1)


def test_ready_made_batches_get_a_seed_each():
    loader = open_loader(Data(train=Seeds()).stage_data("train"), FakeRank(), seed=3)
    assert {tuple(step_batch.micro_batches[0].batch.tolist()) for step_batch in loader.step_batches(2, 0)} == expected(
        2
    )


def test_evaluation_augments_every_time_alike():
    loader = open_loader(Data(validation=Seeds(), batch_size=4).stage_data("validation"), FakeRank(), seed=3)
    for _ in range(2):
        assert {tuple(row) for m in loader.batches() for row in m.batch.tolist()} == expected(0)


def test_augmented_runs_are_equal_with_workers_without_and_when_resumed(make_trainer):
    def fit(*, workers=0, strategy=None, stop=None, resume=None):
        task = Regression(sgd, hidden=8)
        callbacks = [] if stop is None else [StopAt(stop)]
        trainer = make_trainer(strategy, max_duration="2epoch", callbacks=callbacks)
        trainer.fit(task, Data(train=Noisy(), batch_size=4, num_workers=workers), resume=resume)
        return task, trainer.run_dir

    whole, _ = fit()
    assert_same_bits(fit(workers=2)[0], whole)
    _, run_dir = fit(workers=1, stop=7)
    assert_same_bits(fit(resume=run_dir)[0], whole)
    assert_close(fit(resume=run_dir, strategy=SingleStrategy(device="cpu", accumulate=2))[0], whole)
    plain = Regression(sgd, hidden=8)
    make_trainer(max_duration="2epoch").fit(plain, Data(train=regression_data(NUM_SAMPLES), batch_size=4))
    with pytest.raises(AssertionError):
        assert_close(plain, whole)
