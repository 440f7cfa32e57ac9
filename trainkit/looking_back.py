"""Naming what was not finite first, in a step that was made some time ago."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainkit.nonfinite import GoBack, nonfinite_state
from trainkit.phases import Phases
from trainkit.run import Run
from trainkit.step_replay import Call, StepReplay, in_words
from trainkit.strategy import Strategy
from trainkit.way_back import WayBack
from trainkit.window import Window

T = TypeVar("T")

_PATIENCE_SECONDS = 60.0
"""How long training may be repeated to see a step again that a run will fail of anyway."""


class LookingBack:
    """Looks at weights and steps of a run, on all ranks together."""

    def __init__(self, run: Run, way_back: WayBack) -> None:
        self.replay = StepReplay(run)
        self.make_step: Callable[[Window], object] = _not_given
        """Makes a step of training and counts it; the loop gives it."""
        self._run = run
        self._way_back = way_back

    def not_finite(self) -> str | None:
        """Return the name of a parameter or buffer here that is to be finite and is not; waits for the device."""
        never_finite = self._way_back.never_finite
        return next((name for name in nonfinite_state(self._run.task) if name not in never_finite), None)

    def look_at(self, window: Window, step: int, said: str) -> str:
        """Return in words what is not finite first in a step, computed as it was then; collective.

        Raises GoBack if its parameters were not finite before it, so that the step before is to blame.
        """
        run, replay = self._run, self.replay
        blamed = first_of(run.strategy, self.not_finite())
        if blamed is not None:
            raise GoBack(step - 1, f"{said}, since step {step - 1} left {blamed} not finite")
        if not replay.sees_modules:
            return ""
        optimization = run.optimizations[0]
        if optimization.phase:
            found = replay.look_at_phases(Phases(run, run.optimizations).train, window)
        else:
            found = replay.look(optimization, [Call(window, optimization.step_name)], instead=True)
        words = in_words(run.strategy.comm.all_gather_object(found)) or "computed again, it is finite"
        return f" {words[0].upper()}{words[1:]}."

    def see_again(self, step: int) -> str:
        """Return in words what was not finite first in a step that a run fails of, where that is quick; collective."""
        state, strategy = self._run.state, self._run.strategy
        checkpoint = self._way_back.checkpoint_before(step)
        if checkpoint is None:
            blamed = first_of(strategy, self.not_finite())
            return "" if blamed is None else f" By now {blamed} is not finite."
        seconds = (step - checkpoint[0]) * state.own_seconds / max(state.step, 1)
        if not strategy.comm.broadcast_object(seconds < _PATIENCE_SECONDS):
            return ""
        self._way_back.restore(checkpoint)
        feed = self._run.feed
        assert feed is not None
        try:
            before = -1
            while state.step != before:  # or there is nothing to read any more
                before = state.step
                for window in strategy.step_batches(
                    feed.windows(state.epoch, state.position), pin_memory=feed.source.pin_memory
                ):
                    if state.step + 1 == step:
                        return self.look_at(window, step, "")
                    self.make_step(window)
        except GoBack as found:
            return f" The reason lies before it{found.place}."
        return ""


def first_of(strategy: Strategy, found: T | None) -> T | None:
    """Return what the first rank has found that found anything; collective."""
    return next((other for other in strategy.comm.all_gather_object(found) if other is not None), None)


def _not_given(window: Window) -> None:
    raise AssertionError("no loop has said how it makes a step")
