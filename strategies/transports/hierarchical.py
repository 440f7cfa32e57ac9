"""Hierarchical transport: buckets summed in the memory of each host, then between hosts, each shard once a host.

    host 0   rank 0   [ shard 0 | shard 1 ]    1  rank 0 adds up shard 0 of its host's buckets, rank 1 shard 1
             rank 1   [ shard 0 | shard 1 ]    2  ranks 0 and 2 all-reduce shard 0, ranks 1 and 3 shard 1
    host 1   rank 2   [ shard 0 | shard 1 ]    3  and write the sum into all buckets of their host
             rank 3   [ shard 0 | shard 1 ]

A host sends 2 (H-1)/H of the gradients for H hosts, whatever its number of ranks, and every rank an equal part of it.
While shards are between hosts, backward fills the next buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore

from .hosts import HostLayout, OwnGroups
from .process_group import ProcessGroupTransport, Work
from .shared_memory import LONGEST_NAP_SECONDS, SharedBucket, SharedMemoryTransport, shard_of


class HierarchicalTransport(SharedMemoryTransport):
    """Sums each bucket in the memory of the ranks `inside` a host, and its shards over the ranks `between` hosts."""

    sends = True
    spins, longest_nap_seconds = 1, LONGEST_NAP_SECONDS  # a network is slower than memory: polling only takes a core

    def __init__(
        self,
        inside: dist.ProcessGroup,
        between: ProcessGroupTransport,
        *,
        names: Sequence[int],
        failure_store: FailureStore,
        timeout_seconds: float,
    ) -> None:
        """Take `names` as the ranks of this host in messages."""
        super().__init__(inside, failure_store=failure_store, timeout_seconds=timeout_seconds, preallocate=False)
        self.names, self.between = names, between

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        flats = super().allocate(sizes)
        # The group inside a host counts from 0, but errors name the ranks of the run.
        for peer, name in zip(self.peers, self.names, strict=True):
            peer.rank = name
        # Shards are exchanged in the shared memory itself, without a copy.
        self.between.flats = [bucket.sums for bucket in self.buckets if isinstance(bucket, HostBucket)]
        return flats

    def close(self) -> None:
        super().close()
        self.between.close()

    def make_bucket(self, number: int, flats: list[Tensor]) -> HostBucket:
        return HostBucket(number, flats, self.rank)

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        shared = self.buckets[bucket]
        assert isinstance(shared, HostBucket)
        shared.where, shared.exchange = where, None
        return super().start(bucket, where=where, timed=timed)

    def progress(self) -> None:
        """Start to exchange this rank's shards of filled buckets, in their order, and write those that have arrived."""
        buckets = [bucket for bucket in self.under_way if isinstance(bucket, HostBucket)]
        for bucket in buckets:
            if bucket.exchange is None:
                if not self.is_filled(bucket):
                    break  # shards that hosts exchange in different orders would be added up wrongly
                bucket.add_up()
                bucket.exchange = self.between.start(bucket.number, where=bucket.where)
        self.under_way = [bucket for bucket in buckets if not self._try_write(bucket)]

    def _try_write(self, bucket: HostBucket) -> bool:
        if bucket.exchange is None or not bucket.exchange.is_done():
            return False
        bucket.exchange.wait()  # it has ended: this raises its error, or copies a sum that was sent rounded
        bucket.write()
        self.raise_summed(bucket)
        return True


class HostBucket(SharedBucket):
    """One bucket on every rank of a host, and this rank's shard of it."""

    __slots__ = ("exchange", "shards", "sums", "where")

    where: str
    exchange: Work | None  # with other hosts

    def __init__(self, number: int, flats: list[Tensor], rank: int) -> None:
        super().__init__(number, flats[rank], [])
        self.shards = [shard_of(flat, rank, len(flats)) for flat in flats]
        self.sums = self.shards[0]  # in the bucket of the host's first rank; only this rank reads or writes this shard
        self.where, self.exchange = "", None

    def add_up(self) -> None:
        """Leave the sum of this rank's shard over the ranks of the host, in rank order, in `sums`."""
        with torch.no_grad():
            for other in self.shards[1:]:
                self.sums.add_(other)

    def write(self) -> None:
        """Copy `sums` to the buckets of all ranks of the host."""
        with torch.no_grad():
            for other in self.shards[1:]:
                other.copy_(self.sums)


def why_not_inside_hosts(hosts: HostLayout, group: dist.ProcessGroup) -> str | None:
    """Return None if the ranks are on one host, or on several with equal numbers of ranks above 1; else the reason."""
    if len(hosts.ranks) == 1:
        return None
    if len(hosts.ranks) == group.size():
        return "every rank is on a different host"
    if not hosts.is_even:
        return "hosts have unequal numbers of ranks"
    if group.size() != dist.get_world_size():  # new groups are made by all ranks
        return "the ranks of several hosts are a part of all ranks"
    return None


def open_host_groups(
    hosts: HostLayout, group: dist.ProcessGroup, *, own_groups: OwnGroups
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group of the ranks of this host, and that of the ranks at the same place of every host. Collective."""
    sets = hosts.ranks, hosts.columns(hosts.fewest_ranks)
    # Every rank makes all groups in this order, also those without it: torch hangs otherwise.
    inside, between = (own_groups.new_of_sets(rank_sets, group, backend="gloo") for rank_sets in sets)
    assert inside is not None and between is not None  # hosts are even: each rank is in one row and one column
    return inside, between
