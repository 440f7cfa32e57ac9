"""Meeting in a store in which the ranks of an earlier attempt have left their addresses.

Under torchrun a store outlives its ranks: after a restart new ranks would find the addresses of dead ones.

    rank r    writes who it is            reads the answer to it        acknowledges
    rank 0    reads who is there, answers the name of the attempt, again and again, until all have acknowledged

What a dead rank wrote is answered too, but nobody reads that answer.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # torch exports them at run time

from trainkit.distributed.failure_store import RankError

POLL_SECONDS = 0.02


def fresh_store(store: Store, *, rank: int, world_size: int, limit: timedelta) -> Store:
    """Return a view of the store that holds nothing of earlier attempts; collective."""
    meeting = PrefixStore("trainkit/meeting", store)
    deadline = time.monotonic() + limit.total_seconds()
    name = secrets.token_hex(8)
    if rank == 0:
        _gather(meeting, name, world_size, deadline)
    else:
        name = _join(meeting, name, rank, deadline)
    return PrefixStore(f"trainkit/attempt_{name}", store)


def _gather(meeting: Store, attempt: str, world_size: int, deadline: float) -> None:
    missing = set(range(1, world_size))
    answered: set[bytes] = set()
    while missing:
        for rank in sorted(missing):
            if meeting.check([f"{attempt}/{rank}"]):
                missing.discard(rank)
            elif meeting.check([f"rank_{rank}"]):
                who = meeting.get(f"rank_{rank}")
                if who not in answered:
                    answered.add(who)
                    meeting.set(who.decode(), attempt)
        _wait(deadline, bool(missing), f"ranks {sorted(missing)} did not come")


def _join(meeting: Store, who: str, rank: int, deadline: float) -> str:
    meeting.set(f"rank_{rank}", who)
    while not meeting.check([who]):
        _wait(deadline, True, "rank 0 did not come")
    attempt = meeting.get(who).decode()
    meeting.set(f"{attempt}/{rank}", "here")
    return attempt


def _wait(deadline: float, waiting: bool, why: str) -> None:
    if waiting and time.monotonic() > deadline:
        raise RankError(f"the ranks could not meet: {why} in time.")
    if waiting:
        time.sleep(POLL_SECONDS)
