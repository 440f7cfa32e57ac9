"""Tell the other ranks why this one stopped, and who waits where."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainkit.errors import FailedElsewhere

FAILURE_KEY = "failure"
WAITING_KEY = "waiting"
QUESTION_KEY = "where are you"
ANSWER_SECONDS = 3.0  # for which the answers to a question are waited for

GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
"""What errors say of a rank that is gone."""
_LOST = (*GONE, "Timed out waiting", "wait timeout")


class RankError(FailedElsewhere):
    """Another rank failed, died or did not come; the message names it."""


def timed_out(board: FailureBoard, *, where: str, seconds: float) -> RankError:
    """Return the error of a rank that has waited for too long: where, and where every rank is."""
    rank, who = board.rank, board.who_waits()
    return RankError(f"rank {rank} waited {seconds:.0f} s in {where}; who is where:\n{who}")


def is_lost(error: BaseException) -> bool:
    """Whether a collective broke because another rank is gone or did not come in time."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


class FailureBoard(Protocol):
    """A place that every rank can read: the first failure, and where each rank waits."""

    rank: int
    """Of whoever holds this view of the board."""

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
        self.is_answered = False  # whether a thread of each rank answers questions, see `whereabouts`
        self.store = PrefixStore(f"trainkit/{group.group_name}/{token}", _store_of(group))

    def publish(self, message: str) -> None:
        """Leave `message` as the root cause unless another rank has been first."""
        with suppress(dist.DistNetworkError):  # then nobody can be told
            if self.store.add(f"{FAILURE_KEY}/count", 1) == 1:
                self.store.set(FAILURE_KEY, message)

    def root_cause(self) -> str | None:
        """Return what the first failing rank published, or None while all is well."""
        try:
            return self._read(FAILURE_KEY)
        except dist.DistNetworkError:
            return "the process that kept the ranks' store, rank 0 or the one that started them, is gone"

    def note_waiting(self, where: str) -> None:
        """Leave word that this rank has been waiting at `where` for a while, or with "" that it no longer is."""
        self.store.set(f"{WAITING_KEY}/{self.rank}", where)

    def who_waits(self) -> str:
        """Return one line for each rank: where it waits, or what it does, or that it has not been seen waiting."""
        places = self._ask() if self.is_answered else {}
        lines = []
        for rank in range(self.world_size):
            where = self._read(f"{WAITING_KEY}/{rank}")
            if rank == self.rank or where:
                lines.append(f"  rank {rank}: waits" + (f" in {where}" if where else ""))
            else:
                lines.append(f"  rank {rank}: has not come" + (f"; it is in {places[rank]}" if rank in places else ""))
        return "\n".join(lines)

    def num_questions(self) -> int:
        """Return how often a rank has asked where the others are."""
        return self.store.add(QUESTION_KEY, 0)

    def answer(self, question: int, place: str) -> None:
        """Leave word where this rank is."""
        self.store.set(f"{QUESTION_KEY}/{question}/{self.rank}", place)

    def _ask(self) -> dict[int, str]:
        """Return where the ranks say that they are; those that do not say so in time are left out."""
        question = self.store.add(QUESTION_KEY, 1)
        places: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(places) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            for rank in set(range(self.world_size)) - set(places):
                # Another rank may have asked since: the answer to that is as good.
                for later in (question, question + 1):
                    place = self._read(f"{QUESTION_KEY}/{later}/{rank}")
                    if place is not None:
                        places[rank] = place
        return places

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
