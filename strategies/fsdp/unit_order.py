"""UnitOrder: every rank gathers the same units, and reduces gradients of the same size, in the same order."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Sequence

from trainkit.distributed.collectives import ProcessGroupCollectives
from trainkit.errors import UserError

_SEVERAL = -1
"""In place of the next event: several are known."""
_MAX_KNOWN = 100_000
"""Beginnings of steps that are remembered."""
_POLL_SECONDS = 0.02  # new events are rare, so a short wait for each costs little, and spares the store


class UnitOrder:
    """Raises UserError before a rank enters another collective of a step than the other ranks, which would mix values.

        all ranks    a b  as in former steps     nothing is sent
        all ranks    a c  for the first time     each finds all others at c, and goes on
        rank 1       a c                         finds rank 0 waiting in b, and raises

    Ranks compare each event that is new, or one of several that have followed the same beginning. An event that is not
    the only known one is announced in the store of the ranks: those that follow the known order wait in its collective,
    so that only the threads that answer questions can tell where they are.

    Args:
        names: The units.
        comm: All ranks, more than one.
        max_over_ranks: Returns the largest value of any rank for each of a list of numbers; collective.

    """

    def __init__(
        self,
        names: Sequence[str],
        comm: ProcessGroupCollectives,
        max_over_ranks: Callable[[list[int]], list[int]],
    ) -> None:
        self._names, self._comm, self._max_over_ranks = names, comm, max_over_ranks
        self._next: dict[int, int] = {}  # by the digest of the events before
        self._digest = 0
        self._place = 0, 0  # number and event; read by the thread that answers questions

    def begin(self, step_name: str) -> None:
        """Begin a step of the task; its order is compared with former ones by the same method."""
        self._digest = zlib.crc32(step_name.encode())

    def forward(self, unit: int) -> None:
        """Note that a unit is about to be gathered for its forward."""
        self._note(unit)

    def backward(self, unit: int) -> None:
        """Note that a unit is about to be gathered for its backward."""
        self._note(len(self._names) + unit)

    def end(self) -> None:
        """Note the end of a forward or backward."""
        self._note(2 * len(self._names))

    def reduce(self, num_elements: int) -> None:
        """Note that gradients are about to be reduced."""
        self._note(2 * len(self._names) + 1 + num_elements)

    def place(self) -> str:
        """Return where this rank is, for other ranks."""
        number, event = self._place
        return f"collective {number} is {self._text(event)}"

    def _note(self, event: int) -> None:
        # One assignment of a tuple: the other thread must not read the number of one event with the text of another.
        self._place = self._place[0] + 1, event
        expected = self._next.get(self._digest)
        if expected != event:
            # Ranks with the same past have the same `expected`, so all of them enter this collective together.
            if expected is None or expected == _SEVERAL:
                largest, smallest = self._max_over_ranks([event, -event])
                if largest != -smallest:
                    raise self._refusal(event, largest if event == -smallest else -smallest)
            else:  # no collective: a rank at the known event does not take part
                self._announce(event)
            self._next[self._digest] = event if expected is None else _SEVERAL
            if len(self._next) > _MAX_KNOWN:  # on all ranks at once
                self._next.clear()
        self._digest = hash((self._digest, event))  # of numbers: the same in every process

    def _announce(self, event: int) -> None:
        """Wait until all ranks announce this event; raise UserError if a rank is at another one."""
        failures, number = self._comm.failure_store, self._place[0]
        assert failures is not None
        start = asked = time.monotonic()
        # Numbers never repeat, so no answer is taken for that of another event.
        keys = [f"order/{number}/{rank}" for rank in range(self._comm.world_size)]
        failures.store.set(keys[self._comm.rank], str(event))
        while not failures.store.check(keys):
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - asked < 1.0:  # the question wakes a thread of each rank
                continue
            positions = [re.search(r"collective (\d+) is ([^,]*)", answer) for answer in failures.positions().values()]
            for position in positions if not failures.store.check(keys) else ():  # or a rank may have gone on
                if position is not None and (
                    int(position[1]) > number or (int(position[1]) == number and position[2] != self._text(event))
                ):
                    raise self._refusal(event, position[2])
            asked = time.monotonic()
            failures.check(where=self._text(event), waited=asked - start, timeout_seconds=self._comm.timeout_seconds)
        # Every rank reads all events, so that all raise or none.
        announced = [int(failures.store.get(key)) for key in keys]
        for other_event in announced:
            if other_event != event:
                raise self._refusal(event, other_event)

    def _text(self, event: int) -> str:
        count = len(self._names)
        if event < count:
            return f"the forward of {self._names[event]}"
        if event < 2 * count:
            return f"the backward of {self._names[event - count]}"
        return "the end" if event == 2 * count else f"the reduction of {event - 2 * count - 1} elements of gradients"

    def _refusal(self, event: int, other: int | str) -> UserError:
        elsewhere = other if isinstance(other, str) else self._text(other)
        return UserError(
            f"ranks ran different units under strategy=fsdp: rank {self._comm.rank} is at {self._text(event)}, where "
            f"another rank is at {elsewhere}. Every rank must run the same modules in the same order, and its loss "
            "must depend on the same parameters; otherwise set strategy=ddp."
        )
