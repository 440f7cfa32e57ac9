"""The step batches that one rank reads."""

import random
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.tasks import FakeRank, NumberStream
from trainkit import Data, UserError
from trainkit.data.loader import open_loader
from trainkit.data.order import GlobalOrder


def loader_of(data, *, rank=0, world_size=1, stage="train", seed=0, limit=None, repeat_first=False, **settings):
    strategy = FakeRank(rank, world_size, **settings)
    return open_loader(data.stage_data(stage), strategy, seed=seed, limit=limit, repeat_first=repeat_first)


def numbers(micro_batch):
    """Return the samples of a micro-batch, which are numbers."""
    batch = micro_batch.batch
    return [int(number) for number in (batch[0] if isinstance(batch, list) else batch)]


def read(loader, epoch=0, position=0):
    """Return the numbers in each micro-batch of each step batch."""
    return [
        [numbers(micro_batch) for micro_batch in step_batch.micro_batches]
        for step_batch in loader.step_batches(epoch, position)
    ]


def flat(step_batches):
    return [number for step_batch in step_batches for micro_batch in step_batch for number in micro_batch]


def number_data(num_samples, batch_size, **settings):
    return Data(train=TensorDataset(torch.arange(num_samples)), batch_size=batch_size, **settings)


splits = st.sampled_from(["whole", "accumulate", "micro_batch_size"])


# ---- Map-style data


def test_step_batches_are_split_into_micro_batches():
    loader = loader_of(number_data(11, 4, shuffle=False), accumulate=2)
    assert read(loader) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10]]]


@given(
    num_samples=st.integers(1, 50),
    batch_size=st.integers(1, 16),
    world_size=st.integers(1, 4),
    split=splits,
    size=st.integers(1, 8),
    epoch=st.integers(0, 2),
    drop_last=st.booleans(),
)
def test_every_sample_comes_once_an_epoch_in_the_global_order(
    *, num_samples, batch_size, world_size, split, size, epoch, drop_last
):
    batch_size = min(batch_size, num_samples)
    how = {} if split == "whole" else {split: size}
    if split == "accumulate" and (batch_size % size or -(-batch_size // world_size) < size):
        return
    data = number_data(num_samples, batch_size, drop_last=drop_last)
    order = GlobalOrder(num_samples, seed=3).slice(epoch, 0, num_samples).tolist()
    if drop_last:
        order = order[: num_samples - num_samples % batch_size]
    ranks = [
        list(loader_of(data, rank=r, world_size=world_size, seed=3, **how).step_batches(epoch, 0))
        for r in range(world_size)
    ]
    assert len({len(step_batches) for step_batches in ranks}) == 1
    position = 0
    for step_batches in zip(*ranks, strict=True):
        shares = [flat([[numbers(m) for m in step_batch.micro_batches]]) for step_batch in step_batches]
        count = sum(map(len, shares))
        assert [shares[k % world_size][k // world_size] for k in range(count)] == order[position : position + count]
        position += count
        for step_batch in step_batches:
            assert (step_batch.num_samples, step_batch.num_items) == (count, count)
            assert step_batch.ends_epoch == (position == len(order))
            sizes = [micro_batch.num_samples for micro_batch in step_batch.micro_batches]
            assert sizes == [len(numbers(micro_batch)) for micro_batch in step_batch.micro_batches]
            assert all(0 < n <= (size if split == "micro_batch_size" else batch_size) for n in sizes)
            if split == "accumulate":
                assert len(sizes) <= size
    assert position == len(order)


@given(
    num_samples=st.integers(1, 50),
    batch_size=st.integers(1, 16),
    steps_before=st.integers(0, 10),
    epoch=st.integers(0, 2),
)
def test_reading_from_a_position_gives_the_rest_of_the_epoch(num_samples, batch_size, steps_before, epoch):
    batch_size = min(batch_size, num_samples)
    data = number_data(num_samples, batch_size)
    whole = read(loader_of(data), epoch)
    assert read(loader_of(data), epoch, steps_before * batch_size) == whole[steps_before:]


@given(limit=st.integers(1, 6), drop_last=st.booleans())
def test_a_limit_ends_the_epoch_after_so_many_global_batches(limit, drop_last):
    loader = loader_of(number_data(11, 4, shuffle=False, drop_last=drop_last), limit=limit)
    whole = [[0, 1, 2, 3], [4, 5, 6, 7]] + ([] if drop_last else [[8, 9, 10]])
    assert [flat([step_batch]) for step_batch in read(loader)] == whole[:limit]
    assert loader.num_steps == len(whole[:limit])
    assert loader.epoch_length == sum(map(len, whole[:limit]))
    assert [step_batch.ends_epoch for step_batch in loader.step_batches(0, 0)][-1]


def test_repeat_first_repeats_the_first_epoch():
    data = number_data(20, 4)
    loader = loader_of(data, limit=2, repeat_first=True)
    assert read(loader, 0) == read(loader, 1) == read(loader, 5) == read(loader_of(data), 0)[:2]
    assert read(loader_of(data, limit=2), 1) != read(loader, 1)


def test_another_seed_or_epoch_gives_another_order():
    data = number_data(50, 10)
    orders = [flat(read(loader_of(data, seed=seed), epoch)) for seed in (0, 1000) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 1}])
def test_worker_processes_give_the_same_step_batches(world_size, settings):
    for rank in range(world_size):
        # The last global batch has two samples, so with three or more ranks some have an empty step batch.
        shared = {"rank": rank, "world_size": world_size, **settings}
        expected = loader_of(number_data(14, 6), **shared)
        loader = loader_of(number_data(14, 6, num_workers=1), **shared)
        assert read(loader, 1, 6) == read(expected, 1, 6)


def test_with_workers_only_the_next_requests_of_an_epoch_are_made():
    loader = loader_of(number_data(100_000, 1, num_workers=1, shuffle=False))
    shares = []
    share = loader._sampler.shard
    loader._sampler.shard = lambda *args: shares.append(args) or share(*args)
    step_batches = loader.step_batches(0, 0)
    assert [numbers(step_batch.micro_batches[0]) for step_batch in islice(step_batches, 3)] == [[0], [1], [2]]
    assert len(shares) < 20
    step_batches.close()


# ---- Ready-made batches


def ready_data(*sizes):
    return Data(train=list(torch.arange(sum(sizes)).split(sizes)), shuffle=False)


def test_pre_batched_data_is_split_by_rows():
    data = ready_data(6, 5)
    assert read(loader_of(data, world_size=2, rank=0, accumulate=2)) == [[[0, 2], [4]], [[6, 8], [10]]]
    assert read(loader_of(data, world_size=2, rank=1, accumulate=2)) == [[[1, 3], [5]], [[7, 9]]]


def test_an_undivided_pre_batched_item_is_passed_on_unchanged():
    batch = {"x": torch.arange(4), "name": "four"}
    (step_batch,) = loader_of(Data(train=[batch])).step_batches(0, 0)
    assert step_batch.micro_batches[0].batch is batch
    assert (step_batch.num_samples, step_batch.num_items, step_batch.ends_epoch) == (4, 1, True)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    world_size=st.integers(1, 4),
    split=splits,
    size=st.integers(1, 5),
    epoch=st.integers(0, 2),
)
def test_every_row_comes_once_an_epoch(sizes, world_size, split, size, epoch):
    how = {} if split == "whole" else {split: size}
    data = Data(train=list(torch.arange(sum(sizes)).split(sizes)))
    order = GlobalOrder(len(sizes), seed=0).slice(epoch, 0, len(sizes)).tolist()
    ranks = [
        list(loader_of(data, rank=r, world_size=world_size, **how).step_batches(epoch, 0)) for r in range(world_size)
    ]
    for index, step_batches in zip(order, zip(*ranks, strict=True), strict=True):
        shares = [flat([[numbers(m) for m in step_batch.micro_batches]]) for step_batch in step_batches]
        rows = torch.arange(sum(sizes)).split(sizes)[index].tolist()
        assert [shares[k % world_size][k // world_size] for k in range(len(rows))] == rows
        for step_batch in step_batches:
            assert (step_batch.num_samples, step_batch.num_items) == (len(rows), 1)
            assert [m.num_samples for m in step_batch.micro_batches] == [
                len(numbers(m)) for m in step_batch.micro_batches
            ]
    assert [step_batch.ends_epoch for step_batch in ranks[0]] == [False] * (len(sizes) - 1) + [True]


def test_tensors_that_are_not_rows_of_the_batch_are_kept_whole():
    batch = {"x": torch.arange(8).reshape(4, 2), "scale": torch.tensor(3.0), "table": torch.arange(7), "text": ["a"]}
    (step_batch,) = loader_of(Data(train=[batch]), world_size=2, rank=1).step_batches(0, 0)
    mine = step_batch.micro_batches[0].batch
    assert mine["x"].tolist() == [[2, 3], [6, 7]]
    assert mine["scale"] == 3.0
    assert mine["table"].tolist() == list(range(7))
    assert mine["text"] == ["a"]


def test_a_pre_batched_item_without_rows_is_refused():
    with pytest.raises(UserError, match=r"unknown number of samples in .* type str: .*batch_size instead"):
        next(loader_of(Data(train=["text"])).step_batches(0, 0))


# ---- Streams


def iterable_data(num_samples, batch_size, **settings):
    return Data(train=NumberStream(num_samples), batch_size=batch_size, **settings)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_is_read_in_its_own_order(workers):
    loader = loader_of(iterable_data(11, 4, num_workers=workers), accumulate=2)
    assert read(loader) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10]]]


@given(
    num_samples=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    limit=st.none() | st.integers(1, 5),
    steps_before=st.integers(0, 3),
)
@settings(max_examples=100)
def test_each_rank_keeps_every_wth_sample_of_each_global_batch_of_an_iterable_dataset(
    num_samples, batch_size, world_size, limit, steps_before
):
    most = num_samples if limit is None else min(num_samples, limit * batch_size)
    position = steps_before * batch_size
    if position >= most:
        return
    batches = [list(range(s, min(s + batch_size, most))) for s in range(position, most, batch_size)]
    for rank in range(world_size):
        loader = loader_of(iterable_data(num_samples, batch_size), rank=rank, world_size=world_size, limit=limit)
        step_batches = list(loader.step_batches(0, position))
        assert [flat([[numbers(m) for m in w.micro_batches]]) for w in step_batches] == [
            b[rank::world_size] for b in batches
        ]
        assert [step_batch.num_samples for step_batch in step_batches] == [len(batch) for batch in batches]
        assert [step_batch.ends_epoch for step_batch in step_batches] == [False] * (len(batches) - 1) + [True]


def test_the_end_of_an_epoch_is_known_before_its_last_step():
    data = iterable_data(8, 4)
    step_batches = loader_of(data).step_batches(0, 0)
    assert not next(step_batches).ends_epoch
    assert next(step_batches).ends_epoch


def test_a_limit_reads_no_sample_beyond_it():
    data = iterable_data(100, 4)
    assert len(list(loader_of(data, limit=3).step_batches(0, 0))) == 3
    assert data.dataset("train").read == 12


def test_drop_last_drops_the_short_last_batch_of_an_iterable_dataset():
    step_batches = list(loader_of(iterable_data(10, 4, drop_last=True)).step_batches(0, 0))
    assert [step_batch.num_samples for step_batch in step_batches] == [4, 4]
    assert [step_batch.ends_epoch for step_batch in step_batches] == [False, True]


def test_an_empty_iterable_dataset_is_refused_by_name():
    with pytest.raises(UserError, match="train IterableDataset gave no sample"):
        next(loader_of(iterable_data(0, 4)).step_batches(0, 0))


class BatchStream(IterableDataset):
    """Ready-made batches of consecutive numbers."""

    def __init__(self, sizes):
        self.batches = torch.arange(sum(sizes)).split(sizes)

    def __iter__(self):
        return iter(self.batches)


def batch_stream(*sizes, num_workers=0, stage="train"):
    return Data(**{stage: DataLoader(BatchStream(sizes), batch_size=None, num_workers=num_workers)})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_an_iterable_dataset_are_split_by_rows(num_workers):
    data = batch_stream(6, 5, num_workers=num_workers)
    assert read(loader_of(data, world_size=2, rank=0, accumulate=2)) == [[[0, 2], [4]], [[6, 8], [10]]]
    assert read(loader_of(data, world_size=2, rank=1, accumulate=2)) == [[[1, 3], [5]], [[7, 9]]]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    world_size=st.integers(1, 4),
    limit=st.none() | st.integers(1, 4),
    position=st.integers(0, 3),
)
def test_each_row_of_the_batches_of_an_iterable_dataset_comes_once(sizes, world_size, limit, position):
    whole = [batch.tolist() for batch in BatchStream(sizes)][:limit]
    settings = [{"rank": rank, "world_size": world_size, "limit": limit} for rank in range(world_size)]
    if position < len(whole):
        for rank, how in enumerate(settings):
            step_batches = list(loader_of(batch_stream(*sizes), **how).step_batches(0, position))
            seen = [flat([[numbers(m) for m in step_batch.micro_batches]]) for step_batch in step_batches]
            assert seen == [batch[rank::world_size] for batch in whole[position:]]
            counts = [(len(batch), 1, index == len(whole) - 1) for index, batch in enumerate(whole)][position:]
            assert [(one.num_samples, one.num_items, one.ends_epoch) for one in step_batches] == counts
    rows = [row for batch in whole for row in batch]
    for rank, how in enumerate(settings):
        loader = loader_of(batch_stream(*sizes, stage="validation"), stage="validation", **how)
        assert flat([[numbers(m) for m in loader.batches()]]) == rows[rank::world_size]


def test_an_iterable_dataset_without_batches_is_refused():
    for stage in ("train", "validation"):
        loader = loader_of(batch_stream(0, stage=stage), stage=stage)
        loader.stage_data.dataset.batches = ()
        with pytest.raises(UserError, match=f"the {stage} IterableDataset gave no sample"):
            list(loader.step_batches(0, 0) if stage == "train" else loader.batches())


class Sized(IterableDataset):
    def __init__(self, num_samples, length):
        self.num_samples, self.length = num_samples, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.num_samples))


@pytest.mark.parametrize(
    ("num_samples", "length", "said"),
    [(9, 2, "has more than 2 samples"), (9, 8, "has more than 8"), (9, 9, ""), (9, 10, ""), (9, 11, "has only 9")],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_with_a_wrong_length_is_named_once(num_workers, num_samples, length, said, caplog):
    loader = loader_of(Data(train=Sized(num_samples, length), batch_size=2, num_workers=num_workers))
    for epoch in range(2):
        assert len(list(loader.step_batches(epoch, 0))) == 5
    told = [record.getMessage() for record in caplog.records if "__len__" in record.getMessage()]
    assert len(told) == bool(said) and all(said in message for message in told)


class Positioned(IterableDataset):
    """Keeps its own position and counts what is read of it."""

    def __init__(self, num_samples):
        self.num_samples, self.position, self.read, self.epochs = num_samples, 0, 0, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)
        self.position = 0

    def __iter__(self):
        while self.position < self.num_samples:
            self.position += 1
            self.read += 1
            yield torch.tensor(self.position - 1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, saved):
        self.position = saved["position"]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_saved_position_of_a_dataset_is_restored(epoch, steps):
    loader = loader_of(Data(train=Positioned(24), batch_size=4))
    for earlier in range(epoch):
        read(loader, earlier)
    step_batches = loader.step_batches(epoch, 0)
    for _ in range(steps):
        next(step_batches)
    saved = loader.state_dict(4 * steps)

    dataset = Positioned(24)
    again = loader_of(Data(train=dataset, batch_size=4))
    again.load_state_dict(saved)
    assert flat(read(again, epoch, 4 * steps)) == list(range(4 * steps, 24))
    assert dataset.read == 24 - 4 * steps


def test_a_saved_position_is_used_only_in_its_epoch():
    loader = loader_of(Data(train=Positioned(12), batch_size=4))
    step_batches = loader.step_batches(0, 0)
    next(step_batches)
    saved = loader.state_dict(4)
    again = loader_of(Data(train=Positioned(12), batch_size=4))
    again.load_state_dict(saved)
    assert flat(read(again, 0, 4)) == list(range(4, 12))
    assert flat(read(again, 1)) == list(range(12))


class Shuffled(Positioned):
    """Draws from a separate generator, whose state continues from one epoch to the next."""

    def __init__(self, num_samples):
        super().__init__(num_samples)
        self.generator = torch.Generator().manual_seed(0)
        self.order = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        if self.position in (0, self.num_samples):
            self.position = 0
            self.order = torch.randperm(self.num_samples, generator=self.generator).tolist()
        while self.position < self.num_samples:
            self.position += 1
            yield torch.tensor(self.order[self.position - 1])

    def state_dict(self):
        return {"position": self.position, "order": list(self.order), "generator": self.generator.get_state()}

    def load_state_dict(self, saved):
        self.position, self.order = saved["position"], saved["order"]
        self.generator.set_state(saved["generator"])


@pytest.mark.parametrize("position", [0, 4])
def test_an_iterable_dataset_continues_from_the_end_of_an_epoch_as_from_its_middle(position):
    def loader(**settings):
        return loader_of(Data(train=Shuffled(24), batch_size=4, **settings))

    first = loader()
    whole = [flat(read(first, epoch)) for epoch in range(3)]
    assert whole[0] != whole[1] != whole[2]

    stopped, again, in_worker = loader(), loader(), loader(num_workers=1)
    step_batches = stopped.step_batches(0, 0)
    for _ in range(6 if position == 0 else 1):
        next(step_batches)
    if position == 0:
        next(stopped.step_batches(1, 0))  # the next epoch is read ahead
    again.load_state_dict(stopped.state_dict(position))
    if position:
        assert flat(read(again, 0, position)) == whole[0][position:]
    assert [flat(read(again, epoch)) for epoch in (1, 2)] == whole[1:]
    if position == 0:
        in_worker.load_state_dict(stopped.state_dict(0))
        assert flat(read(in_worker, 1)) == whole[0], "in a worker every epoch begins at the same state"
        assert in_worker.state_dict(0) == {}


class Rewinding(Positioned):
    """Goes back to its first sample when it is iterated again, but not when a state was loaded."""

    is_loaded = False

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        self.position = self.position if self.is_loaded else 0
        self.is_loaded = False
        return super().__iter__()

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.is_loaded = True


class Continuing(Positioned):
    """Goes on where it is when it is iterated again."""

    def set_epoch(self, epoch):
        pass


@pytest.mark.parametrize("kind", [Continuing, Rewinding, Shuffled, Positioned])
@pytest.mark.parametrize("limit", [2, 3])
def test_a_resume_after_an_epoch_that_the_limit_ended_reads_what_an_uninterrupted_run_does(kind, limit):
    def loader():
        return loader_of(Data(train=kind(40), batch_size=4), limit=limit)

    uninterrupted = loader()
    whole = [flat(read(uninterrupted, epoch)) for epoch in range(3)]
    first = loader()
    read(first, 0)
    for epoch in (1, 2):
        resumed = loader()
        resumed.load_state_dict(first.state_dict(0))
        assert flat(read(resumed, epoch)) == whole[epoch]
        first = resumed
    for epoch in (0, 1):
        stopped, resumed = loader(), loader()
        for earlier in range(epoch):
            read(stopped, earlier)
        next(stopped.step_batches(epoch, 0))
        resumed.load_state_dict(stopped.state_dict(4))
        assert flat(read(resumed, epoch, 4)) == whole[epoch][4:]
        again = loader()
        again.load_state_dict(resumed.state_dict(0))
        assert flat(read(resumed, epoch + 1)) == flat(read(again, epoch + 1)) == whole[epoch + 1]


def test_a_resume_after_an_epoch_of_one_step_warns_that_the_dataset_begins_again(caplog):
    def loader():
        return loader_of(Data(train=Continuing(24), batch_size=4), limit=1)

    stopped, resumed = loader(), loader()
    assert flat(read(stopped, 0) + read(stopped, 1)) == list(range(8)) and not caplog.messages
    resumed.load_state_dict(stopped.state_dict(0))
    assert flat(read(resumed, 2)) == list(range(4))
    assert len(caplog.messages) == 1 and "Set trainer.limit_train_batches to 2 or more" in caplog.text


@pytest.mark.parametrize("kind", [Positioned, Rewinding])
def test_a_dataset_saved_at_its_end_starts_again(kind):
    loader = loader_of(Data(train=kind(8), batch_size=4))
    read(loader, 0)
    saved = loader.state_dict(0)
    assert saved["dataset"] == {"position": 8}
    again = loader_of(Data(train=kind(8), batch_size=4))
    again.load_state_dict(saved)
    assert flat(read(again, 1)) == list(range(8))


class Drawing(IterableDataset):
    def __iter__(self):
        return iter([torch.stack([torch.rand(()), torch.tensor(random.random())]) for _ in range(4)])


def test_random_numbers_of_a_worker_depend_on_the_seed_and_the_epoch_only():
    def drawn(epoch, position=0, seed=0):
        loader = open_loader(
            Data(train=Drawing(), batch_size=2, num_workers=1).stage_data("train"), FakeRank(), seed=seed
        )
        return torch.cat(
            [micro.batch for step_batch in loader.step_batches(epoch, position) for micro in step_batch.micro_batches]
        )

    first = drawn(0)
    assert torch.equal(drawn(0), first) and torch.equal(drawn(0, position=2), first[2:])
    assert not torch.equal(drawn(1), first) and not torch.equal(drawn(0, seed=1), first)


class StatefulDrawing(Shuffled):
    """Draws from the global generators too."""

    def __iter__(self):
        return (torch.stack([sample, torch.rand(()), torch.tensor(random.random())]) for sample in super().__iter__())


def test_an_iterable_dataset_continues_in_its_worker_at_the_saved_position(caplog):
    def loader():
        return loader_of(Data(train=StatefulDrawing(10), batch_size=4, num_workers=1))

    whole = [torch.cat([micro.batch for micro in micro_batches_of(loader(), epoch, 0)]) for epoch in range(2)]
    stopped, again = loader(), loader()
    step_batches = stopped.step_batches(0, 0)
    next(step_batches)
    saved = stopped.state_dict(4)
    assert saved["dataset"]["position"] == 4
    again.load_state_dict(saved)
    assert torch.equal(torch.cat([micro.batch for micro in micro_batches_of(again, 0, 4)]), whole[0][4:])
    assert torch.equal(torch.cat([micro.batch for micro in micro_batches_of(again, 1, 0)]), whole[1])
    assert again.stage_data.dataset.position == 0  # what the worker has read, this process has not
    assert not caplog.text
    list(loader().step_batches(0, 4))
    assert "has no saved position (state_dict) at this step: its first 4 samples are read" in caplog.text


def micro_batches_of(loader, epoch, position):
    return [micro for step_batch in loader.step_batches(epoch, position) for micro in step_batch.micro_batches]


def test_an_iterable_dataset_without_a_saved_position_is_read_again_and_skipped(caplog):
    data = iterable_data(12, 4)
    assert flat(read(loader_of(data), 0, 8)) == [8, 9, 10, 11]
    assert data.dataset("train").read == 12
    assert "has no state_dict and load_state_dict" in caplog.text


def test_set_epoch_gets_the_epoch_and_always_0_when_overfitting():
    dataset = Positioned(8)
    data = Data(train=dataset, batch_size=4)
    for epoch in range(2):
        read(loader_of(data), epoch)
        read(loader_of(data, repeat_first=True, limit=1), epoch)
    assert dataset.epochs == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("num_samples", "limit", "length", "steps"), [(10, None, 10, 3), (10, 2, 8, 2), (10, 9, 10, 3)]
)
def test_the_length_of_an_iterable_dataset_is_that_of_an_epoch(num_samples, limit, length, steps):
    class Sized(NumberStream):
        def __len__(self):
            return self.num_samples

    loader = loader_of(Data(train=Sized(num_samples), batch_size=4), limit=limit)
    assert (loader.epoch_length, loader.num_steps) == (length, steps)


def test_an_iterable_dataset_without_a_length_has_its_limit_or_no_known_length():
    assert loader_of(iterable_data(10, 4)).num_steps is None
    assert loader_of(iterable_data(10, 4), limit=2).num_steps == 2
