"""What each stage of a partition must receive, send and execute: all that follows from the recording alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .events import Event, Held, Recording, Slot
from .structures import leaves


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value on its way from the stage that last wrote it to a stage that uses it."""

    value: int
    source: int
    destination: int
    differentiable: bool
    """Whether a gradient comes back."""


@dataclass(slots=True)
class Segment:
    """The consecutive events that one stage runs, and what it needs for them."""

    index: int
    start: int
    stop: int
    """The event after the last one."""
    rank: int
    is_last: bool
    executes: list[bool]
    """For each event before `stop`: its own, those that follow from the batch, and questions about received values."""
    receives: list[Transfer]
    sends: list[Transfer]
    cloned: frozenset[int]
    """Received values that its events write in place."""
    given: dict[int, list[int]]
    """For each of its events: the received values that are arguments of the call."""
    made_by: dict[int, tuple[int, list[tuple[int, int]]]]
    """For each of its events: how many tensors its result holds, and at which of these positions which values are."""


def segments(recording: Recording, bounds: Sequence[tuple[int, int]], ranks: Sequence[int]) -> list[Segment]:
    """Return the segments with these bounds, on these ranks."""
    last_written = [_last_writers(recording, start) for start, _ in bounds]
    found = []
    transfers: list[Transfer] = []
    for index, (start, stop) in enumerate(bounds):
        writers = last_written[index]
        own = recording.events[start:stop]
        asked = [event for event in recording.events[:start] if event.reads and not event.is_local]
        needed = dict.fromkeys(value for event in [*asked, *own] for value in event.inputs)
        receives = [
            Transfer(value, _segment_of(writers[value][0], bounds), index, writers[value][1])
            for value in needed
            if value in writers and not recording.values[value].local
        ]
        if recording.numbers is not None and any(
            event.has_numbers and not event.is_local for event in recording.events[:start]
        ):
            receives.append(Transfer(recording.numbers, index - 1, index, False))
        transfers += receives
        written = {value for event in own for value in event.written}
        found.append(
            Segment(
                index,
                start,
                stop,
                ranks[index],
                index == len(bounds) - 1,
                [
                    event.is_local or event.index >= start or (event.reads and not event.is_local)
                    for event in recording.events[:stop]
                ],
                receives,
                [],
                frozenset(transfer.value for transfer in receives if transfer.value in written),
                _given(own, {transfer.value for transfer in receives} - written),
                {event.index: _places(event.outputs) for event in own if not event.is_local},
            )
        )
    for transfer in transfers:
        found[transfer.source].sends.append(transfer)
    return found


def _given(events: Sequence[Event], received: set[int]) -> dict[int, list[int]]:
    found = {event.index: [value for value in event.inputs[: event.num_given] if value in received] for event in events}
    return {index: values for index, values in found.items() if values}


def _last_writers(recording: Recording, start: int) -> dict[int, tuple[int, bool]]:
    """Return for each value made before `start` the last event that wrote it and whether gradients flow back."""
    writers = {}
    for event in recording.events[:start]:
        for product in event.products:
            writers[product.value] = (event.index, product.requires_grad)
    return writers


def _segment_of(event: int, bounds: Sequence[tuple[int, int]]) -> int:
    return next(index for index, (start, stop) in enumerate(bounds) if start <= event < stop)


def _places(outputs: object) -> tuple[int, list[tuple[int, int]]]:
    slots = [leaf for leaf in leaves(outputs) if isinstance(leaf, (Slot, Held))]
    return len(slots), [(place, slot.value) for place, slot in enumerate(slots) if isinstance(slot, Slot)]
