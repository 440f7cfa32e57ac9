"""Tell the other ranks why this one stopped, and who waits where."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

FAILURE_KEY = "failure"
WAITING_KEY = "waiting"


class RankError(RuntimeError):
    """Another rank failed, died or did not come; the message names it."""


class FailureBoard(Protocol):
    """A place that every rank can read: the first failure, and where each rank waits."""

    def publish(self, message: str) -> None:
        """Leave `message` as the root cause unless another rank has been first."""

    def root_cause(self) -> str | None:
        """Return what the first failing rank published, or None while all is well."""

    def note_waiting(self, where: str) -> None:
        """Leave word that this rank has been waiting at `where` for a while, or with "" that it no longer is."""

    def who_waits(self) -> str:
        """Return one line for each rank: where it waits, or that it has not been seen waiting."""


class StoreBoard:
    """A board in the key-value store of a process group; it works while collectives hang."""

    def __init__(self, group: dist.ProcessGroup, *, token: str) -> None:
        """Open the board that all ranks with the same `token` share."""
        self.rank, self.world_size = group.rank(), group.size()
        self.store = PrefixStore(f"trainkit/{group.group_name}/{token}", _store_of(group))

    def publish(self, message: str) -> None:
        """Leave `message` as the root cause unless another rank has been first."""
        if self.store.add(f"{FAILURE_KEY}/count", 1) == 1:
            self.store.set(FAILURE_KEY, message)

    def root_cause(self) -> str | None:
        """Return what the first failing rank published, or None while all is well."""
        return self._read(FAILURE_KEY)

    def note_waiting(self, where: str) -> None:
        """Leave word that this rank has been waiting at `where` for a while, or with "" that it no longer is."""
        self.store.set(f"{WAITING_KEY}/{self.rank}", where)

    def who_waits(self) -> str:
        """Return one line for each rank: where it waits, or that it has not been seen waiting."""
        lines = []
        for rank in range(self.world_size):
            where = self._read(f"{WAITING_KEY}/{rank}")
            lines.append(f"  rank {rank}: {f'waits in {where}' if where else 'has not come'}")
        return "\n".join(lines)

    def _read(self, key: str) -> str | None:
        if not self.store.check([key]):
            return None
        return self.store.get(key).decode()


def _store_of(group: dist.ProcessGroup) -> Store:
    read = getattr(group, "get_group_store", None)  # torch >= 2.9
    store = read() if read is not None else dist.distributed_c10d._get_default_store()
    assert isinstance(store, Store)
    # A store of its own connection: reading must not wait behind a collective that blocks the shared one.
    clone = getattr(store, "clone", None)
    store = clone() if clone is not None else store
    assert isinstance(store, Store)
    store.set_timeout(timedelta(seconds=10))
    return store
