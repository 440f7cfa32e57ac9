"""Shards: samples in shards that a function opens, and the datasets of WebDataset as such."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial, reduce
from inspect import isgeneratorfunction
from typing import Any

from torch.utils.data import IterableDataset

from trainkit.data.dataset_shards import ShardChunks, ShardStart, can_seek, set_epoch
from trainkit.errors import UserError

_WEBDATASET_WHOLE = ("split_by_node", "split_by_worker", "single_node_only", "check_empty")  # not for a single shard
_BATCHED, _SHUFFLE, _SLICE = "webdataset.filters._batched", "webdataset.filters._shuffle", "itertools.islice"
_MOST_OPEN = 256  # shards of webdataset that are open at a time; more are read one after the other in as many groups
_CHUNK = 64  # samples that are read under one seed


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
            raise UserError("Shards: open_shard returned a dataset of webdataset; pass the whole one to Data instead.")
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


def with_shards(stage: str, dataset: Any, *, is_pre_batched: bool) -> Any:
    """Return a dataset of webdataset as `Shards`, any other as it is; raises UserError if it cannot be divided."""
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
    return _webdataset_shards(f"{what} webdataset", dataset, is_pre_batched) if _is_webdataset(dataset) else dataset


def _is_streaming_dataset(dataset: Any) -> bool:
    return _is_a(dataset, "streaming.base.dataset", "StreamingDataset")


def _is_webdataset(dataset: Any) -> bool:
    return _is_a(dataset, "webdataset.pipeline", "DataPipeline")


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return True if an object is of a class that is named by its module, which need not be installed."""
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(value).__mro__)


def _webdataset_shards(what: str, dataset: Any, is_pre_batched: bool) -> Shards:
    """Return the shards of a pipeline without its own division of shards over ranks and workers."""
    source, *stages = dataset.pipeline
    if type(source).__name__ != "SimpleShardList":
        raise UserError(
            f"{what} that begins with a {type(source).__name__}, which is not a list of shards that are read once in "
            "each epoch; begin with WebDataset(urls, shardshuffle=False) or SimpleShardList(urls), without "
            "resampled=True, and pass the dataset instead of a WebLoader."
        )
    if dataset.repetitions != 1:
        raise UserError(
            f"{what} with with_epoch(...) or repeat(...); remove it: an epoch has each sample once, "
            "Trainer(max_duration=...) counts epochs or steps, and Trainer(limit_train_batches=...) limits an epoch."
        )
    functions = {_function_of(stage) for stage in stages}
    if is_pre_batched or _BATCHED in functions:
        raise UserError(
            f"{what} that makes batches; remove batched(...) and listed(...), and pass the dataset with "
            "Data(batch_size=...), the samples of a global batch."
        )
    if _SLICE in functions:
        raise UserError(
            f"{what} with slice(...), which counts the samples of all shards; remove it, and limit an epoch by "
            "Trainer(limit_train_batches=...)."
        )
    # ShardedSamples divides the shards: with the pipeline's own division some would be read by nobody.
    stages_of_shard = [stage for stage in stages if getattr(stage, "__name__", "") not in _WEBDATASET_WHOLE]
    groups = [source.urls[first::_MOST_OPEN] for first in range(min(len(source.urls), _MOST_OPEN))]
    # `invoke` is the pipeline's way to apply a stage, also one that is a class or a partial function.
    return Shards(partial(_WebDatasetShard, dataset.invoke, stages_of_shard), groups)


def _function_of(stage: Any) -> str:
    """Return the function that a stage of a pipeline applies, as `module.name`."""
    function = getattr(stage, "f", None)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"


class _WebDatasetShard(IterableDataset[Any]):
    """The samples of some shards of a pipeline, whose shuffles draw from python's generator, which is seeded."""

    def __init__(self, invoke: Callable[..., Any], stages: Sequence[Any], urls: Sequence[str]) -> None:
        self._invoke, self._stages, self._urls = invoke, stages, urls

    def __iter__(self) -> Iterator[Any]:
        return iter(reduce(self._apply, self._stages, iter([{"url": url} for url in self._urls])))

    def _apply(self, samples: Any, stage: Any) -> Any:
        if type(stage).__name__ == "detshuffle":  # it counts its epochs by itself
            stage = copy(stage)
            # From python's generator, which is seeded by seed, epoch and shard while a shard is read.
            stage.seed, stage.epoch = random.getrandbits(32), 0
        if _function_of(stage) == _SHUFFLE:
            # Without its own seed and generator: they would shuffle in another order after a resume.
            settings = {name: value for name, value in stage.kw.items() if name != "seed"}
            return stage.f(samples, *stage.args[:2], **(settings | {"rng": random}))
        return self._invoke(stage, samples)
