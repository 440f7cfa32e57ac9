"""Who sums what: the pure arithmetic of buffers, windows and parts, without tensors or processes.

    gradients in their order of arrival   | w3 |b3|      w2      |b2| w1 |
    windows of at most buffer_mb          |     0     |     1     |   2   |
    parts, one for each server            | 0 | 1 | 2 | 0 | 1 | 2 |0 |1 |2|

Variables play no role in who sums what, so that every server handles the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


def split_into_chunks(numel: int, chunk: int) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive windows of nearly equal size, none larger than `chunk`."""
    if numel == 0:
        return []
    count = -(-numel // chunk)
    sizes = equal_shards(numel, count)
    stops = [sum(sizes[: index + 1]) for index in range(count)]
    return [(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def equal_shards(numel: int, world_size: int) -> list[int]:
    """Return the elements that each server sums; they differ by one at most."""
    small, larger = divmod(numel, world_size)
    return [small + (server < larger) for server in range(world_size)]


def bytes_per_server(chunks: Sequence[int], world_size: int) -> list[int]:
    """Return how many elements each server sums over all windows (of the given sizes) of a step."""
    parts = [equal_shards(numel, world_size) for numel in chunks]
    return [sum(part[server] for part in parts) for server in range(world_size)]


def naive_bytes_per_server(variables: Sequence[int], world_size: int) -> list[int]:
    """Return the servers' loads if each variable is kept whole, the largest first, where there is least so far."""
    loads = [0] * world_size
    for numel in sorted(variables, reverse=True):
        loads[loads.index(min(loads))] += numel
    return loads


def imbalance(loads: Sequence[int]) -> float:
    """Return the load of the busiest server relative to the mean."""
    return max(loads) * len(loads) / sum(loads)


Servers = Literal["rank", "host"]


@dataclass(frozen=True)
class HostLayout:
    """The ranks of each host, in the order of ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(names: Sequence[str]) -> HostLayout:
        """Return the hosts, where `names` tells for each rank what its host is called."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return HostLayout(tuple(tuple(ranks) for ranks in found.values()))

    @property
    def are_even(self) -> bool:
        """Whether there are as many ranks on every host."""
        return len({len(ranks) for ranks in self.ranks}) == 1

    def beside(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the host that `rank` is on."""
        return next(ranks for ranks in self.ranks if rank in ranks)

    def servers_of_a_host(self, servers: Servers) -> int:
        """Return how many ranks of a host are servers, its first ones."""
        return 1 if servers == "host" else min(len(ranks) for ranks in self.ranks)

    def columns(self, servers: Servers) -> list[tuple[int, ...]]:
        """Return the sets of servers, one of each host, that exchange the same part of every buffer."""
        return [tuple(ranks[index] for ranks in self.ranks) for index in range(self.servers_of_a_host(servers))]
