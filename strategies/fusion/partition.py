"""Shards of buffers and their servers: pure arithmetic, without tensors or processes.

    gradients in order of arrival       | w3 |b3|      w2      |b2| w1 |
    chunks of at most buffer_mb         |     0     |     1     |   2   |
    shards, one for each server         | 0 | 1 | 2 | 0 | 1 | 2 |0 |1 |2|

Shards ignore where parameters begin and end, so every server handles the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

Servers = Literal["rank", "host"]


def equal_shards(numel: int, world_size: int) -> list[int]:
    """Return the number of elements that each server sums; they differ by at most one."""
    small, larger = divmod(numel, world_size)
    return [small + (server < larger) for server in range(world_size)]


def split_into_chunks(numel: int, chunk: int) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive chunks of nearly equal size, each at most `chunk` elements."""
    sizes = equal_shards(numel, -(-numel // chunk)) if numel else []
    return list(pairwise(accumulate(sizes, initial=0)))


@dataclass(frozen=True)
class HostLayout:
    """The ranks of each host, in rank order."""

    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(names: Sequence[str]) -> HostLayout:
        """Return the layout for `names`, the host name of each rank."""
        by_name: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            by_name.setdefault(name, []).append(rank)
        return HostLayout(tuple(map(tuple, by_name.values())))

    @property
    def is_even(self) -> bool:
        """True if every host has the same number of ranks."""
        return len(set(map(len, self.ranks))) == 1

    def ranks_on_host(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the host that `rank` is on."""
        return next(ranks for ranks in self.ranks if rank in ranks)

    def servers_per_host(self, servers: Servers) -> int:
        """Return the number of servers on each host; they are its first ranks."""
        return 1 if servers == "host" else min(map(len, self.ranks))

    def columns(self, servers: Servers) -> list[tuple[int, ...]]:
        """Return the groups of servers, one of each host, that exchange the same shard of every buffer."""
        return [tuple(ranks[index] for ranks in self.ranks) for index in range(self.servers_per_host(servers))]
