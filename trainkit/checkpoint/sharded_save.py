"""Saving shards in the background: every process copies its pieces and goes on, and a thread of each writes them.

    main thread     copy  step  ask  step  ask: all have written  step  ask: listed
    every process         writes its shard .............
    main process                                          lists the checkpoint ....

Threads only write files. What has become of them the processes ask each other after each step while a save is going
on, on their main threads, so that all of them go on, raise, or are done after the same step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from trainkit.checkpoint.async_writer import CpuSnapshot
from trainkit.checkpoint.entry import CheckpointEntry, CheckpointError
from trainkit.checkpoint.shards import TensorShard
from trainkit.checkpoint.store import CheckpointStore

if TYPE_CHECKING:
    from trainkit.checkpoint.shard_files import ShardResult, ShardWriter


T = TypeVar("T")


class SaveGroup(Protocol):
    """What is needed of the processes that save: a strategy's `comm` has it."""

    @property
    def process(self) -> int:
        """Which of them this one is; 0 is the main one."""

    def all_gather_object(self, value: T) -> list[T]:
        """Return what each process gave; collective."""

    def broadcast_object(self, value: T) -> T:
        """Return what the main process gave; collective."""


def save_sharded(
    store: CheckpointStore,
    payload: dict[str, Any],
    pieces: Sequence[TensorShard],
    *,
    together: SaveGroup,
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
    from trainkit.checkpoint.shard_files import (  # which takes half a second to import
        ShardWriter,
        capture_error,
        check_all_ranks,
    )

    with ExitStack() as stack:
        folder = shared_folder(store, name, stack=stack, together=together)
        writing = ShardWriter(folder, pieces, process=together.process, all_gather=together.all_gather_object)
        wrote = check_all_ranks(together.all_gather_object(capture_error(writing.write)))
        labels: dict[str, Any] = {"name": name, "step": step, "epoch": epoch, "metrics": metrics, "reason": reason}
        entry = on_main(together, lambda: store.list_shards(payload, folder, writing.finish(wrote), **labels))
    if then is not None:
        on_main(together, partial(_tell, then, entry))  # after the folder is let go, since it may prune
    return entry


def shared_folder(store: CheckpointStore, name: str, *, stack: ExitStack, together: SaveGroup) -> Path:
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


def on_main(together: SaveGroup, work: Callable[[], T]) -> T:
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


logger = logging.getLogger(__name__)


class Status(NamedTuple):
    """How far one process is with a save."""

    phase: Literal["writing", "written", "listing", "listed"] = "writing"
    why: str | None = None
    """Why it failed."""


class ShardedWriter:
    """Saves a payload with every process's pieces into a store, one checkpoint at a time."""

    def __init__(self, store: CheckpointStore, together: SaveGroup) -> None:
        self._store = store
        self._together = together
        self._payload_copy, self._pieces_copy = CpuSnapshot(), CpuSnapshot()
        self._thread: threading.Thread | None = None
        self._saving: _Saving | None = None  # the same on every process
        self._status = Status()
        self._wrote: ShardResult | None = None

    def prepare(self, pieces: Sequence[TensorShard]) -> None:
        """Have memory ready for copies of pieces like these; a second thread touches it."""
        self._start(self._pieces_copy.reserve(_by_place(pieces)), "checkpoint-memory")

    def save(
        self,
        payload: dict[str, Any],
        pieces: Sequence[TensorShard],
        *,
        then: Callable[[CheckpointEntry], object] | None = None,
        **labels: Any,
    ) -> None:
        """Have the main process's payload and all processes' pieces on their way to the disk; collective.

        Waits for the save before it, if that is still going on. `then` is called with the entry in the background
        thread of the main process; its errors are the save's.
        """
        from trainkit.checkpoint.shard_files import ShardWriter  # which takes half a second to import

        self.finish()
        self._join()
        together = self._together
        copied = self._pieces_copy.take(_by_place(pieces))
        copies = [replace(piece, elements=copied[_place(piece)]) for piece in pieces]
        kept = self._payload_copy.take(payload) if together.process == 0 else {}
        with ExitStack() as stack:
            folder = shared_folder(self._store, labels["name"], stack=stack, together=together)
            writing = ShardWriter(folder, copies, process=together.process, all_gather=together.all_gather_object)
            self._saving = _Saving(self._store, writing, kept, labels, folder, stack.pop_all(), then)
        self._status = Status()
        self._start(self._write, f"checkpoint-{labels['name']}")

    def check(self) -> bool:
        """Return whether a save has just become complete, or raise why it failed; collective while one is going on."""
        return self._saving is not None and self._ask()

    def finish(self) -> bool:
        """Wait for a save that is going on, and return whether there was one, or raise why it failed; collective."""
        while self._saving is not None:
            self._join()
            if self._ask():
                return True
        return False

    def close(self) -> None:
        """Give up a save that is going on: the run fails, and other processes may be gone. Not collective."""
        saving, self._saving = self._saving, None
        self._join()
        if saving is not None:
            saving.give_up("the run ended before")
        self._payload_copy, self._pieces_copy = CpuSnapshot(), CpuSnapshot()

    def _ask(self) -> bool:
        """Return whether the save is complete; raises CheckpointError on every process if one of them failed."""
        told: list[Status] = self._together.all_gather_object(self._status)
        failed = next((process for process, status in enumerate(told) if status.why is not None), None)
        if failed is not None:
            self._fail(f"{told[failed].why}")
        if any(status.phase == "writing" for status in told):
            return False
        if told[0].phase == "listed":
            self._saving = None
            self._join()
            return True
        if told[0].phase == "written":
            self._begin_listing([part for part in self._together.all_gather_object(self._wrote) if part is not None])
        return False

    def _begin_listing(self, wrote: list[ShardResult]) -> None:
        self._wrote = None
        if self._together.process == 0:
            self._join()
            self._status = Status("listing")
            self._start(lambda: self._list(wrote), "checkpoint-listing")

    def _fail(self, why: str) -> None:
        """Leave nothing of the save on any process, and raise."""
        saving, self._saving = self._saving, None
        self._join()
        self._together.all_gather_object(None)  # nobody writes any more into what is removed now
        assert saving is not None
        saving.give_up(why)
        raise CheckpointError(why)

    def _write(self) -> None:
        assert self._saving is not None
        try:
            self._wrote = self._saving.writing.write()
            self._status = Status("written")
        except BaseException as error:
            process = self._together.process
            why = f"process {process} could not write its shard: {type(error).__name__}: {error}"
            logger.error("checkpoint '%s' was not saved: %s", self._saving.labels["name"], why)
            self._status = Status(why=f"{why}. Earlier checkpoints are intact.")

    def _list(self, wrote: list[ShardResult]) -> None:
        assert self._saving is not None
        try:
            self._saving.list(wrote)
            self._status = Status("listed")
        except BaseException as error:
            why = f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            logger.error("checkpoint '%s' was not saved: %s", self._saving.labels["name"], why)
            self._status = Status(why=why)

    def _start(self, work: Callable[[], None], name: str) -> None:
        # Not a daemon: the interpreter waits for what is being written when it ends.
        self._thread = threading.Thread(target=work, name=name)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class _Saving(NamedTuple):
    """One save that is going on."""

    store: CheckpointStore
    writing: ShardWriter
    payload: dict[str, Any]
    labels: dict[str, Any]
    folder: Any
    held: ExitStack
    """Holds the folder against other writers, on the main process."""
    then: Callable[[CheckpointEntry], object] | None

    def list(self, wrote: list[ShardResult]) -> None:
        """Have the checkpoint listed, let the folder go, and tell of it."""
        with self.held:
            files = self.writing.finish(wrote)
            entry = self.store.list_shards(self.payload, self.folder, files, **self.labels)
        if self.then is not None:
            self.then(entry)  # after the folder is let go, since it may prune

    def give_up(self, why: str) -> None:
        """Let the folder go, and remove what is in it."""
        error = CheckpointError(why)
        try:
            with self.held:
                raise error
        except CheckpointError as raised:
            if raised is not error:
                logger.error("%s", raised)


def _by_place(pieces: Sequence[TensorShard]) -> dict[str, Any]:
    return {_place(piece): piece.elements for piece in pieces}


def _place(piece: TensorShard) -> str:
    return f"{piece.name} from {piece.start}"
