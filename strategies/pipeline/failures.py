"""Failures that reach every rank of a pipeline with their cause, in place of a broken connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ..ddp.failure import RankError, StoreBoard


class Failures:
    """Tells the ranks of one process group why one of them stopped."""

    def __init__(self, group: dist.ProcessGroup, *, name: str):
        self._board = StoreBoard(group, token="pipeline")
        self._name = name

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell the others of an error in the block; one that only follows from theirs is raised with their cause."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            cause = self._board.root_cause()
            if cause is not None and isinstance(error, RuntimeError):
                raise RankError(f"{_first_line(error)}\nbecause {cause}") from None
            self.tell(f"{type(error).__name__}: {error}")
            raise

    def tell(self, why: str) -> None:
        """Let the other ranks know why this one stops, unless one has told before."""
        self._board.publish(f"{self._name} stopped: {why}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
