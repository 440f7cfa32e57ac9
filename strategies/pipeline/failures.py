"""Failures that reach every rank of a pipeline with their cause, in place of a broken connection."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainkit.distributed.failure_store import FailureStore, RankError, is_lost

logger = logging.getLogger(__name__)


class Failures:
    """Tells the ranks that share a board why one of them stopped.

    Args:
        board: Where all ranks look.
        name: What to call this rank.
        step: Tells which step this rank is in.

    """

    def __init__(self, board: FailureStore, *, name: str, step: Callable[[], int]):
        self._board = board
        self._name = name
        self._step = step
        self._told: BaseException | None = None

    @contextmanager
    def told(self, where: str = "") -> Iterator[None]:
        """Tell the others of an error in the block; one that only follows from theirs is raised with their cause."""
        try:
            yield
        except Exception as error:
            self.explain(error, where=where)
            raise

    def explain(self, error: Exception, *, where: str = "") -> None:
        """Tell the others of an error, and where it was; raises RankError for one that only follows from theirs."""
        if error is self._told or isinstance(error, RankError):
            return
        if isinstance(error, RuntimeError):
            self._explain_by_others(error)
        self._told = error
        self.tell(f"{type(error).__name__}: {error}", where=where)
        if where:
            _note(error, f"{self._name}, {where}")

    def tell(self, why: str, *, where: str = "") -> None:
        """Let the other ranks know why this one stops, unless one has told before."""
        place = f", {where}" if where else ""
        self._board.publish(f"{self._name} stopped in step {self._step()}{place}: {why}")

    def _explain_by_others(self, error: RuntimeError) -> None:
        first_line = str(error).partition("\n")[0]
        cause = self._board.root_cause()
        if cause is not None:
            raise RankError(f"{first_line}\nbecause {cause}") from None
        if is_lost(error) and "imed out" in str(error):
            self._board.publish(f"{self._name}, in step {self._step()}: {first_line}")
            raise RankError(f"{first_line}\nwho is where:\n{self._board.who_waits()}") from None


def _note(error: Exception, place: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(place)
    else:
        logger.error("%s: %s", place, error)
