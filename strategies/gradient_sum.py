"""GradientSum: how a strategy of several processes sums the gradients of a step over its ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.profiling import Overlap

NO_CONTEXT = nullcontext()  # without a state, so one serves all steps


class GradientSum(ABC):
    """Leaves in every `.grad` the sum over ranks, once in a step."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which a backward adds to this rank's gradients only."""
        return NO_CONTEXT

    @abstractmethod
    def session(self) -> AbstractContextManager[Any]:
        """Return the context of a step's last backward, at whose end gradients are summed. Collective."""

    def reduce_zeros(self) -> None:
        """Take part in the sum of the ranks that have samples, with zeros or what is accumulated. Collective."""
        with self.session():
            pass

    def finish(self) -> None:
        """Gather what all ranks report at the end of training. Collective."""

    def fail(self, message: str) -> None:
        """Tell ranks that wait for this one why it stops, if there is a faster way than the failure store."""

    def close(self) -> None:
        """Release what the sums need; may be called twice."""

    # ---- Profiles

    @property
    def waited_seconds(self) -> float | None:
        """Seconds for which this rank has waited for sums after backward; `None` if unknown."""
        return None

    def start_overlap_profile(self) -> None:
        """Start to measure how much of the sums backward hides."""

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Stop measuring and return the means over `steps`; `None` if unknown."""
        return None


class SumAfterBackward(GradientSum):
    """Sums by one call of `reduce`, which is collective, once a step's last backward has ended."""

    def __init__(self, reduce: Callable[[], None]) -> None:
        self._reduce = reduce

    @contextmanager
    def session(self) -> Iterator[None]:
        yield
        self._reduce()
