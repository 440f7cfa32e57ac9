"""Cutting an evaluation batch for several replicas, where it is certain how."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainkit.batches import rows, tree_leaves


def cut(batch: Any, count: int, *, parts: int) -> list[tuple[Any, int]]:
    """Return consecutive parts of a batch with `count` samples and their numbers of samples, as even as they can be.

    A batch that holds anything but tensors with a row for each sample is left whole: cutting it might count
    something twice.
    """
    parts = min(parts, count)
    if parts < 2 or not _is_rows(batch, count):
        return [(batch, count)]
    small, larger = divmod(count, parts)
    cuts, start = [], 0
    for part in range(parts):
        size = small + (part < larger)
        cuts.append((rows(batch, slice(start, start + size), of=count), size))
        start += size
    return cuts


def _is_rows(batch: Any, count: int) -> bool:
    """Whether every leaf is a tensor with `count` rows, or says nothing about samples (None)."""
    return all(
        leaf.dim() > 0 and leaf.shape[0] == count if isinstance(leaf, Tensor) else leaf is None
        for leaf in tree_leaves(batch)
    )
