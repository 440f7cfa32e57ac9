"""Saving together: every process writes its shard, then the main one lists the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trainkit.checkpoints.entry import CheckpointEntry, CheckpointError
from trainkit.checkpoints.shards import Piece
from trainkit.checkpoints.store import CheckpointStore

T = TypeVar("T")


class Together(Protocol):
    """What is needed of the processes that save: a strategy's `comm` has it."""

    @property
    def process(self) -> int:
        """Which of them this one is; 0 is the main one."""

    def all_gather_object(self, value: T) -> list[T]:
        """Return what each process gave; collective."""

    def broadcast_object(self, value: T) -> T:
        """Return what the main process gave; collective."""


def save_together(
    store: CheckpointStore,
    payload: dict[str, Any],
    pieces: Sequence[Piece],
    *,
    together: Together,
    name: str,
    step: int,
    epoch: int,
    metrics: Mapping[str, float],
    reason: str,
    then: Callable[[CheckpointEntry], object] | None = None,
) -> CheckpointEntry:
    """Have the main process's payload and all processes' pieces on the disk and listed as one checkpoint; collective.

    `then` is called with the entry on the main process. Raises CheckpointError on every process if one of them failed;
    what was saved earlier is intact then.
    """
    from trainkit.checkpoints.shard_files import ShardWriting, agreed, or_failure  # which takes half a second to import

    with ExitStack() as stack:
        folder = shared_folder(store, name, stack=stack, together=together)
        writing = ShardWriting(folder, pieces, process=together.process, all_gather=together.all_gather_object)
        wrote = agreed(together.all_gather_object(or_failure(writing.write)))
        labels: dict[str, Any] = {"name": name, "step": step, "epoch": epoch, "metrics": metrics, "reason": reason}
        entry = on_main(together, lambda: store.list_shards(payload, folder, writing.finish(wrote), **labels))
    if then is not None:
        on_main(together, partial(_tell, then, entry))  # after the folder is let go, since it may prune
    return entry


def shared_folder(store: CheckpointStore, name: str, *, stack: ExitStack, together: Together) -> Path:
    """Return the folder for the shards of a checkpoint, which the main process holds as long as its stack; collective.

    Raises CheckpointError on every process if one of them does not see it.
    """
    folder = on_main(together, lambda: stack.enter_context(store.receiving_shards(name)))
    if not all(together.all_gather_object(folder.is_dir())):
        raise CheckpointError(
            f"sharded=true has every machine write into {folder.parent}, but not all of them see it; put the run's "
            "folder on a file system that they share (run_dir=PATH), or set callbacks.checkpoint.sharded=false."
        )
    return folder


def _tell(then: Callable[[CheckpointEntry], object], entry: CheckpointEntry) -> None:
    then(entry)


def on_main(together: Together, work: Callable[[], T]) -> T:
    """Return on every process what the main one's work returns, or raise there what it raises; collective."""
    told: tuple[Any, str | None] = (None, None)
    if together.process == 0:
        try:
            told = (work(), None)
        except Exception as error:
            told = (None, f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
    value, why = together.broadcast_object(told)
    if why is not None:
        raise CheckpointError(why)
    result: T = value
    return result
