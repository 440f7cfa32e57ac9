"""How a task was cut, in a form that a checkpoint keeps: a resumed run is cut the same way, and so equal to the bit."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .events import Recording
from .partition import Partition


@dataclass(frozen=True, slots=True)
class Choice:
    """The units and cuts of a step. Both follow from measured times, and random numbers from the units."""

    wish: str
    """What the user asked for: with another wish, another number of stages say, a run is cut anew."""
    units: tuple[str, ...]
    cuts: tuple[int, ...]
    digest: int
    """Of all events: a step that makes other calls is cut anew."""

    @classmethod
    def of(cls, wish: str, recording: Recording, partition: Partition) -> Choice:
        """Return what was chosen."""
        units = sorted({event.name for event in recording.events if event.is_unit})
        return cls(wish, tuple(units), partition.cuts, _digest(recording))

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> Choice:
        """Return the choice that `saved` describes."""
        return cls(saved["wish"], tuple(saved["units"]), tuple(saved["cuts"]), saved["digest"])

    def saved(self) -> dict[str, Any]:
        """Return the choice as plain values."""
        return asdict(self)

    def fits(self, recording: Recording) -> bool:
        """Return whether a recording has the events that were cut."""
        return _digest(recording) == self.digest


def _digest(recording: Recording) -> int:
    return zlib.crc32("\n".join(f"{event.name} {event.is_unit}" for event in recording.events).encode())
