"""The micro-batches of one optimizer step on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class MicroBatch:
    """What one device takes in one forward."""

    batch: Any
    """What the task's step is called with."""
    num_samples: int
    """Samples in it: its weight, unless the task returns another."""


@dataclass(slots=True)
class Window:
    """One rank's part of a global batch."""

    micro_batches: list[MicroBatch]
    """Empty on a rank that a short last batch leaves without samples."""
    num_samples: int
    """Samples of the whole global batch, over all ranks."""
    num_items: int
    """How far the global batch moves on in the epoch's order."""
    ends_epoch: bool
    """Whether this is the last window of its epoch."""
