"""Which ranks share a host, and which of them are servers: pure arithmetic, without processes.

hosts           [0 1]  [2 3]
servers=rank    0 and 2 exchange the first half of every buffer, 1 and 3 the second: four servers
servers=host    0 and 2 exchange all of it: two servers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Servers = Literal["rank", "host"]


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host, in the order of ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(names: Sequence[str]) -> Hosts:
        """Return the hosts, where `names` tells for each rank what its host is called."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return Hosts(tuple(tuple(ranks) for ranks in found.values()))

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
