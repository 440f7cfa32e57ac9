"""Random transforms in `__getitem__`: the same draws under every strategy, number of workers and resume."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, WeightedRandomSampler, default_collate

from tests.seams.training import BATCH_SIZE, BOUND, EVERY, WIDTH, Layers, difference, samples, trained
from trainkit import Callback, Data, Trainer
from trainkit.data.order import sample_seed
from trainkit.data.readers import make_reader, request_seed
from trainkit.rng import DrawSeeds, rng_state, seed_everything

SEED = 7


class Augmented(Dataset):
    """Draws as torchvision's transforms do, from the global generators, and some samples more than others."""

    def __init__(self):
        self.inputs, self.targets = samples().tensors

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        inputs = self.inputs[index]
        if torch.rand(()) < 0.5:
            inputs = inputs + 0.1 * torch.randn(WIDTH, dtype=torch.float64)
        return inputs * random.uniform(0.8, 1.2) + 0.1 * np.random.randn(), self.targets[index]


class FromLaterBatch(Augmented):
    def __getitem__(self, index):
        return super().__getitem__(index) if index > 3 * BATCH_SIZE else (self.inputs[index], self.targets[index])


class AllAtOnce(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class WithGetSample(Augmented):
    def get_sample(self, index, seed):
        inputs, targets = self[index]
        return inputs + seed / 2**64, targets


class GlobalBatches(Augmented):
    def __len__(self):
        return len(self.inputs) // BATCH_SIZE

    def __getitem__(self, index):
        rows = index * BATCH_SIZE + torch.randperm(BATCH_SIZE)
        return self.inputs[rows] * random.uniform(0.8, 1.2), self.targets[rows]


class WithDropout(Layers):
    def forward(self, inputs):
        return super().forward(nn.functional.dropout(inputs, 0.5))


def seed_all(index, epoch=0):
    seed = sample_seed(SEED, epoch, index)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return seed


def seeded(dataset, index):
    seed = seed_all(index)
    return dataset.get_sample(index, seed) if hasattr(dataset, "get_sample") else dataset[index]


def plain_loop(dataset):
    items = [seeded(dataset, index) for index in range(len(dataset))]
    return trained_on(default_collate(items[start : start + BATCH_SIZE]) for start in range(0, len(items), BATCH_SIZE))


def trained_on(batches):
    task = Layers()
    optimizer = task.configure_optimizers()
    for inputs, targets in batches:
        nn.functional.mse_loss(task(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


def data(dataset, **settings):
    return Data(train=dataset, **{"batch_size": BATCH_SIZE, "shuffle": False, "seed": SEED, **settings})


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "pipeline"])
def test_random_transforms_are_those_of_a_plain_loop_under_every_strategy(strategy):
    weights = trained(strategy, Layers(), data=data(Augmented()))
    assert difference(weights, plain_loop(Augmented())) < BOUND


@pytest.mark.parametrize("make", [FromLaterBatch, AllAtOnce, WithGetSample])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_draws_in_another_way_has_the_same_draws(make, num_workers):
    weights = trained("single", Layers(), data=data(make(), num_workers=num_workers))
    assert difference(weights, plain_loop(make())) < BOUND


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_every_rank_has_the_rows_of_the_same_random_global_batch(strategy):
    weights = trained(strategy, Layers(), data=data(DataLoader(GlobalBatches(), batch_size=None), batch_size=None))
    dataset = GlobalBatches()
    assert difference(weights, trained_on(seeded(dataset, index) for index in range(len(dataset)))) < BOUND


class Stream(IterableDataset):
    """Yields the samples of a dataset that draws, shuffled by a global generator within blocks of 8."""

    def __iter__(self):
        dataset = Augmented()
        for start in range(0, len(dataset), 8):
            yield from random.sample([dataset[index] for index in range(start, start + 8)], 8)


def plain_loop_over_stream():
    def batches():
        samples = iter(Stream())
        for position in range(0, len(Augmented()), BATCH_SIZE):
            seed_everything(request_seed(SEED, 0, position))
            yield default_collate([next(samples) for _ in range(BATCH_SIZE)])

    return trained_on(batches())


@pytest.mark.parametrize("strategy", EVERY)
def test_a_stream_that_draws_is_that_of_a_plain_loop_under_every_strategy(strategy):
    weights = trained(strategy, Layers(), data=data(Stream()))
    assert difference(weights, plain_loop_over_stream()) < BOUND


@pytest.mark.parametrize("make", [Augmented, Stream])
def test_the_draws_of_a_step_do_not_depend_on_those_of_the_dataset(make):
    weights = [trained("single", WithDropout(), data=data(make(), num_workers=number)) for number in (0, 1)]
    assert difference(*weights) == 0


def test_a_resumed_run_has_the_draws_of_one_that_was_not_interrupted(tmp_path):
    settings = {"loggers": [], "num_sanity_batches": 0, "seed": SEED}
    expected, task = WithDropout(), WithDropout()
    loaded = data(FromLaterBatch(), shuffle=True)
    Trainer(max_duration="10step", callbacks=[], **settings).fit(expected, loaded)
    Trainer(max_duration="4step", run_dir=tmp_path / "run", **settings).fit(WithDropout(), loaded)
    random.random(), np.random.rand(), torch.rand(())
    Trainer(max_duration="10step", callbacks=[], **settings).fit(task, loaded, resume=tmp_path / "run")
    assert difference(task.state_dict(), expected.state_dict()) == 0


class Validations(Callback):
    def __init__(self):
        self.losses = []

    def on_evaluation_end(self, run, stage, metrics):
        self.losses.append(metrics["validation/loss"])


@pytest.mark.parametrize("make", [lambda: Subset(Augmented(), range(4, 20)), Stream], ids=["map-style", "stream"])
def test_an_evaluation_has_the_same_random_crops_each_time(make):
    task, losses = Layers(), []
    for num_workers in (0, 0, 1):
        loaded = Data(validation=make(), evaluation_batch_size=4, num_workers=num_workers)
        losses.append(Trainer(seed=SEED, loggers=[], callbacks=[]).validate(task, loaded)["validation/loss"])
    assert len({*losses}) == 1


def test_samples_that_come_twice_an_epoch_have_draws_of_their_own():
    dataset, seen = Augmented(), []
    dataset.inputs = torch.zeros_like(dataset.inputs)

    def collate(items):
        seen.extend(tuple(inputs.tolist()) for inputs, _ in items)
        return default_collate(items)

    sampler = WeightedRandomSampler([1.0] + [0.0] * 47, 48)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=collate)
    trained("single", Layers(), data=Data(train=loader))
    assert len({*seen[-48:]}) == 48  # the first micro-batch is read twice


def mixed_up(items):
    inputs, targets = default_collate(items)
    return inputs * np.random.beta(0.2, 0.2) * torch.rand(()), targets


def test_what_a_collate_function_draws_does_not_depend_on_workers():
    weights = [
        trained("single", Layers(), data=data(samples(), collate_fn=mixed_up, num_workers=number)) for number in (0, 2)
    ]
    assert difference(*weights) == 0


def test_one_setting_leaves_the_generators_of_the_process_to_the_dataset():
    dataset = Augmented()
    weights = trained("single", Layers(), data=data(dataset, seed_samples=False), seed=SEED)
    seed_everything(SEED)
    items = [dataset[index] for index in range(len(dataset))]
    steps = (default_collate(items[start : start + BATCH_SIZE]) for start in range(0, len(items), BATCH_SIZE))
    assert difference(weights, trained_on(steps)) < BOUND


def test_each_epoch_and_the_collate_function_have_draws_of_their_own():
    def collate(items):
        return torch.stack([item[0] for item in items]), torch.rand(4)

    class Drawing(Dataset):
        def __getitem__(self, index):
            return torch.rand(4), index

    read = make_reader(Drawing(), collate)
    read(torch.arange(2), 0)  # finds that they draw
    (first, of_first), (second, of_second), (again, of_again) = (read(torch.arange(2), epoch) for epoch in (0, 1, 0))
    assert torch.equal(first, again) and torch.equal(of_first, of_again)
    draws = [*first, *second, of_first, of_second]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


def test_reading_leaves_the_generators_of_the_process_alone():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    batch = make_reader(Augmented(), default_collate)(torch.arange(4), 0)
    assert len({*batch[0][:, 0].tolist()}) == 4
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


DRAWS = {
    "python": [
        lambda: random.getrandbits(32 * 624),
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.shuffle([1, 2, 3]),
    ],
    "numpy": [
        lambda: np.random.rand(312),
        np.random.rand,
        np.random.randn,
        lambda: np.random.permutation(3),
        lambda: np.random.binomial(9, 0.3),
    ],
    "torch": [
        lambda: torch.rand(624),
        lambda: torch.rand(()),
        lambda: torch.randn(1),
        lambda: torch.randperm(3),
        lambda: torch.zeros(2).normal_(),
    ],
}


@pytest.mark.parametrize(("name", "draw"), [(name, draw) for name, draws in DRAWS.items() for draw in draws])
def test_each_draw_of_a_global_generator_is_seen_and_undone(name, draw):
    for _ in range(2):  # the second number of a pair of normal numbers is drawn with the first
        draws, expected = DrawSeeds(), rng_state()
        draws.call(draw)
        assert draws.drawn == {name}
        assert str(rng_state()) == str(expected)
        draw()
