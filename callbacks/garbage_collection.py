"""Python's garbage collector, at points where all ranks stop for it together."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from trainkit.callback import Callback
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.loops.run import Run


class GarbageCollection(Callback):
    """Collects every so many steps on all ranks at once, instead of whenever each of them happens to.

    A rank that collects lets the others wait, and they do not collect at the same time. What is there when training
    begins (modules, datasets) is frozen: it is never looked at again until the end.

    Args:
        every: Steps from one collection to the next.
        generation: Which objects are looked at: 0 the newest, 1, or 2 all that are not frozen.

    """

    def __init__(self, *, every: int = 1000, generation: int = 1) -> None:
        if isinstance(every, bool) or every < 1:
            raise UserError(f"garbage_collection.every must be at least 1 step, got {every}.")
        if generation not in (0, 1, 2):
            raise UserError(f"garbage_collection.generation must be 0, 1 or 2, got {generation}.")
        self.every = every
        self.generation = generation
        self._was_enabled: bool | None = None

    def on_fit_start(self, run: Run) -> None:
        if self._was_enabled is None:
            self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def on_step_end(self, run: Run) -> None:
        if run.state.step % self.every == 0:
            gc.collect(self.generation)

    def close(self) -> None:
        if self._was_enabled is not None:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
            self._was_enabled = None
