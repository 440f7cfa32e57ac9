"""Shards that a function opens, and the datasets of webdataset and MosaicML."""

import random
from collections import Counter

import pytest
from torch.utils.data import DataLoader, IterableDataset

from tests.data.test_dataset_shards import ThreadRanks, joined, opened, workers_in_this_process
from tests.data.test_loader import loader_of
from tests.tasks import FakeRank
from trainkit import Data, Shards, UserError
from trainkit.data import opened_shards

# webdataset leaves it to python to close the files.
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def thousand(shard):
    return [1000 * shard + index for index in range(5)]


def read(strategy, dataset, *, num_workers=0, epoch=0, position=0, saved=None, stop=None):
    """Return the numbers of each step batch, or the state after `stop` of them."""
    loader = opened(dataset, strategy, batch_size=4, num_workers=num_workers)
    loader.load_state_dict(saved or {})
    seen = []
    for step_batch in loader.step_batches(epoch, position):
        seen.append([number for micro_batch in step_batch.micro_batches for number in of(micro_batch)])
        if len(seen) == stop:
            return loader.state_dict(position + 4 * stop)
    return seen


def of(micro_batch):
    batch = micro_batch.batch
    return (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()


# ---- Shards


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (1, 3), (2, 0), (2, 2)])
def test_shards_are_read_once_over_ranks_and_workers(world_size, num_workers):
    opens = Counter()

    def open_shard(shard):
        opens[shard] += 1
        return iter(thousand(shard))

    with workers_in_this_process():
        ranks = ThreadRanks(world_size).run(
            lambda strategy: read(strategy, Shards(open_shard, range(4)), num_workers=num_workers)
        )
    assert sorted(joined(joined(rank) for rank in ranks)) == joined(map(thousand, range(4)))
    assert not [shard for shard in (1, 2, 3) if opens[shard] != 1]  # the first is asked for its length, too


def test_a_shard_that_is_a_sequence_resumes_at_its_sample(caplog):
    reads = []

    class Rows:
        def __init__(self, shard):
            self.shard = shard

        def __len__(self):
            return 5

        def __getitem__(self, index):
            reads.append((self.shard, index))
            return thousand(self.shard)[index]

    whole = read(FakeRank(), Shards(Rows, range(4)))
    saved = read(FakeRank(), Shards(Rows, range(4)), stop=3)
    reads.clear()
    assert read(FakeRank(), Shards(Rows, range(4)), position=12, saved=saved) == whole[3:]
    assert sorted(reads) == [(shard, index) for shard in range(4) for index in (3, 4)]
    assert not caplog.text


def test_a_shard_without_a_position_is_read_again_and_says_so(caplog):
    def dataset():
        return Shards(lambda shard: iter(thousand(shard)), range(4))

    whole = read(FakeRank(), dataset())
    saved = read(FakeRank(), dataset(), stop=2)
    caplog.clear()
    assert read(FakeRank(), dataset(), position=8, saved=saved) == whole[2:]
    assert "first 8 samples are read again and skipped" in caplog.text


def test_all_shards_in_sequence_draw_the_same_everywhere():
    def draws(shard):
        yield from (shard + random.random() for _ in range(100))

    dataset = Shards(draws, range(3))
    first = list(dataset)
    random.seed(1)
    before = random.getstate()
    assert list(dataset) == first and len(set(first)) == 300
    assert random.getstate() == before
    dataset.set_epoch(1)
    assert not set(dataset) & set(first)


def test_shards_need_a_function_and_a_list():
    with pytest.raises(UserError, match="open_shard must be a function of one shard, got a list"):
        Shards([1], [1])
    with pytest.raises(UserError, match=r"a list with a value for each shard, got the text 'data/0.txt'"):
        Shards(thousand, "data/0.txt")
    with pytest.raises(UserError, match="there are no shards"):
        Shards(thousand, [])


def test_fewer_shards_than_asked_for_are_read_in_sequence():
    assert list(Shards(thousand, range(4)).shard(2, 1)) == thousand(1) + thousand(3)


# ---- webdataset


@pytest.fixture
def tars(tmp_path):
    """Write four tar files of eight samples; return their URLs."""
    wds = pytest.importorskip("webdataset")
    for shard in range(4):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for index in range(8):
                tar.write({"__key__": f"{index:03}", "x.json": 1000 * shard + index})
    return f"{tmp_path}/{{0..3}}.tar"


WHOLE = [1000 * shard + index for shard in range(4) for index in range(8)]


def web(urls, *, shuffled=True, **settings):
    import webdataset as wds

    dataset = wds.WebDataset(urls, shardshuffle=False, **settings)
    return (dataset.shuffle(6) if shuffled else dataset).decode().to_tuple("x.json")


@pytest.mark.parametrize("splitter", ["split_by_node", "single_node_only", None])
def test_a_webdataset_is_read_once_over_ranks_and_workers(tars, splitter, monkeypatch):
    import webdataset as wds

    splits = {} if splitter is None else {"nodesplitter": getattr(wds, splitter)}
    whole = read(FakeRank(), web(tars, **splits))
    assert sorted(joined(whole)) == WHOLE
    monkeypatch.setenv("RANK", "1")  # as a rank of two sees them
    monkeypatch.setenv("WORLD_SIZE", "2")
    with workers_in_this_process():
        ranks = ThreadRanks(2).run(lambda strategy: read(strategy, web(tars, **splits), num_workers=2))
    for first, second, both in zip(*ranks, whole, strict=True):
        assert sorted(first + second) == sorted(both)


def test_the_shuffles_of_a_webdataset_follow_from_seed_epoch_and_shard(tars):
    import webdataset as wds

    def deterministic():
        stages = (wds.tarfile_to_samples(), wds.detshuffle(6), wds.decode(), wds.to_tuple("x.json"))
        return wds.DataPipeline(wds.SimpleShardList(tars), wds.split_by_node, *stages)

    for make in (lambda: web(tars), deterministic):
        whole = read(FakeRank(), make())
        assert read(FakeRank(), make()) == whole
        assert read(FakeRank(), make(), num_workers=2) == whole
        assert sorted(joined(read(FakeRank(), make(), epoch=1))) == sorted(joined(whole))
        assert read(FakeRank(), make(), epoch=1) != whole
        saved = read(FakeRank(), make(), stop=3)
        assert read(FakeRank(), make(), num_workers=1, position=12, saved=saved) == whole[3:]


def test_a_single_tar_file_and_an_empty_one_are_read(tars, tmp_path):
    import webdataset as wds

    one = joined(read(FakeRank(), web(f"{tmp_path}/2.tar")))
    assert sorted(one) == WHOLE[16:24]
    assert [joined(read(FakeRank(rank, 2), web(f"{tmp_path}/2.tar"))) for rank in range(2)] == [one[::2], one[1::2]]
    wds.TarWriter(str(tmp_path / "3.tar")).close()
    assert sorted(joined(read(FakeRank(), web(tars)))) == WHOLE[:24]


def test_many_tar_files_are_read_in_groups(tars, monkeypatch):
    monkeypatch.setattr(opened_shards, "_MOST_OPEN", 3)
    loader = opened(web(tars, shuffled=False), FakeRank(), batch_size=4)
    assert loader.stage_data.dataset.num_shards == 3
    assert sorted(joined(read(FakeRank(), web(tars)))) == WHOLE


def test_an_evaluation_of_a_webdataset_has_each_sample_once(tars):
    for limit in (None, 100):
        loaders = [opened(web(tars), FakeRank(r, 2), batch_size=4, stage="validation", limit=limit) for r in range(2)]
        batches = [micro_batch for loader in loaders for micro_batch in loader.batches()]
        assert sorted(joined(map(of, batches))) == WHOLE


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda dataset: dataset.with_epoch(10), r"with with_epoch.*max_duration"),
        (lambda dataset: dataset.repeat(2), r"with with_epoch.*repeat"),
        (lambda dataset: dataset.batched(4), r"makes batches; remove batched"),
        (lambda dataset: dataset.slice(4), r"with slice.*limit_train_batches"),
        (lambda dataset: DataLoader(dataset, batch_size=None), "makes batches"),
    ],
)
def test_what_counts_the_samples_of_a_whole_webdataset_is_refused(change, match, tars):
    with pytest.raises(UserError, match=rf"the train data is a WebDataset of webdataset.*{match}"):
        loader_of(Data(train=change(web(tars)), batch_size=None if match == "makes batches" else 4))


def test_shards_of_webdataset_that_are_drawn_are_refused(tars):
    import webdataset as wds

    with pytest.raises(UserError, match="begins with a ResampledShards, which is not a list of shards"):
        loader_of(Data(train=wds.WebDataset(tars, resampled=True, shardshuffle=False), batch_size=4))
    with pytest.raises(UserError, match="a WebLoader of webdataset that begins with a DataLoader"):
        loader_of(Data(train=wds.WebLoader(web(tars), batch_size=None), batch_size=4))
    with pytest.raises(UserError, match="open_shard returned a dataset of webdataset; pass the whole one to Data"):
        read(FakeRank(), Shards(web, [tars, tars]))


# ---- MosaicML


def test_a_streaming_dataset_of_mosaicml_is_refused():
    kind = type("StreamingDataset", (IterableDataset,), {"__module__": "streaming.base.dataset", "__iter__": None})
    mine = type("Mine", (kind,), {})
    with pytest.raises(UserError, match=r"the train data is a Mine of MosaicML.*trainkit.Shards.*reader_from_json"):
        loader_of(Data(train=mine(), batch_size=4))
