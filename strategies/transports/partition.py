"""Shards of buffers and their servers: pure arithmetic, without tensors or processes.

    gradients in order of arrival       | w3 |b3|      w2      |b2| w1 |
    chunks of a buffer                  |     0     |     1     |   2   |
    shards, one for each server         | 0 | 1 | 2 | 0 | 1 | 2 |0 |1 |2|

Shards ignore where parameters begin and end, so every server handles the same number of bytes.
"""

from __future__ import annotations

from itertools import accumulate, pairwise


def equal_shards(numel: int, world_size: int) -> list[int]:
    """Return the number of elements that each server sums; they differ by at most one."""
    small, larger = divmod(numel, world_size)
    return [small + (server < larger) for server in range(world_size)]


def split_into_chunks(numel: int, chunk: int) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive chunks of nearly equal size, each at most `chunk` elements."""
    sizes = equal_shards(numel, -(-numel // chunk)) if numel else []
    return list(pairwise(accumulate(sizes, initial=0)))
