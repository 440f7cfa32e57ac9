"""Readers: the fast ones give exactly the batches of the slow one."""

import gc
import multiprocessing
import os
import random
import resource

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from tests.tasks import NumberStream, Regression
from trainkit import Data, UserError
from trainkit.data.readers import (
    Request,
    SampleReader,
    WorkerIterator,
    WorkerPool,
    make_reader,
    read_rows,
    request_seed,
)
from trainkit.testing import run_ranks

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float16]


def assert_same_batch(actual, expected):
    assert type(actual) is type(expected) is list
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype
        assert left.is_contiguous() == right.is_contiguous()
        assert torch.equal(left, right)


@given(
    num_samples=st.integers(1, 20),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_rows_of_tensors_are_what_default_collate_makes_of_samples(num_samples, shapes, dtype, data):
    tensors = [(torch.rand(num_samples, *shape) * 100).to(dtype) for shape in shapes]
    dataset = TensorDataset(*tensors)
    index = st.integers(0, num_samples - 1)
    indices = data.draw(st.lists(index, min_size=1, max_size=8))
    subset = data.draw(st.none() | st.lists(index, min_size=1, max_size=8))
    if subset is not None:
        dataset = Subset(dataset, subset)
        indices = [i % len(subset) for i in indices]
    reader = make_reader(dataset, default_collate)
    assert reader.func is read_rows
    assert_same_batch(reader(torch.tensor(indices), 0), default_collate([dataset[i] for i in indices]))


def test_a_view_of_a_larger_tensor_is_read_row_by_row_too():
    base = torch.arange(60).reshape(10, 6)
    dataset = TensorDataset(base[:, ::2], base.t()[:6].t())
    indices = torch.tensor([9, 0, 3])
    expected = default_collate([dataset[int(i)] for i in indices])
    assert_same_batch(make_reader(dataset, default_collate)(indices, 0), expected)


def test_a_batch_shares_no_memory_with_the_dataset():
    dataset = TensorDataset(torch.zeros(4))
    make_reader(dataset, default_collate)(torch.arange(4), 0)[0].fill_(7)
    assert dataset.tensors[0].sum() == 0


def test_a_subclass_is_read_sample_by_sample():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    dataset = Doubled(torch.arange(5))
    for wrapped in (dataset, Subset(dataset, [4, 3, 2])):
        reader = make_reader(wrapped, default_collate)
        assert type(reader) is SampleReader
        (batch,) = reader(torch.tensor([0, 2]), 0)
        assert batch.tolist() == [int(wrapped[0][0]), int(wrapped[2][0])]


def test_a_custom_collate_gets_the_samples_unchanged():
    def collate(samples):
        seen.extend(samples)
        return len(samples)

    seen = []
    dataset = TensorDataset(torch.arange(5), torch.arange(5) * 10)
    assert make_reader(dataset, collate)(torch.tensor([3, 1]), 0) == 2
    assert seen == [(3, 30), (1, 10)]
    assert all(isinstance(sample, tuple) for sample in seen)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([torch.ones(2), torch.ones(3)], "stack expects each tensor to be equal size"),
        ([[1, 2], [1]], "of equal size"),
        ([None, None], "NoneType"),
    ],
)
def test_samples_that_make_no_batch_name_the_remedies(make_trainer, samples, reason, num_workers):
    data = Data(train=samples, batch_size=2, num_workers=num_workers, shuffle=False)

    with pytest.raises(UserError, match=r"cannot be made a batch: ") as caught:
        make_trainer(max_duration="1step").fit(Regression(), data)

    for word in (reason, "Data(collate_fn=function)", "trainkit.Packed"):
        assert word in str(caught.value)


def test_an_error_of_a_custom_collate_function_is_raised_as_it_is(make_trainer):
    def collate_fn(samples):
        raise RuntimeError("tensors should be of equal size")

    with pytest.raises(RuntimeError, match=r"(?m)^tensors should be of equal size$"):
        make_trainer(max_duration="1step").fit(Regression(), Data(train=[1, 2], batch_size=2, collate_fn=collate_fn))


def test_getitems_is_called_once_for_all_samples():
    class AtOnce(Dataset):
        def __init__(self):
            self.asked = []

        def __getitem__(self, index):
            raise AssertionError("samples are asked for at once")

        def __getitems__(self, indices):
            self.asked.append(indices)
            return [torch.tensor(float(index)) for index in indices]

    dataset = AtOnce()
    assert make_reader(dataset, default_collate)(torch.tensor([5, 2]), 0).tolist() == [5.0, 2.0]
    assert dataset.asked == [[5, 2]]
    assert all(type(index) is int for index in dataset.asked[0])


def test_indices_are_python_integers():
    class Indexed(Dataset):
        def __getitem__(self, index):
            assert type(index) is int
            return index

    assert make_reader(Indexed(), default_collate)(torch.tensor([5, 2]), 0).tolist() == [5, 2]


# ---- Workers


class Draws(Dataset):
    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def drawn(workers, positions):
    requests = [Request(torch.tensor([position]), request_seed(0, 0, position)) for position in positions]
    reader = make_reader(Draws(), default_collate)
    pool = WorkerPool(reader, num_workers=workers, pin_memory=False, persistent=False)
    batches = pool.read(iter(requests))
    return [tuple(batch.flatten().tolist()) for batch in batches]


def test_random_numbers_of_a_worker_depend_on_the_samples_and_not_on_the_worker():
    alone = drawn(1, range(6))
    assert drawn(2, range(6)) == alone
    assert drawn(1, range(3, 6)) == alone[3:]
    assert len({number for numbers in alone for number in numbers}) == 18


def test_reading_in_workers_leaves_the_global_generators_alone():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    drawn(1, range(2))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_an_error_in_a_worker_has_its_traceback():
    class Broken(Dataset):
        def __getitem__(self, index):
            raise KeyError("no such sample")

    reader = make_reader(Broken(), default_collate)
    batches = WorkerPool(reader, num_workers=1, pin_memory=False, persistent=False).read(
        iter([Request(torch.tensor([0]), 1)])
    )
    with pytest.raises(KeyError, match="no such sample"):
        list(batches)


def test_an_iterable_dataset_is_read_in_order_by_a_worker():
    assert [int(number) for number in WorkerIterator(NumberStream(5), seed=0)] == list(range(5))


def test_seeds_of_requests_differ_by_seed_epoch_and_position():
    triples = [(seed, epoch, position) for seed in range(3) for epoch in range(3) for position in range(50)]
    seeds = {request_seed(*triple) for triple in triples}
    assert len(seeds) == len(triples)
    assert all(0 <= seed < 2**63 for seed in seeds)


class Collecting(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        gc.collect()
        return index


class Holder:
    """Refers to itself and to a process group, so that only the garbage collector ends them."""

    def __init__(self):
        self.itself, self.group = self, dist.new_group([0])
        dist.all_reduce(torch.ones(1), group=self.group)


def read_after_a_group_has_ended():
    gc.disable()
    dist.destroy_process_group(Holder().group)
    reader = make_reader(Collecting(), default_collate)
    pool = WorkerPool(reader, num_workers=1, pin_memory=False, persistent=False)
    return [batch.tolist() for batch in pool.read([Request(torch.tensor([0, 1]), 0)])]


def test_a_worker_does_not_collect_process_groups_of_its_rank():
    assert run_ranks(read_after_a_group_has_ended, 1) == [[[0, 1]]]


@pytest.mark.parametrize(
    "opened",
    [
        lambda: WorkerIterator(NumberStream(1000), seed=0),
        lambda: WorkerPool(lambda indices, epoch: indices, num_workers=1, pin_memory=False, persistent=False).read(
            Request(torch.arange(2), 0) for _ in range(1000)
        ),
    ],
    ids=["iterable", "map-style"],
)
def test_the_worker_of_an_iterator_that_is_dropped_in_a_cycle_ends_at_once(opened, monkeypatch):
    gc.collect()  # which ends workers of other tests
    join, exit_codes = multiprocessing.process.BaseProcess.join, []

    def joined(process, timeout=None):
        join(process, timeout)
        exit_codes.append(process.exitcode)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "join", joined)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 30)  # seconds of the time-out
    items = opened()
    next(items)
    items.cycle = items
    del items
    gc.collect()
    assert exit_codes == [0]  # it has not timed out


def test_workers_for_whose_pipes_there_are_no_open_files_are_refused_before_one_starts():
    pool = WorkerPool(lambda indices, epoch: indices, num_workers=2, pin_memory=False, persistent=False)
    with open(os.devnull) as file:
        few = file.fileno() + 8  # enough for one worker
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        with pytest.raises(UserError, match=r"2 data workers cannot be started: Too many open files .*ulimit -n"):
            pool.read([Request(torch.arange(2), 0)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert multiprocessing.active_children() == []
