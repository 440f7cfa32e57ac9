"""What one observed run of a step showed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from .events import Cost, Event, Recording


@dataclass(slots=True)
class ModuleCall:
    """What the calls of one module take together, and which modules its code calls."""

    cost: Cost = field(default_factory=Cost)
    num_calls: int = 0
    callees: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Observation:
    """A recording, with what is needed to choose other units: the module calls and what opening them would meet."""

    recording: Recording
    module_calls: dict[str, ModuleCall]
    opaque_units: set[str]
    """Units whose result holds objects that a later stage could not be given."""
    reading_modules: set[str]
    """Opened modules whose own code looks at elements of values that only one stage has."""
    reentrant: list[Event]
    """Calls inside a checkpoint with `use_reentrant=True`, which hides their gradients from the other stages."""
    made: list[weakref.ref[Tensor]]
    """What the step made, of which an attribute may keep something for the step of another phase."""
