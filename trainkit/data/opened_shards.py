"""Shards: samples in shards that a function opens, and datasets of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import isgeneratorfunction
from typing import Any

from torch.utils.data import IterableDataset

from trainkit.data.dataset_shards import ShardChunks, ShardStart, can_seek, set_epoch
from trainkit.errors import UserError

_CHUNK = 64  # samples that are read under one seed
_OF_WEBDATASET = (
    ", which divides its tar files over ranks and workers itself, and shuffles from generators that no seed reaches. "
    "Pass trainkit.Shards(open_shard, urls), where open_shard(url) yields the samples of one tar file: "
    "webdataset.tarfile_to_samples()([{'url': url}])."
)


class Shards(IterableDataset[Any]):
    """Samples in shards, each opened by a function where it is read: files of any format, parts of a database.

        Shards(lambda path: map(json.loads, open(path)), sorted(glob("data/*.jsonl")))

    The Trainer reads one sample of each shard in turn, and each shard once over all ranks and workers where the number
    of shards and the batch size are multiples of the ranks. Python, numpy and torch are seeded while a shard is read,
    from the seed, the epoch and the shard. All shards of a rank are open at the same time.

    Args:
        open_shard: Takes one of `shards`; returns an iterable of its samples. If that is a sequence (with `__len__` and
            `__getitem__`) or has `state_dict` and `load_state_dict`, a resume continues at the exact sample; otherwise
            the shard is read again up to that sample. Every rank opens a sequence for its length. `set_epoch`, if there
            is one, is called with the epoch.
        shards: A path, a URL or any other value for each shard.

    """

    def __init__(self, open_shard: Callable[[Any], Iterable[Any]], shards: Iterable[Any]) -> None:
        if not callable(open_shard):
            raise UserError(f"Shards: open_shard must be a function of one shard, got a {type(open_shard).__name__}.")
        if isinstance(shards, (str, bytes)):
            raise UserError(f"Shards: shards must be a list with a value for each shard, got the text {shards!r}.")
        self.shards = list(shards)
        if not self.shards:
            raise UserError("Shards: there are no shards.")
        self._open, self._epoch = open_shard, 0

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Any:
        """Return every `num_shards`-th shard from shard `index` on; a single one as it is opened."""
        selected = self.shards[index::num_shards]
        if len(selected) != 1:
            return Shards(self._open, selected)
        opened: Any = self._open(selected[0])
        if _is_webdataset(opened):
            raise UserError(f"Shards: open_shard returned a {type(opened).__name__} of webdataset{_OF_WEBDATASET}")
        is_sequence = hasattr(opened, "__len__") and hasattr(opened, "__getitem__")
        return _Rows(opened) if is_sequence and not isinstance(opened, IterableDataset) else opened

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch in which all shards are read in sequence."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        # Seed 0: only an iteration without a Trainer is here, which opens each shard itself.
        settings: dict[str, Any] = {"lengths": [None] * self.num_shards, "seed": 0, "epoch": self._epoch}
        for shard in range(self.num_shards):
            for chunk in ShardChunks(self, {shard: ShardStart()}, chunk_size=_CHUNK, **settings):
                yield from chunk.samples


class _Rows(IterableDataset[Any]):
    """A sequence, read from its beginning or from a position on."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows, self._position = rows, 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        while self._position < len(self._rows):
            self._position += 1
            yield self._rows[self._position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._position = saved["position"]


# ---- Datasets of other libraries


def as_iterable(stage: str, dataset: Any) -> Any:
    """Return a dataset as it is, and another object that iterates and has a state as an IterableDataset.

    Such as a `Loader` of torchdata.nodes; raises UserError for a node without it.
    """
    if _is_a(dataset, "torchdata.nodes.base_node", "BaseNode"):
        raise UserError(
            f"the {stage} data is a {type(dataset).__name__}, a node of torchdata.nodes; pass "
            "torchdata.nodes.Loader(node), which reads it again in each epoch."
        )
    if isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitem__") or not can_seek(dataset):
        return dataset
    return StatefulIterable(dataset) if hasattr(dataset, "__iter__") else dataset


class StatefulIterable(IterableDataset[Any]):
    """The items of `iterable`, which is not a dataset, and its state."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.iterable, epoch)

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = self.iterable.state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.iterable.load_state_dict(saved)


class _StatefulIterators(IterableDataset[Any]):
    """An iterable dataset without a state, with that of its latest iterator; an empty one if that has none either."""

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset
        self._iterator: Any = None
        self._saved: dict[str, Any] = {}  # for the next iterator

    def __iter__(self) -> Iterator[Any]:
        # A loaded state counts for one iterator; the next epoch begins at the first sample.
        self._iterator, saved, self._saved = iter(self._dataset), self._saved, {}
        if saved:
            self._iterator.load_state_dict(saved)
        iterator: Iterator[Any] = self._iterator
        return iterator

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self._dataset, epoch)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._iterator.state_dict()) if can_seek(self._iterator) else {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._saved = saved


def with_state(dataset: Any) -> Any:
    """Return an iterable dataset that has no state with that of its iterators, which are known once it is iterated."""
    has_state = hasattr(dataset, "state_dict") or isgeneratorfunction(type(dataset).__iter__)
    return dataset if has_state else _StatefulIterators(dataset)


def check_undivided(stage: str, dataset: Any) -> None:
    """Raise UserError for a dataset of another library that divides its samples over ranks itself."""
    what = f"the {stage} data is a {type(dataset).__name__} of"
    # Private, as Hugging Face datasets have no public name for it.
    divided = getattr(dataset, "_distributed", None)
    if (
        _is_a(dataset, "datasets.iterable_dataset", "IterableDataset")
        and divided is not None
        and divided.world_size > 1
    ):
        raise UserError(
            f"{what} Hugging Face datasets that split_dataset_by_node has divided over ranks; the strategy does that. "
            "Pass the whole dataset."
        )
    if _is_streaming_dataset(dataset):
        raise UserError(
            f"{what} MosaicML, which divides its samples over ranks and workers itself, in its own order. Pass "
            "trainkit.Shards(open_shard, index['shards']), where open_shard(shard) returns "
            "streaming.base.format.reader_from_json(folder, None, shard), and index is the content of index.json."
        )
    if _is_webdataset(dataset):
        raise UserError(f"{what} webdataset{_OF_WEBDATASET}")


def _is_streaming_dataset(dataset: Any) -> bool:
    return _is_a(dataset, "streaming.base.dataset", "StreamingDataset")


def _is_webdataset(dataset: Any) -> bool:
    return _is_a(dataset, "webdataset.pipeline", "DataPipeline")


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return True if an object is of a class that is named by its module, which need not be installed."""
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(value).__mro__)
