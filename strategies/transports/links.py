"""Links between hosts: how fast connections have sent, as the kernel has counted, and the slowest host.

    host0 ---- 940 Mbit/s --> host2 ---- 21 Mbit/s --> host1 ---- 19 Mbit/s --> host0        host1 is slow

A connection is busy while it has bytes that are not acknowledged, so a rate does not depend on how much is sent.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

MIN_BYTES = 2**18  # of a connection that counts
SLOW_FACTOR = 2.0  # between the slowest host and the next one
_INFO_BYTES = 256
_ACKED, _BUSY = 120, 168  # offsets in Linux's struct tcp_info: bytes, and microseconds


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
        """Mbit/s while it was busy."""
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
