"""The loader for a dataset: map-style, pre-batched or iterable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.data.batch import ShardsData
from trainkit.data.data import StageData
from trainkit.data.loader import BatchLoader, MapBatchLoader, PreBatchedLoader

if TYPE_CHECKING:
    pass


def open_loader(
    source: StageData, strategy: ShardsData, *, seed: int, limit: int | None = None, repeat_first: bool = False
) -> BatchLoader:
    """Return the feed for a source; `limit` global batches at most make an epoch.

    With `repeat_first` every epoch is the first one again: overfitting on the same few batches.
    """
    from trainkit.data.stream_loader import IterableBatchLoader

    if source.is_stream:
        return IterableBatchLoader(source, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
    if source.batch_size is None:
        return PreBatchedLoader(source, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
    return MapBatchLoader(source, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
