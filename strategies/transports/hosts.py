"""The machines of the ranks, the process groups that a strategy makes of them, and the links between machines.

host0 ---- 940 Mbit/s --> host2 ---- 21 Mbit/s --> host1 ---- 19 Mbit/s --> host0        host1 is slow
"""

from __future__ import annotations

import gc
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trainkit.distributed.collectives import gather

MIN_BYTES = 2**18  # of a connection that counts
SLOW_FACTOR = 2.0  # between the slowest host and the next one
_INFO_BYTES = 256
_ACKED, _BUSY = 120, 168  # offsets in Linux's struct tcp_info: bytes, and microseconds


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

    @staticmethod
    def gather(group: dist.ProcessGroup) -> HostLayout:
        """Return the layout of the ranks of `group`. Collective."""
        return HostLayout.of(gather(host_name(), group))

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


class OwnGroups:
    """Process groups in which a wait for another rank ends after `timeout`."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._groups: list[dist.ProcessGroup] = []  # with this rank

    def new(self, ranks: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
        """Return a new group of these ranks of all. Collective over all ranks, which make all groups in one order."""
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=self.timeout)
        if dist.get_rank() in ranks:
            self._groups.append(group)
        return group

    def new_of_sets(
        self, sets: Sequence[Sequence[int]], group: dist.ProcessGroup, *, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Make a new group of each set of ranks of `group`, and return the one with this rank, if any. Collective."""
        local_group = None
        # Every rank makes the groups of all sets: torch numbers groups by the calls, which must be the same everywhere.
        for members in sets:
            made = self.new([dist.get_global_rank(group, member) for member in members], backend=backend)
            local_group = made if group.rank() in members else local_group
        return local_group

    def leave(self, *, destroy: bool = True) -> None:
        """Leave the groups, and end their threads; without `destroy` other ranks may still wait in them."""
        groups, self._groups = self._groups, []
        if not groups:
            return
        while groups and destroy:
            # Popped in the call, so that no reference here outlives the group.
            dist.destroy_process_group(groups.pop())
        groups.clear()
        gc.collect()  # threads end with the last reference


@dataclass(frozen=True)
class Link:
    """What this process has sent over one connection."""

    host: str
    address: str
    peer: str
    """Address of the other end."""
    num_bytes: int
    seconds: float

    @property
    def megabits(self) -> float:
        """Mbit/s while it was busy: while it had bytes that were not acknowledged, however few were sent."""
        return self.num_bytes * 8e-6 / self.seconds


def links_of_this_process() -> list[Link]:
    """Return the connections to other machines over which much was sent; empty on other systems than Linux."""
    links = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                address, peer = (str(end[0]).removeprefix("::ffff:") for end in _ends(connection))
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except (OSError, IndexError):  # closed meanwhile, listening, or of another kind
            continue
        if len(info) < _BUSY + 8:
            continue
        acked, busy = struct.unpack_from("Q", info, _ACKED)[0], struct.unpack_from("Q", info, _BUSY)[0]
        if address != peer and acked >= MIN_BYTES and busy:
            links.append(Link(socket.gethostname(), address, peer, acked, busy * 1e-6))
    return links


def _ends(connection: socket.socket) -> tuple[tuple[object, ...], tuple[object, ...]]:
    return connection.getsockname(), connection.getpeername()


def slow_host(links: Iterable[Link]) -> str | None:
    """Return a sentence that names the host whose fastest link is much slower than other hosts'; `None` without one."""
    links = list(links)
    hosts = {link.address: link.host for link in links}
    fastest: dict[str, float] = defaultdict(float)
    for link in links:
        for host in (link.host, hosts.get(link.peer)):
            if host is not None:
                fastest[host] = max(fastest[host], link.megabits)
    if len(fastest) < 3:  # of two hosts the link is slow for both
        return None
    (slow, rate), (_, others), *_ = sorted(fastest.items(), key=lambda item: item[1])
    if rate * SLOW_FACTOR > others:
        return None
    return (
        f"The link of {slow} has carried {rate:.0f} Mbit/s while it was busy, those of other hosts at least "
        f"{others:.0f} Mbit/s: steps wait for {slow}."
    )
