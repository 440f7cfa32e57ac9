"""Shards that a function opens, and the datasets of webdataset and MosaicML."""

import json
import random
from collections import Counter

import pytest
from torch.utils.data import IterableDataset

from tests.data.test_dataset_shards import ThreadRanks, joined, opened, workers_in_this_process
from tests.data.test_loader import loader_of
from tests.tasks import FakeRank
from trainkit import Data, Shards, UserError

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


def test_a_tar_file_is_a_shard(tmp_path):
    wds = pytest.importorskip("webdataset")
    for shard in range(4):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for index in range(8):
                tar.write({"__key__": f"{index:03}", "x.json": 1000 * shard + index})

    def open_tar(url):
        return (json.loads(sample["x.json"]) for sample in wds.tarfile_to_samples()([{"url": url}]))

    shards = Shards(open_tar, [f"{tmp_path}/{shard}.tar" for shard in range(4)])
    whole = read(FakeRank(), shards)
    assert sorted(joined(whole)) == [1000 * shard + index for shard in range(4) for index in range(8)]
    with workers_in_this_process():
        ranks = ThreadRanks(2).run(lambda strategy: read(strategy, shards, num_workers=2))
    assert [sorted(first + second) for first, second in zip(*ranks, strict=True)] == [sorted(both) for both in whole]


def test_a_webdataset_is_refused():
    wds = pytest.importorskip("webdataset")
    dataset = wds.WebDataset("0.tar", shardshuffle=False)
    remedy = r"WebDataset of webdataset, which divides.*trainkit\.Shards\(open_shard, urls\).*tarfile_to_samples"
    with pytest.raises(UserError, match=rf"the train data is a {remedy}"):
        loader_of(Data(train=dataset, batch_size=4))
    with pytest.raises(UserError, match="the train data is a WebLoader of webdataset"):
        loader_of(Data(train=wds.WebLoader(dataset, batch_size=None), batch_size=4))
    with pytest.raises(UserError, match=rf"open_shard returned a {remedy}"):
        read(FakeRank(), Shards(lambda url: dataset, ["0.tar"]))


# ---- MosaicML


def test_a_streaming_dataset_of_mosaicml_is_refused():
    kind = type("StreamingDataset", (IterableDataset,), {"__module__": "streaming.base.dataset", "__iter__": None})
    mine = type("Mine", (kind,), {})
    with pytest.raises(UserError, match=r"the train data is a Mine of MosaicML.*trainkit.Shards.*reader_from_json"):
        loader_of(Data(train=mine(), batch_size=4))
