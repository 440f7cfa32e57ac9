"""Iterable datasets with shards: the order of samples, and who reads them."""

import os
import random
import threading
from collections import Counter
from contextlib import contextmanager
from itertools import chain, zip_longest

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.data.test_loader import loader_of, numbers
from tests.tasks import FakeRank
from trainkit import Data, UserError
from trainkit.data import dataset_shards
from trainkit.data.dataset_shards import Place, ShardStart, next_shards, num_readers
from trainkit.data.loader import ShardedBatchLoader, check_same_data, open_loader
from trainkit.distributed.collectives import Collectives


class Part(IterableDataset):
    """One shard: the numbers 1000 * shard, 1000 * shard + 1, ..."""

    def __init__(self, index, length, reads):
        self.index, self.length, self.position, self.reads = index, length, 0, reads

    def __iter__(self):
        while self.position < self.length:
            self.position += 1
            self.reads[self.index] += 1
            yield torch.tensor(1000 * self.index + self.position - 1)


class SeekingPart(Part):
    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, saved):
        self.position = saved["position"]


class SizedPart(Part):
    def __len__(self):
        return self.length


class SizedSeekingPart(SizedPart, SeekingPart):
    pass


class Parts(IterableDataset):
    """A dataset with shards, which counts the samples that are read of each."""

    def __init__(self, lengths, *, kind=Part):
        self.lengths, self.kind, self.reads = lengths, kind, Counter()
        if issubclass(kind, SeekingPart):
            self.state_dict = self.load_state_dict = lambda *saved: pytest.fail("of the whole dataset")

    num_shards = property(lambda self: len(self.lengths))

    def shard(self, num_shards, index):
        assert num_shards == len(self.lengths)
        return self.kind(index, self.lengths[index], self.reads)

    def __iter__(self):
        for index in range(len(self.lengths)):
            yield from self.shard(len(self.lengths), index)


def joined(lists):
    return list(chain.from_iterable(lists))


def in_turn(lengths):
    """Return the order of an epoch."""
    rounds = zip_longest(*(range(1000 * shard, 1000 * shard + length) for shard, length in enumerate(lengths)))
    return [number for round_ in rounds for number in round_ if number is not None]


class ThreadRanks:
    """Ranks in threads, whose objects are gathered as those of processes.

    One runs at a time, until it waits for the others: two that read the state of torch's generator can wait for each
    other, one with the generator's lock and one with the interpreter's.
    """

    def __init__(self, world_size):
        self.world_size = world_size
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(world_size, timeout=600)
        self.values = [None] * world_size
        self.gathers = 0

    def run(self, function):
        """Return what `function` returns for the strategy of each rank."""
        results, errors = [None] * self.world_size, []

        def target(rank):
            try:
                with self.turn:
                    results[rank] = function(self._strategy(rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error
        return results

    def wait_for_others(self):
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def _strategy(self, rank):
        ranks, strategy = self, FakeRank(rank, self.world_size)

        class Gathering(Collectives):
            def all_gather_object(self, value):
                ranks.values[self.rank] = value
                ranks.wait_for_others()
                gathered = list(ranks.values)
                ranks.gathers += self.rank == 0
                ranks.wait_for_others()
                return gathered

        strategy.comm = Gathering(rank=rank, world_size=self.world_size)
        return strategy


def opened(dataset, strategy, *, batch_size, num_workers=0, stage="train", limit=None, drop_last=False):
    data = Data(**{stage: dataset}, batch_size=batch_size, num_workers=num_workers, drop_last=drop_last)
    return open_loader(data.stage_data(stage), strategy, seed=0, limit=limit)


@contextmanager
def workers_in_this_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_shards, "WorkerIterator", lambda chunks, **settings: iter(chunks))
        yield


def as_read(step_batch):
    """Return a rank's numbers of a step batch, and how many there are on all ranks."""
    mine = [number for micro_batch in step_batch.micro_batches for number in numbers(micro_batch)]
    return mine, step_batch.num_samples, step_batch.ends_epoch


def read_on(world_size, lengths, *, kind, batch_size, num_workers=0, position=0, saved=None, stop=None, **how):
    """Return the step batches of each rank from a position on, the state after `stop` of them, and what was read."""

    def read(strategy):
        dataset = Parts(lengths, kind=kind)
        loader = opened(dataset, strategy, batch_size=batch_size, num_workers=num_workers, **how)
        if saved is not None:
            loader.load_state_dict(saved)
        step_batches, seen = loader.step_batches(0, position), []
        for step_batch in step_batches:
            seen.append(as_read(step_batch))
            if len(seen) == stop:
                break
        return seen, loader.state_dict(position + sum(count for _, count, _ in seen)), dataset.reads

    with workers_in_this_process():
        return ThreadRanks(world_size).run(read)


shapes = {
    "lengths": st.lists(st.integers(0, 7), min_size=2, max_size=6).filter(any),
    "kind": st.sampled_from([Part, SeekingPart, SizedPart, SizedSeekingPart]),
    "batch_size": st.integers(1, 9),
    "world_size": st.integers(1, 4),
    "num_workers": st.integers(0, 3),
}


# ---- The order


@given(lengths=shapes["lengths"], count=st.integers(1, 9), known=st.booleans())
def test_shards_give_one_sample_each_in_turn_until_they_end(lengths, count, known):
    place, order = Place(0, 0), []
    while True:
        shards_of_batch, place = next_shards(place, count, lengths)
        order += shards_of_batch
        for shard in range(len(lengths)):
            assert place.taken(shard, lengths) == order.count(shard)
        if len(shards_of_batch) < count:
            break
    assert order == [number // 1000 for number in in_turn(lengths)]
    assert next_shards(place, count, lengths)[0] == []


def test_the_order_is_that_of_the_drawing():
    assert next_shards(Place(0, 0), 20, [4, 2, 5])[0] == [0, 1, 2, 0, 1, 2, 0, 2, 0, 2, 2]


@pytest.mark.parametrize(
    ("num_shards", "world_size", "batch_size", "readers"), [(8, 4, 16, 4), (8, 4, 6, 2), (6, 4, 8, 2), (7, 4, 8, 1)]
)
def test_ranks_divide_the_shards_as_far_as_shards_and_batch_allow(num_shards, world_size, batch_size, readers):
    assert num_readers(num_shards, world_size, batch_size) == readers


# ---- Training


@given(**shapes, limit=st.none() | st.integers(1, 4), drop_last=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_global_batches_are_the_same_for_every_number_of_ranks_and_workers(
    *, lengths, kind, batch_size, world_size, num_workers, limit, drop_last
):
    order = in_turn(lengths)
    expected = [order[start : start + batch_size] for start in range(0, len(order), batch_size)][:limit]
    if drop_last and len(expected[-1]) < batch_size:
        expected.pop()
    ranks = read_on(
        world_size,
        lengths,
        kind=kind,
        batch_size=batch_size,
        num_workers=num_workers,
        limit=limit,
        drop_last=drop_last,
    )
    batches = [seen for seen, _, _ in ranks]
    assert len({len(seen) for seen in batches}) == 1
    assert [sorted(joined(mine for mine, _, _ in of_ranks)) for of_ranks in zip(*batches, strict=True)] == [
        sorted(batch) for batch in expected
    ]
    for seen in batches:
        assert [count for _, count, _ in seen] == [len(batch) for batch in expected]
        assert [ends for _, _, ends in seen] == [index == len(expected) - 1 for index in range(len(expected))]


@given(rounds=st.integers(1, 5), per_rank=st.integers(1, 3), kind=shapes["kind"], world_size=shapes["world_size"])
@settings(deadline=None)
def test_each_sample_is_read_once_over_all_ranks_and_rank_r_takes_every_wth(rounds, per_rank, kind, world_size):
    lengths = [rounds] * max(world_size * per_rank, 2)
    lengths = lengths if len(lengths) % world_size == 0 else lengths * world_size
    ranks = read_on(world_size, lengths, kind=kind, batch_size=2 * world_size)
    assert sum((reads for _, _, reads in ranks), Counter()) == Counter(dict(enumerate(lengths)))
    order = in_turn(lengths)
    for rank, (seen, _, _) in enumerate(ranks):
        assert joined(mine for mine, _, _ in seen) == order[rank::world_size]


@example(
    lengths=[7] * 4,
    kind=SeekingPart,
    batch_size=6,
    world_size=2,
    num_workers=0,
    stop=2,  # after 3 samples of each shard: in the middle of a chunk of 2
    then=2,
    workers_then=1,
)
@given(**shapes, stop=st.integers(1, 6), then=st.integers(1, 4), workers_then=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_resume_on_other_ranks_and_workers_reads_what_is_left(
    *, lengths, kind, batch_size, world_size, num_workers, stop, then, workers_then
):
    how = {"kind": kind, "batch_size": batch_size}
    before = read_on(world_size, lengths, num_workers=num_workers, stop=stop, **how)
    assert len({str(saved) for _, saved, _ in before}) == 1
    saved, position = before[0][1], sum(count for _, count, _ in before[0][0])
    assert saved["position"] == position
    order = in_turn(lengths)
    if position == len(order):
        return
    after = read_on(then, lengths, num_workers=workers_then, position=position, saved=saved, **how)
    left = [order[start : start + batch_size] for start in range(position, len(order), batch_size)]
    for index, batch in enumerate(left):
        assert sorted(joined(seen[index][0] for seen, _, _ in after)) == sorted(batch)
    if issubclass(kind, SeekingPart) and num_readers(len(lengths), then, batch_size) == then:
        chunk = -(-batch_size // len(lengths))
        taken = Counter(number // 1000 for number in order[:position])
        for shard, count in sum((reads for _, _, reads in after), Counter()).items():
            assert count <= lengths[shard] - taken[shard] + chunk


def test_a_resume_on_other_ranks_does_not_say_that_it_reads_other_items(caplog):
    how = {"kind": SeekingPart, "batch_size": 4}
    saved = read_on(2, [1, 3, 3, 3], stop=1, **how)[0][1]
    ((seen, _, _),) = read_on(1, [1, 3, 3, 3], position=4, saved=saved, **how)
    assert seen[0][0] == [1001, 2001, 3001, 1002]  # of two ranks the first would have begun with 2001
    assert "reads other data" not in caplog.text


def test_a_dataset_that_cannot_seek_is_read_again_and_says_so(caplog):
    how = {"batch_size": 4}
    ((_, saved, _),) = read_on(1, [6, 6], kind=Part, stop=1, **how)
    assert "a resumed run reads its first samples again and skips them" in caplog.text
    caplog.clear()
    ((seen, _, reads),) = read_on(1, [6, 6], kind=Part, position=4, saved=saved, **how)
    assert seen[0][0] == [2, 1002, 3, 1003]
    assert reads == Counter({0: 6, 1: 6})
    (record,) = caplog.records
    assert "first 4 samples are read again and skipped" in record.getMessage()


@pytest.mark.parametrize("kind", [Part, SizedPart, SeekingPart])
def test_a_position_without_a_saved_state_is_read_up_to(kind, caplog):
    ranks = read_on(2, [6, 2, 5, 4], kind=kind, batch_size=4, position=8)
    order = in_turn([6, 2, 5, 4])
    assert sorted(joined(seen[0][0] for seen, _, _ in ranks)) == sorted(order[8:12])
    assert "has no saved position (state_dict) at this step: its first 8 samples are read again" in caplog.text


def test_a_state_of_another_number_of_shards_is_not_used(caplog):
    ((_, saved, _),) = read_on(1, [6, 6], kind=SeekingPart, batch_size=4, stop=1)
    ((seen, _, _),) = read_on(1, [4, 4, 4], kind=SeekingPart, batch_size=4, position=4, saved=saved)
    assert seen[0][0] == in_turn([4, 4, 4])[4:8]
    assert "has no saved position" in caplog.text


def test_ranks_with_other_numbers_of_shards_are_refused():
    lengths = [[4, 4], [4, 4, 4]]
    with pytest.raises(UserError, match="the number of shards of the train data is 2 on rank 0, but 3 on rank 1"):
        ThreadRanks(2).run(
            lambda strategy: check_same_data(
                {"train": opened(Parts(lengths[strategy.comm.rank]), strategy, batch_size=2)}, strategy.comm
            )
        )


def test_ranks_exchange_nothing_if_lengths_are_known_or_each_rank_reads_all():
    def gathers(lengths, kind, batch_size):
        ranks = ThreadRanks(2)
        ranks.run(
            lambda strategy: list(opened(Parts(lengths, kind=kind), strategy, batch_size=batch_size).step_batches(0, 0))
        )
        return ranks.gathers

    assert gathers([3, 5], SizedPart, 2) == 0
    assert gathers([3, 5, 4], Part, 2) == 0
    assert gathers([3, 5], Part, 3) == 0
    assert gathers([3, 5], Part, 2) > 0


def test_shards_that_several_ranks_read_are_reported_at_the_start(caplog):
    for rank in range(2):
        opened(Parts([4, 4]), FakeRank(rank, 2), batch_size=4)
    assert not caplog.text
    opened(Parts([4, 4, 4]), FakeRank(0, 2), batch_size=4)
    assert "has 3 shards: with 2 ranks and batch_size=4, each sample is read by 2 ranks" in caplog.text


@pytest.mark.parametrize(("given_length", "what"), [(3, "gave more"), (5, "gave only 4")])
def test_a_shard_with_a_wrong_length_is_refused(given_length, what):
    class Wrong(Part):
        def __len__(self):
            return given_length

    with pytest.raises(UserError, match=rf"shard 0 of the Parts has a length of {given_length}, but {what}"):
        read_on(1, [4, 4], kind=Wrong, batch_size=2)


def test_an_empty_dataset_with_shards_is_refused():
    with pytest.raises(UserError, match="the train IterableDataset gave no sample"):
        read_on(1, [0, 0], kind=Part, batch_size=2)
    with pytest.raises(UserError, match="the validation IterableDataset gave no sample"):
        list(opened(Parts([0, 0]), FakeRank(), batch_size=2, stage="validation").batches())


class Drawing(Parts):
    """Draws from the global generators, and shuffles by the epoch that each shard is told."""

    class Part(IterableDataset):
        def __init__(self, index):
            self.index, self.epoch = index, None

        def set_epoch(self, epoch):
            self.epoch, self.shift = epoch, random.random()

        def __iter__(self):
            for number in range(5):
                drawn = (self.shift, random.random(), torch.rand(()))
                yield torch.stack([torch.tensor(float(v)) for v in (self.epoch, self.index, number, *drawn)])

    def shard(self, num_shards, index):
        return self.Part(index)


def drawn(num_workers, *, epoch=0, seed=0):
    data = Data(train=Drawing([5] * 3), batch_size=6, num_workers=num_workers)
    loader = open_loader(data.stage_data("train"), FakeRank(), seed=seed)
    return torch.cat([m.batch for step_batch in loader.step_batches(epoch, 0) for m in step_batch.micro_batches])


def test_what_a_dataset_draws_is_the_same_for_every_number_of_workers():
    before = torch.get_rng_state(), random.getstate()
    here = drawn(0)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    for num_workers in (1, 2, 4):
        assert torch.equal(drawn(num_workers), here)
    for other in (drawn(0, epoch=1), drawn(0, seed=1)):
        assert torch.equal(other[:, 1:3], here[:, 1:3])
        assert not torch.isclose(other[:, 3:], here[:, 3:]).any()
    assert set(drawn(1, epoch=1)[:, 0].tolist()) == {1.0}


class Unsaved(Parts):
    """Fails in a worker if the state of numpy's generator is asked for."""

    def shard(self, num_shards, index):
        if get_worker_info() is not None:
            numpy.random.get_state = None
        return super().shard(num_shards, index)


def test_a_worker_does_not_save_generators_for_each_chunk():
    data = Data(train=Unsaved([4] * 2), batch_size=2, num_workers=1)
    loader = open_loader(data.stage_data("train"), FakeRank(), seed=0)
    seen = [number for step_batch in loader.step_batches(0, 0) for number in as_read(step_batch)[0]]
    assert seen == in_turn([4] * 2)


class Pids(Parts):
    class Part(IterableDataset):
        def __iter__(self):
            return iter([torch.tensor(os.getpid())] * 4)

    def shard(self, num_shards, index):
        return self.Part()


def test_each_worker_reads_its_own_shards():
    data = Data(train=Pids([4] * 4), batch_size=4, num_workers=2)
    loader = open_loader(data.stage_data("train"), FakeRank(), seed=0)
    for step_batch in loader.step_batches(0, 0):
        first, second, third, fourth = numbers(step_batch.micro_batches[0])
        assert first == third != second == fourth
        assert os.getpid() not in (first, second)


# ---- Evaluation


@given(**shapes, limit=st.none() | st.integers(1, 4), stage=st.sampled_from(["validation", "test", "predict"]))
@settings(max_examples=60, deadline=None)
def test_an_evaluation_has_each_sample_once_over_all_ranks(
    *, lengths, kind, batch_size, world_size, num_workers, limit, stage
):
    num_workers = min(num_workers, 0 if limit or stage == "predict" else num_workers)
    whole = [1000 * shard + number for shard, length in enumerate(lengths) for number in range(length)]
    ranks = []
    for rank in range(world_size):  # without collectives
        loader = opened(
            Parts(lengths, kind=kind),
            FakeRank(rank, world_size),
            batch_size=batch_size,
            num_workers=num_workers,
            stage=stage,
            limit=limit,
        )
        with workers_in_this_process():
            ranks.append([number for micro_batch in loader.batches() for number in numbers(micro_batch)])
    if limit or stage == "predict":
        whole = whole[: limit * batch_size] if limit else whole
        assert ranks == [whole[rank::world_size] for rank in range(world_size)]
    else:
        assert sorted(joined(ranks)) == whole


# ---- What is read by shards


def test_a_dataset_with_one_shard_is_read_whole():
    assert not isinstance(loader_of(Data(train=Parts([4]), batch_size=2)), ShardedBatchLoader)
    assert isinstance(loader_of(Data(train=Parts([2, 2]), batch_size=2)), ShardedBatchLoader)


@pytest.mark.parametrize("dataset", [Parts([4]), Part(0, 4, Counter())])
def test_several_workers_need_several_shards(dataset):
    with pytest.raises(UserError, match=r"num_workers=2: .*Set num_workers=1 or 0, or define num_shards and shard"):
        Data(train=dataset, batch_size=2, num_workers=2).stage_data("train")
    loader = DataLoader(Parts([4, 4]), batch_size=2, num_workers=2)
    assert Data(train=loader).stage_data("train").num_workers == 2


def test_a_start_without_a_state_reads_from_the_beginning():
    assert ShardStart() == (0, 0, None)


# ---- Hugging Face datasets


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_hugging_face_dataset_is_the_same_on_ranks_and_workers_and_after_a_resume(shuffled, caplog):
    datasets = pytest.importorskip("datasets")

    def dataset():
        whole = datasets.Dataset.from_dict({"x": list(range(26))}).to_iterable_dataset(num_shards=4)
        return whole.shuffle(seed=3, buffer_size=3) if shuffled else whole

    def read(strategy, *, num_workers=0, epoch=1, position=0, saved=None, stop=None):
        loader = opened(dataset(), strategy, batch_size=4, num_workers=num_workers)
        loader.load_state_dict(saved or {})
        seen = []
        for step_batch in loader.step_batches(epoch, position):
            seen.append([x for m in step_batch.micro_batches for x in m.batch["x"].tolist()])
            if len(seen) == stop:
                return loader.state_dict(position + 4 * stop)
        return seen

    whole = read(FakeRank())
    assert sorted(joined(whole)) == list(range(26))
    assert read(FakeRank(), num_workers=2) == whole
    assert read(FakeRank(), epoch=0) != whole or not shuffled
    for first, second, both in zip(*ThreadRanks(2).run(read), whole, strict=True):
        assert sorted(first + second) == sorted(both)
    saved = read(FakeRank(), num_workers=2, stop=3)
    assert read(FakeRank(), num_workers=1, position=12, saved=saved) == whole[3:]
    assert ("read again" in caplog.text) == shuffled  # the state of a shuffle buffer leaves out its samples


def test_a_shuffle_buffer_of_one_shard_is_read_again_as_its_state_leaves_it_out(caplog):
    datasets = pytest.importorskip("datasets")

    def loader():
        whole = datasets.Dataset.from_dict({"x": list(range(16))}).to_iterable_dataset()
        return opened(whole.shuffle(seed=3, buffer_size=4), FakeRank(), batch_size=4)

    def seen(step_batches):
        return [m.batch["x"].tolist() for step_batch in step_batches for m in step_batch.micro_batches]

    whole, stopped, again = loader(), loader(), loader()
    next(stopped.step_batches(0, 0))
    again.load_state_dict(stopped.state_dict(4))
    assert seen(again.step_batches(0, 4)) == seen(whole.step_batches(0, 0))[1:]
    assert "its first 4 samples are read again and skipped" in caplog.text


def test_a_dataset_that_was_divided_by_node_is_refused():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=4)
    assert Data(train=split_dataset_by_node(whole, rank=0, world_size=1), batch_size=2).stage_data("train")
    with pytest.raises(UserError, match=r"split_dataset_by_node has divided over ranks.*Pass the whole dataset"):
        Data(train=split_dataset_by_node(whole, rank=0, world_size=2), batch_size=2).stage_data("train")
