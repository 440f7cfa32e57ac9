"""Loaders of torchdata and other streams with a state: the Trainer's own samples, continued exactly or refused."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.data.test_dataset_shards import ThreadRanks
from tests.data.test_loader import Positioned, flat, loader_of, read
from tests.tasks import Regression, RegressionStream, StopAt, assert_same_bits, regression_data
from trainkit import Data, Trainer, UserError
from trainkit.data.loader import open_loader
from trainkit.integrations.lightning import data_of
from trainkit.testing import run_ranks

nodes = pytest.importorskip("torchdata.nodes")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it


def stateful(dataset, **settings):
    return stateful_dataloader.StatefulDataLoader(dataset, **settings)


class Counting:
    """An iterator with a state."""

    def __init__(self, num_samples):
        self.num_samples, self.position = num_samples, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == self.num_samples:
            raise StopIteration
        self.position += 1
        return torch.tensor(self.position - 1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, saved):
        self.position = saved["position"]


class StatefulIterators(IterableDataset):
    """Has no state itself."""

    def __init__(self, num_samples):
        self.num_samples, self.opened, self.epoch = num_samples, 0, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.opened += 1
        return Counting(self.num_samples)


class Generated(IterableDataset):
    """Has no state at all."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return (torch.tensor(number) for number in range(self.num_samples))


class LiveState(Positioned):
    """Returns the very state that it changes."""

    def __init__(self, num_samples):
        super().__init__(num_samples)
        self.state = {"inner": {"position": 0}}

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        inner = self.state["inner"]
        while inner["position"] < self.num_samples:
            inner["position"] += 1
            yield torch.tensor(inner["position"] - 1)
        inner["position"] = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, saved):
        self.state["inner"]["position"] = saved["inner"]["position"]


def node_loader(num_samples=12):
    return nodes.Loader(nodes.IterableWrapper([torch.tensor(number) for number in range(num_samples)]))


def shuffled_node_loader(num_samples=12):
    dataset = [torch.tensor(number) for number in range(num_samples)]
    sampler = nodes.SamplerWrapper(stateful_dataloader.sampler.RandomSampler(dataset, generator=torch.Generator()))
    return nodes.Loader(nodes.Mapper(sampler, dataset.__getitem__))


# ---- Map-style datasets


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stateful_loader_is_read_as_a_loader_of_torch(shuffle, world_size, num_workers):
    def seen(loader):
        return [
            read(loader_of(Data(train=loader), rank=rank, world_size=world_size), 1, 4) for rank in range(world_size)
        ]

    settings = {"batch_size": 4, "shuffle": shuffle, "drop_last": True}
    loader = stateful(TensorDataset(torch.arange(10)), num_workers=num_workers, **settings)
    assert Data(train=loader).stage_data("train").shuffle == shuffle
    assert seen(loader) == seen(DataLoader(TensorDataset(torch.arange(10)), **settings))


def test_a_sampler_of_a_stateful_loader_is_replaced_or_kept_as_that_of_torch():
    dataset, module = TensorDataset(torch.arange(10)), stateful_dataloader.sampler
    for shuffle in (False, True):
        sampler = module.StatefulDistributedSampler(dataset, num_replicas=2, rank=1, shuffle=shuffle)
        stage_data = Data(train=stateful(dataset, batch_size=2, sampler=sampler)).stage_data("train")
        assert (stage_data.sampler, stage_data.shuffle) == (None, shuffle)
    draws = module.RandomSampler(dataset, replacement=True, num_samples=6)
    loader = loader_of(Data(train=stateful(dataset, batch_size=2, sampler=draws)))
    whole = read(loader, 1)
    assert loader.stage_data.sampler is draws and len(flat(whole)) == 6
    again = loader_of(Data(train=stateful(dataset, batch_size=2, sampler=draws)))
    assert read(again, 1, 2) == whole[1:] != read(again, 0)[1:]


def test_a_state_of_a_map_style_dataset_is_said_not_to_be_saved(caplog):
    class Remembering(TensorDataset):
        def state_dict(self):
            return {}

        load_state_dict = None

    for rank in range(2):
        loader_of(Data(train=stateful(Remembering(torch.arange(4)), batch_size=2)), rank=rank, world_size=2)
    (record,) = caplog.records
    assert "Remembering has a state_dict, which checkpoints do not hold" in record.getMessage()


# ---- Iterable datasets


STREAMS = {
    "its own state": lambda: Positioned(12),
    "the state of its iterators": lambda: StatefulIterators(12),
    "a state that it changes": lambda: LiveState(12),
    "a loader of nodes": node_loader,
    "a loader of shuffled nodes": shuffled_node_loader,
}


def stream_data(kind, num_workers):
    stream = STREAMS[kind]()
    if isinstance(stream, IterableDataset):
        return Data(train=stateful(stream, batch_size=4, num_workers=num_workers))
    return Data(train=stream, batch_size=4)


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [*((kind, 0) for kind in STREAMS), ("the state of its iterators", 1)],
)
def test_a_stream_continues_at_its_exact_sample_on_two_ranks(kind, num_workers, caplog):
    loader = loader_of(stream_data(kind, num_workers))
    whole = [flat(read(loader, epoch)) for epoch in range(2)]
    assert [sorted(epoch) for epoch in whole] == [list(range(12))] * 2
    stopped = loader_of(stream_data(kind, num_workers))
    step_batches = stopped.step_batches(0, 0)
    for _ in range(2):  # the next one is read ahead
        next(step_batches)
    saved = stopped.state_dict(4)
    ranks = [loader_of(stream_data(kind, num_workers), rank=rank, world_size=2) for rank in range(2)]
    for epoch, left in enumerate((whole[0][4:], whole[1])):
        for rank, loader in enumerate(ranks):
            loader.load_state_dict(saved if epoch == 0 else {})
            assert flat(read(loader, epoch, 0 if epoch else 4)) == left[rank::2]
    assert not caplog.text


@pytest.mark.parametrize("kind", sorted(STREAMS.keys() - {"a loader of shuffled nodes"}))  # whose state has no seed
def test_a_stream_of_which_a_limit_makes_epochs_continues_as_it_would_have(kind, caplog):
    def loader():
        return loader_of(stream_data(kind, 0), limit=2)

    uninterrupted, stopped = loader(), loader()
    whole = [flat(read(uninterrupted, epoch)) for epoch in range(4)]
    for epoch in range(3):
        assert flat(read(stopped, epoch)) == whole[epoch]
        saved, stopped = stopped.state_dict(0), loader()
        stopped.load_state_dict(saved)
    assert flat(read(stopped, 3)) == whole[3]
    assert not caplog.text


def test_a_stream_is_opened_once_for_an_epoch_and_gets_its_number():
    stream = StatefulIterators(8)
    loader = loader_of(Data(train=stream, batch_size=4))
    for epoch in range(2):
        read(loader, epoch)
        assert (stream.opened, stream.epoch) == (epoch + 1, epoch)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_cannot_continue_says_so_at_the_start_on_one_rank(num_workers, caplog):
    for rank in range(2):
        data = Data(train=stateful(Generated(8), batch_size=4, num_workers=num_workers))
        loader = loader_of(data, rank=rank, world_size=2)
        next(loader.step_batches(0, 0))
        read(loader, 1)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the iterable training dataset has no state_dict and load_state_dict with an exact position: a resumed run "
        "reads its first samples again and skips them. Define both to continue at the exact sample."
    )


def test_batches_of_nodes_are_global_batches_and_continue_exactly(caplog):
    def loader():
        rows = nodes.IterableWrapper([torch.full((size,), size) for size in (4, 3, 2)])
        return loader_of(Data(train=DataLoader(nodes.Loader(rows), batch_size=None)))

    stopped, again = loader(), loader()
    next(stopped.step_batches(0, 0))
    again.load_state_dict(stopped.state_dict(1))
    assert read(again, 0, 1) == [[[3] * 3], [[2] * 2]]
    assert not caplog.text


# ---- Ranks


class Divided(IterableDataset):
    """Yields the items of one rank of two."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return ({"text": f"item {number}", "of": object()} for number in range(self.rank, 16, 2))


@pytest.mark.parametrize("is_divided", [False, True])
def test_ranks_that_read_other_items_are_told_that_some_are_lost(is_divided, caplog):
    def read_one(strategy):
        dataset = Divided(strategy.comm.rank if is_divided else 0)
        data = Data(train=dataset, batch_size=4, collate_fn=len)
        next(open_loader(data.stage_data("train"), strategy, seed=0).step_batches(0, 0))

    ThreadRanks(2).run(read_one)
    told = [record for record in caplog.records if "divides its items by rank, some are lost" in record.getMessage()]
    assert len(told) == is_divided


# ---- Runs


class Rows(RegressionStream):
    """Continues at the sample after its last one."""

    def __init__(self):
        super().__init__(18)
        self.position = 0

    def __iter__(self):
        while self.position < len(self.samples):
            self.position += 1
            yield self.samples[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, saved):
        self.position = saved["position"]


LOADERS = {
    "map-style": lambda: stateful(regression_data(18), batch_size=4, shuffle=True, num_workers=2),
    "iterable": lambda: stateful(Rows(), batch_size=4, num_workers=1),
}


def fit(strategy, run_dir, *, kind, stop=None, resume=None):
    """Train for two epochs, or until step `stop`."""
    task = Regression(hidden=4)
    settings = {"callbacks": [] if stop is None else [StopAt(stop)], "loggers": [], "report": False}
    trainer = Trainer(strategy, max_duration="2epoch", precision="fp64", run_dir=run_dir, **settings)
    trainer.fit(task, LOADERS[kind](), resume=resume)
    return task


def fit_on_ranks(folder):
    return {
        kind: fit(DDPStrategy(device="cpu"), folder / f"ranks {kind}", kind=kind, resume=folder / kind).state_dict()
        for kind in LOADERS
    }


@pytest.mark.slow
def test_a_run_on_a_stateful_loader_continues_exactly_on_one_rank_and_on_two(tmp_path):
    whole = {}
    for kind in LOADERS:
        whole[kind] = fit(SingleStrategy(device="cpu"), tmp_path / f"whole {kind}", kind=kind)
        fit(SingleStrategy(device="cpu"), tmp_path / kind, kind=kind, stop=3)
        resumed = fit(SingleStrategy(device="cpu"), tmp_path / f"one {kind}", kind=kind, resume=tmp_path / kind)
        assert_same_bits(resumed, whole[kind])
    for of_rank in run_ranks(fit_on_ranks, 2, tmp_path):
        for kind, task in whole.items():
            torch.testing.assert_close(of_rank[kind], dict(task.state_dict()), rtol=1e-9, atol=1e-12)


def test_a_stateful_loader_of_a_data_of_module_is_read():
    class Numbers:
        def prepare_data(self):
            pass

        def setup(self, stage):
            pass

        def train_dataloader(self):
            return stateful(TensorDataset(torch.arange(6)), batch_size=2)

    assert flat(read(loader_of(data_of(Numbers())))) == list(range(6))


# ---- What is refused


@pytest.mark.parametrize(("is_iterable", "num_workers"), [(False, 0), (False, 2), (True, 0)])
def test_a_loader_within_an_epoch_is_refused_and_one_at_its_end_is_not(is_iterable, num_workers):
    dataset = Positioned(8) if is_iterable else TensorDataset(torch.arange(8))
    loader = stateful(dataset, batch_size=4, num_workers=num_workers)
    loader.state_dict()
    data = Data(train=loader)
    data.stage_data("train")
    batches = iter(loader)
    next(batches)
    with pytest.raises(UserError, match=r"train data is a StatefulDataLoader that was left within an epoch.*a new one"):
        data.stage_data("train")
    assert len(list(batches)) == 1
    data.stage_data("train")


@pytest.mark.parametrize("stage", ["train", "validation"])
def test_a_loader_with_a_loaded_state_is_refused(stage):
    message = rf"{stage} data is a StatefulDataLoader that has a state that was loaded.*resume=run_dir"
    first, second = (stateful(range(8), batch_size=4) for _ in range(2))
    next(iter(first))
    second.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=message):
        Data(**{stage: second}).stage_data(stage)
    sampler = stateful_dataloader.sampler.StatefulDistributedSampler(range(8), num_replicas=1, rank=0)
    sampler.load_state_dict({"yielded": 4})
    for kind in (DataLoader, stateful):
        with pytest.raises(UserError, match=message.replace("StatefulDataLoader", r"\w*DataLoader")):
            Data(**{stage: kind(range(8), batch_size=4, sampler=sampler)}).stage_data(stage)


def test_several_workers_of_one_stream_are_refused_with_the_number_that_is_not():
    with pytest.raises(UserError, match=r"num_workers=2: several workers would repeat it.*Set num_workers=1 or 0"):
        Data(train=stateful(Positioned(8), batch_size=4, num_workers=2)).stage_data("train")


@pytest.mark.parametrize("base", [DataLoader, stateful_dataloader.StatefulDataLoader])
def test_a_loader_that_changes_its_batches_is_refused_by_name(base):
    class Doubling(base):
        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    with pytest.raises(UserError, match=r"a Doubling, which makes its batches in an __iter__ of its own.*collate_fn"):
        Data(train=Doubling([torch.ones(1)] * 4, batch_size=2)).stage_data("train")


def test_a_loader_of_nodes_is_refused_with_workers():
    with pytest.raises(UserError, match=r"train data is a Loader with num_workers=1: .*Set num_workers=0; nodes of"):
        Data(train=node_loader(), batch_size=4, num_workers=1).stage_data("train")


def test_a_node_without_its_loader_is_refused_with_what_to_pass():
    node = nodes.IterableWrapper([1, 2])
    for data in (Data(train=node, batch_size=2), Data(train=DataLoader(node, batch_size=None))):
        with pytest.raises(UserError, match=r"IterableWrapper, a node of torchdata.nodes; pass torchdata.nodes.Loader"):
            data.stage_data("train")
