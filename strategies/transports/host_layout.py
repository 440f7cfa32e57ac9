"""HostLayout: the machines of the ranks, and the ranks that share the memory of one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def host_name() -> str:
    """Return the identity of this rank's machine; ranks that return the same may share its memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


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

    @property
    def fewest_ranks(self) -> int:
        """Number of ranks that every host has at least."""
        return min(map(len, self.ranks))

    def ranks_on_host(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the host that `rank` is on."""
        return next(ranks for ranks in self.ranks if rank in ranks)

    def columns(self, count: int) -> list[tuple[int, ...]]:
        """Return `count` groups of ranks, one of each host: the first ranks, the second ones, ..."""
        return [tuple(ranks[index] for ranks in self.ranks) for index in range(count)]
