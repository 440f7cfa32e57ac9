"""The loader for a dataset: map-style, pre-batched or iterable."""

from __future__ import annotations

from trainkit.data.batch import ShardsData
from trainkit.data.data import StageData
from trainkit.data.loader import BatchLoader, MapBatchLoader, PreBatchedLoader
from trainkit.data.stream_loader import IterableBatchLoader


def open_loader(
    stage_data: StageData, strategy: ShardsData, *, seed: int, limit: int | None = None, repeat_first: bool = False
) -> BatchLoader:
    """Return the loader of a dataset; an epoch has at most `limit` global batches.

    With `repeat_first` every epoch repeats the first one, to overfit on a few batches.
    """
    kind: type[BatchLoader] = MapBatchLoader
    if stage_data.is_iterable:
        kind = IterableBatchLoader
    elif stage_data.batch_size is None:
        kind = PreBatchedLoader
    return kind(stage_data, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
