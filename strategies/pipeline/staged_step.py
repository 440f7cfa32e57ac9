"""A step of the task, cut into segments."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Recording
from .replay import Player, Shapes
from .segments import Segment
from .structures import Signature


@dataclass(slots=True)
class StagedStep:
    """One step of the task, cut into segments, and the shapes that its values have for each kind of batch."""

    player: Player
    segments: list[Segment]
    shapes: dict[tuple[int, Signature], Shapes] = field(default_factory=dict)
    """By segment and batch; filled as batches of new shapes come."""

    @classmethod
    def of(cls, player: Player, segments: list[Segment], recorded: Signature) -> StagedStep:
        """Return the step with the shapes of the batch that was recorded."""
        known: Shapes = [value.shape for value in player.recording.values]
        return cls(player, segments, {(segment.index, recorded): known for segment in segments})

    @property
    def recording(self) -> Recording:
        """What was recorded of the step."""
        return self.player.recording
