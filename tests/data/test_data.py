"""Data of a run: datasets and DataLoaders that are read, and those that are refused."""

import os

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from tests.tasks import NumberStream, Regression, Seen, regression_data
from trainkit import Data, Mixture, UserError
from trainkit.data.loader import make_order


def numbers(num_samples=12):
    return TensorDataset(torch.arange(num_samples))


def first_of(samples):
    return samples[0]


# ---- DataLoaders


@pytest.mark.parametrize("stage", ["train", "validation"])
def test_a_list_of_datasets_is_refused_with_names_for_them(stage):
    data = Data(**{stage: [DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)]}, batch_size=2)
    with pytest.raises(UserError, match=rf"the {stage} data is a list of datasets.*Data\({stage}=\{{'easy': first"):
        data.stage_data(stage)


def test_a_loaders_dataset_collate_workers_and_batch_size_are_kept():
    dataset = numbers()
    loader = DataLoader(dataset, batch_size=3, collate_fn=first_of, num_workers=2, drop_last=True)
    stage_data = Data(train=loader).stage_data("train")
    assert stage_data.dataset is dataset
    assert stage_data.collate_fn is first_of
    assert (stage_data.num_workers, stage_data.batch_size, stage_data.drop_last, stage_data.shuffle) == (
        2,
        3,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("settings", "shuffle"),
    [
        ({}, False),
        ({"shuffle": True}, True),
        ({"sampler": SequentialSampler(numbers())}, False),
        ({"sampler": RandomSampler(numbers())}, True),
        ({"sampler": DistributedSampler(numbers(), num_replicas=2, rank=1)}, True),
    ],
    ids=["plain", "shuffle", "sequential", "random", "distributed"],
)
def test_a_plain_sampler_of_a_loader_is_replaced_by_the_strategys(settings, shuffle):
    stage_data = Data(train=DataLoader(numbers(), batch_size=3, **settings)).stage_data("train")
    assert stage_data.sampler is None
    assert stage_data.shuffle == shuffle
    assert stage_data.num_items == 12


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 12, num_samples=7),
        RandomSampler(numbers(), replacement=True),
        RandomSampler(numbers(), num_samples=7),
        SubsetRandomSampler(range(7)),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_custom_sampler_is_kept_and_sets_the_length_of_an_epoch(sampler):
    stage_data = Data(train=DataLoader(numbers(), batch_size=3, sampler=sampler)).stage_data("train")
    assert stage_data.sampler is sampler
    assert stage_data.num_items == len(sampler)


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_plain_batch_sampler_gives_batch_size_order_and_drop_last(shuffled):
    dataset = numbers()
    sampler = RandomSampler(dataset) if shuffled else SequentialSampler(dataset)
    stage_data = Data(train=DataLoader(dataset, batch_sampler=BatchSampler(sampler, 5, True))).stage_data("train")
    assert (stage_data.batch_size, stage_data.drop_last, stage_data.shuffle, stage_data.sampler) == (
        5,
        True,
        shuffled,
        None,
    )


def test_training_on_a_loader_gives_the_batches_of_its_dataset(make_trainer):
    def collate(samples):
        inputs, targets = default_collate(samples)
        return (inputs * 0 + 1, targets)

    task = Seen()
    loader = DataLoader(regression_data(10), batch_size=4, collate_fn=collate, shuffle=True)
    result = make_trainer().fit(task, loader)
    assert result.steps == 3
    assert [len(batch[0]) for batch in task.trained] == [4, 4, 2]
    assert all(isinstance(batch, tuple) and bool((batch[0] == 1).all()) for batch in task.trained)
    targets = torch.cat([batch[1] for batch in task.trained]).flatten().tolist()
    assert sorted(targets) == sorted(regression_data(10).tensors[1].flatten().tolist())
    assert targets != regression_data(10).tensors[1].flatten().tolist()


def test_a_weighted_sampler_decides_what_is_trained_on(make_trainer):
    task, dataset = Seen(), regression_data(10)
    sampler = WeightedRandomSampler([0.0] * 8 + [1.0] * 2, num_samples=20)
    result = make_trainer().fit(task, DataLoader(dataset, batch_size=4, sampler=sampler))
    assert result.samples == 20
    assert set(torch.cat([batch[1] for batch in task.trained]).flatten().tolist()) == set(
        dataset.tensors[1][8:].flatten().tolist()
    )


def test_a_loader_without_a_batch_size_is_pre_batched():
    stage_data = Data(train=DataLoader([torch.ones(3), torch.ones(2)], batch_size=None)).stage_data("train")
    assert stage_data.batch_size is None
    assert stage_data.num_items == 2


def test_a_loader_of_an_iterable_dataset_keeps_its_batch_size():
    stage_data = Data(train=DataLoader(NumberStream(5), batch_size=2)).stage_data("train")
    assert stage_data.is_iterable
    assert stage_data.batch_size == 2


@pytest.mark.parametrize(
    ("stage", "expected"),
    [("train", 6), ("validation", 3)],
)
def test_the_global_batch_of_the_data_wins_in_training_and_the_loaders_in_evaluation(stage, expected):
    data = Data(**{stage: DataLoader(numbers(), batch_size=3)}, batch_size=6)
    assert data.stage_data(stage).batch_size == expected


def test_evaluation_batch_size_overrides_batch_size_in_evaluations():
    data = Data(train=numbers(), validation=numbers(), batch_size=4, evaluation_batch_size=9)
    assert (data.stage_data("train").batch_size, data.stage_data("validation").batch_size) == (4, 9)


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
def test_only_training_data_is_shuffled_and_shortened(stage):
    data = Data(**{stage: numbers()}, batch_size=5, drop_last=True)
    stage_data = data.stage_data(stage)
    assert (stage_data.shuffle, stage_data.drop_last) == (False, False)
    loader = DataLoader(numbers(), batch_size=5, shuffle=True, drop_last=True)
    stage_data = Data(**{stage: loader}).stage_data(stage)
    assert (stage_data.shuffle, stage_data.drop_last) == (False, False)


def test_a_dataset_can_be_made_when_it_is_needed():
    class Lazy(Data):
        def dataset(self, stage):
            return numbers(5) if stage == "train" else None

    data = Lazy(batch_size=2)
    assert data.has("train")
    assert not data.has("validation")
    assert data.stage_data("train").num_items == 5


# ---- What is refused


@pytest.mark.parametrize("value", [0, -4, 2.5, "8", True])
@pytest.mark.parametrize("name", ["batch_size", "evaluation_batch_size"])
def test_a_batch_size_is_a_whole_number_above_zero(name, value):
    with pytest.raises(UserError, match=rf"{name} must be .*a whole number of samples, at least 1, got"):
        Data(train=numbers(), **{name: value})


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(
        UserError, match=r"num_workers must be a whole number, at least 0, got -1; 0 reads in the training process"
    ):
        Data(train=numbers(), num_workers=-1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("is_loader", [False, True])
def test_more_workers_than_eight_for_each_core_are_refused_with_the_largest_number(is_loader):
    limit = 8 * len(os.sched_getaffinity(0))

    def data(num_workers):
        if is_loader:
            return Data(validation=DataLoader(numbers(), batch_size=4, num_workers=num_workers))
        return Data(validation=numbers(), batch_size=4, num_workers=num_workers)

    assert data(limit).stage_data("validation").num_workers == limit
    with pytest.raises(UserError, match=rf"the validation data has num_workers=10000, .*; set num_workers={limit} or"):
        data(10_000).stage_data("validation")


@pytest.mark.parametrize("stage", ["train", "validation", "test", "predict"])
def test_missing_data_is_named_with_what_to_write(stage):
    with pytest.raises(UserError, match=rf"no {stage} data; pass Data\({stage}=dataset\)"):
        Data(batch_size=4).stage_data(stage)


@pytest.mark.parametrize("stage", ["train", "validation", "test", "predict"])
def test_an_empty_dataset_is_named(stage):
    with pytest.raises(UserError, match=f"the {stage} dataset is empty; check where its samples come from"):
        Data(**{stage: []}, batch_size=4).stage_data(stage)


def test_a_batch_larger_than_the_data_is_refused_with_the_largest_that_fits():
    with pytest.raises(UserError, match=r"batch_size=13 is larger .* 12 samples; set batch_size=12 or less"):
        Data(train=numbers(12), batch_size=13).stage_data("train")
    assert Data(train=numbers(12), batch_size=12).stage_data("train").num_items == 12


def test_an_evaluation_batch_may_be_larger_than_the_data():
    assert Data(validation=numbers(12), batch_size=100).stage_data("validation").num_items == 12


def test_single_samples_without_a_batch_size_are_refused():
    with pytest.raises(UserError, match="single samples; set batch_size"):
        Data(train=numbers()).stage_data("train")


def test_an_iterable_dataset_without_a_batch_size_is_refused():
    with pytest.raises(UserError, match="IterableDataset of samples; set batch_size"):
        Data(train=NumberStream(4)).stage_data("train")


@pytest.mark.parametrize("items", [[torch.ones(3)], NumberStream(4)])
def test_a_training_loader_of_global_batches_is_refused_with_a_batch_size(items):
    with pytest.raises(UserError, match=r"DataLoader has batch_size=None, .* but Data has batch_size=4; omit"):
        Data(train=DataLoader(items, batch_size=None), batch_size=4).stage_data("train")


@pytest.mark.parametrize("sizes", [{"batch_size": 4}, {"evaluation_batch_size": 4}])
def test_an_evaluation_loader_of_global_batches_keeps_them(sizes):
    data = Data(validation=DataLoader([torch.ones(3)], batch_size=None), **sizes)
    assert data.stage_data("validation").batch_size is None


def test_an_iterable_dataset_of_global_batches_is_read_by_one_worker():
    loader = DataLoader(NumberStream(4), batch_size=None, num_workers=2)
    with pytest.raises(
        UserError, match=r"of global batches \(batch_size=None\) with num_workers=2: .*num_workers=1 or 0"
    ):
        Data(train=loader).stage_data("train")


def test_an_iterable_dataset_with_several_workers_is_refused():
    with pytest.raises(UserError, match=r"num_workers=2.*Set num_workers=1 or 0"):
        Data(train=NumberStream(4), batch_size=2, num_workers=2).stage_data("train")


def test_a_dataset_without_a_length_is_refused():
    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(UserError, match=r"type Endless has no length; define __len__"):
        Data(train=Endless(), batch_size=2).stage_data("train")


def test_a_custom_batch_sampler_is_refused_by_name():
    class Buckets(BatchSampler):
        pass

    loader = DataLoader(numbers(), batch_sampler=Buckets(SequentialSampler(numbers()), 4, False))
    with pytest.raises(UserError, match=r"batch_sampler of type Buckets.*pass a sampler of single indices"):
        Data(train=loader).stage_data("train")


def test_a_sampler_without_a_length_is_refused_by_name():
    class Endless(Sampler):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(UserError, match=r"sampler Endless needs a length \(__len__\)"):
        Data(train=DataLoader(numbers(), batch_size=2, sampler=Endless())).stage_data("train")


@pytest.mark.parametrize("wrong", [numbers(), [1, 2, 3], "digits"])
def test_data_of_another_kind_is_refused_with_what_to_write(make_trainer, wrong):
    with pytest.raises(UserError, match=r"pass Data\(train=dataset, batch_size=32\), or a torch DataLoader"):
        make_trainer().fit(Regression(), wrong)


# ---- Weights


def labeled(*labels):
    return TensorDataset(torch.arange(len(labels)), torch.tensor(labels))


def drawn(data, epochs=50):
    order = make_order(data.stage_data("train"), seed=0)
    return torch.cat([order.slice(epoch, 0, order.num_samples) for epoch in range(epochs)])


def test_samples_are_drawn_in_proportion_to_their_weights():
    counts = drawn(Data(train=numbers(4), batch_size=2, sample_weights=[0, 1, 1, 2]), epochs=500).bincount(minlength=4)
    assert counts[0] == 0 and counts.sum() == 2000
    torch.testing.assert_close(counts / 2000, torch.tensor([0, 0.25, 0.25, 0.5]), rtol=0, atol=0.04)


class Targets(Dataset):
    targets = ("a", "a", "a", "b")

    def __len__(self):
        return 4


@pytest.mark.parametrize(
    ("dataset", "balance"),
    [
        (labeled(0, 0, 0, 1), True),
        (Subset(labeled(7, 0, 0, 0, 1), [1, 2, 3, 4]), True),
        (Targets(), True),
        (numbers(4), [5, 5, 5, 3]),
    ],
)
def test_balanced_classes_are_drawn_equally_often_from_every_kind_of_labels(dataset, balance):
    fraction = (drawn(Data(train=dataset, batch_size=2, balance_classes=balance), epochs=500) == 3).float().mean()
    assert abs(float(fraction) - 0.5) < 0.04


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample_weights": [1, 2]}, "of 2 samples for 12 samples"),
        ({"sample_weights": [1, -1]}, "that of sample 1 is -1"),
        ({"sample_weights": [0, 0]}, "all 0"),
        ({"sample_weights": [[1, 2]]}, "shape"),
        ({"sample_weights": "abc"}, "not a list of numbers"),
        ({"sample_weights": 3}, "not a list of numbers"),
        ({"balance_classes": True}, "TensorDataset.* does not define|of 12 samples"),
        ({"balance_classes": torch.rand(12)}, "whole numbers"),
        ({"sample_weights": [1] * 12, "balance_classes": True}, "give one of them"),
        ({"sample_weights": [1] * 12, "lengths": [1] * 12}, "cannot be combined with lengths"),
        ({"sample_weights": [1] * 12, "shuffle": False}, "shuffle=False"),
        ({"sample_weights": [1] * 12, "train": NumberStream(12)}, "IterableDataset"),
        ({"sample_weights": [1] * 12, "train": Mixture([numbers(6), numbers(6)])}, "its own order"),
    ],
)
def test_unusable_weights_are_refused(settings, message):
    floats = TensorDataset(torch.rand(12))
    with pytest.raises(UserError, match=message):
        Data(**{"train": floats, "batch_size": 2, **settings}).stage_data("train")
