"""How the events of a recorded step depend: which follow from the batch alone, which belong in one stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .costs import estimated_seconds
from .event_mode import GRADIENT
from .events import RETURN, Bond, Event, Value

CHEAP_SHARE = 0.01
"""What follows from the batch alone is computed by every stage if it takes less than this share of the step,"""
CHEAP_SECONDS = 1e-4
"""or less than this."""
_SHAPED_BY_VALUES = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere"}


def settle_locality(events: Sequence[Event], values: Sequence[Value]) -> None:
    """Mark the events and values that follow from the batch and constants alone, dear ones excepted."""
    dear = max(CHEAP_SHARE * sum(estimated_seconds(event.cost) for event in events), CHEAP_SECONDS)
    tainted: set[int] = set()
    while True:
        before = len(tainted)
        for event in events:
            made = {product.value for product in event.products}
            event.is_local = not (
                event.parameters
                or event.written_buffers
                or event.name == RETURN
                or (event.is_random and event.checkpoint is not None)  # draws after others of its stage
                or {*event.inputs, *made} & tainted
                or estimated_seconds(event.cost) > dear
            )
            if not event.is_local:
                tainted.update(made)
        if len(tainted) == before:
            break
    for index, value in enumerate(values):
        value.local = index not in tainted


def written_buffer_bonds(events: Sequence[Event]) -> Iterator[Bond]:
    """Yield a bond for each buffer that is written in place, around all events that use it."""
    for name in dict.fromkeys(name for event in events for name in event.written_buffers):
        users = [event for event in events if name in event.buffers + event.written_buffers]
        if users[0] is not users[-1]:
            reason = f"buffer '{name}' is written in place and used by {users[0]} and {users[-1]}"
            yield Bond(users[0].index, users[-1].index, reason)


def family_bonds(events: Sequence[Event], writes: Sequence[tuple[Sequence[int], int]]) -> Iterator[Bond]:
    """Yield bonds that keep views of one memory together, from the first of them to a write through one of them.

    `writes` are pairs of the values that share memory and the event that writes to it.
    """
    makers: dict[int, int] = {}
    for event in events:
        for product in event.products:
            makers.setdefault(product.value, event.index)
    for family, writer in writes:
        if not events[writer].is_local:
            first = min(makers.get(value, -1) for value in family)
            yield Bond(first, writer, f"{events[writer]} writes in place to memory that several tensors share")


def gradient_bonds(events: Sequence[Event]) -> Iterator[Bond]:
    """Yield bonds around what a call of `torch.autograd.grad` looks back at: from what it differentiates by to it."""
    for event in events:
        if event.name == GRADIENT and not event.is_unit:
            first = 0 if event.parameters else _first_touched(events[: event.index], event.inputs)
            reason = f"{event} differentiates by what {events[first]} is given, and looks back at all in between"
            yield Bond(first, event.index, reason)


def _first_touched(events: Sequence[Event], given: Sequence[int]) -> int:
    """Return the first event, not made by every stage for itself, that makes or uses what follows from values."""
    followers = set(given)
    touching = []
    for event in events:
        made = {product.value for product in event.products}
        if followers & {*event.inputs, *made}:
            if followers.intersection(event.inputs):
                followers |= made
            if not event.is_local:
                touching.append(event.index)
    return min(touching, default=len(events))


def checkpoint_bonds(events: Sequence[Event]) -> Iterator[Bond]:
    """Yield bonds around what a checkpoint runs again: it can do so only where everything in it was run."""
    calls: dict[int, list[Event]] = {}
    for event in events:
        if event.checkpoint is not None and not event.is_local:
            calls.setdefault(event.checkpoint, []).append(event)
    for first, *rest in calls.values():
        if rest:
            reason = f"one checkpoint runs {first} and {rest[-1]} again in backward"
            yield Bond(first.index, rest[-1].index, reason)


def note_replaced_buffers(events: Sequence[Event], replaced: Mapping[int, str]) -> None:
    """Count a buffer that was assigned a new tensor as written by the event that made it; `replaced` has the values."""
    for event in events:
        for product in event.products:
            if product.value in replaced:
                event.written_buffers += (replaced[product.value],)


def reading_modules(events: Sequence[Event]) -> set[str]:
    """Return the opened modules whose own code looks at elements of values that only one stage has."""
    return {
        event.path
        for event in events
        if event.path and not event.is_local and (event.reads or event.name in _SHAPED_BY_VALUES)
    }
