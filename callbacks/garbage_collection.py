"""Garbage collection on all ranks after the same steps."""

from __future__ import annotations

import gc
from typing import Annotated

from annotated_types import Ge, Le, Unit

from trainkit.callback import Callback
from trainkit.run import Run
from trainkit.settings import check_arguments


class GarbageCollection(Callback):
    """Runs Python's garbage collector at regular steps on all ranks, and disables automatic collection.

    Without it ranks collect at different times, and the others wait each time. Objects that exist when training starts
    (modules, datasets) are frozen: they are not scanned until training ends.

    Args:
        every: Steps between collections.
        generation: Oldest generation to collect: 0 (the newest objects), 1, or 2 (all that are not frozen).

    """

    def __init__(
        self, *, every: Annotated[int, Ge(1), Unit("steps")] = 1000, generation: Annotated[int, Ge(0), Le(2)] = 1
    ) -> None:
        check_arguments(GarbageCollection.__init__, locals(), of="garbage_collection")
        self.every = every
        self.generation = generation
        self._was_enabled: bool | None = None

    def on_fit_start(self, run: Run) -> None:
        if self._was_enabled is None:
            self._was_enabled = gc.isenabled()
        # Collected first, or garbage would be frozen with the rest and kept until training ends.
        gc.collect()
        gc.freeze()
        gc.disable()

    # By the step, so that all ranks collect at the same time and wait once.
    def on_step_end(self, run: Run) -> None:
        if run.state.step % self.every == 0:
            gc.collect(self.generation)

    def close(self) -> None:
        if self._was_enabled is not None:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
            self._was_enabled = None
