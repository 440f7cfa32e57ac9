"""What of the reductions backward hides, in steps that somebody looks at."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from trainkit.overlap import Overlap

from .reducer import Reducer
from .timeline import Timeline


class OverlapWatch:
    """Listens to Reducers until it is closed, beside who listens to them already.

    Args:
        reducers: One for each phase of a task.
        timeline: An empty one, for what is heard.

    """

    def __init__(self, reducers: Collection[Reducer], timeline: Timeline) -> None:
        self._timeline = timeline
        self._before = [(reducer, reducer.after_step) for reducer in reducers]
        for reducer, listener in self._before:
            reducer.after_step = timeline.record if listener is None else partial(_both, listener, timeline.record)

    def close(self, steps: int) -> Overlap | None:
        """Leave the Reducers as they were, and return what was heard of `steps`; `None` for nothing that is known.

        On a CUDA device work goes on behind the clock of the CPU, which says nothing of it.
        """
        for reducer, listener in self._before:
            reducer.after_step = listener
        heard = [step for step in self._timeline.steps if step.step > 0]  # the first is reduced at its end only
        if not steps or not heard or self._before[0][0].device.type != "cpu":
            return None
        communication = sum(step.communication for step in heard) / steps
        hidden = sum(step.hidden for step in heard) / steps
        return Overlap(communication - hidden, communication, steps, note="behind backward, on this rank")


def _both(first: Callable[[Reducer], None], second: Callable[[Reducer], None], reducer: Reducer) -> None:
    first(reducer)
    second(reducer)
