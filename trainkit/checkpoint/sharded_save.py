"""Save sharded state: each process writes its shards, at once or in a background thread.

    main thread     copy  step  poll  step  poll: all have written  step  poll: listed
    every process         writes its shards ............
    main process                                          lists the checkpoint ....

Threads only write files. Processes exchange their status after each step of a background save, on their main threads,
so that all of them continue, raise, or are done after the same step. Import this module when it is needed: it takes
half a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from trainkit.checkpoint.async_writer import CpuSnapshot
from trainkit.checkpoint.serialization import Labels
from trainkit.checkpoint.shard_files import (
    ShardResult,
    ShardWriter,
    capture_error,
    check_all_ranks,
    error_text,
    shard_error,
)
from trainkit.checkpoint.sharded_state import TensorShard
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore, Keep, OnSaved
from trainkit.distributed.collectives import Collectives
from trainkit.errors import CheckpointError
from trainkit.files import start_thread

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")

logger = logging.getLogger(__name__)


def save_sharded(
    store: CheckpointStore,
    payload: dict[str, Any],
    shards: Sequence[TensorShard],
    *,
    comm: Collectives,
    keep: Keep | None = None,
    then: OnSaved | None = None,
    **labels: Unpack[Labels],
) -> CheckpointEntry:
    """Save the main process's payload and all processes' shards as one checkpoint, and return its entry; collective.

    Raises CheckpointError on every process if one of them failed; earlier checkpoints are intact then.

    Args:
        store: Where the checkpoint is listed.
        payload: The main process's payload, with placeholders for sharded tensors.
        shards: The shards of this process.
        comm: The processes that save.
        keep: Chooses, on the main process, the checkpoints that stay.
        then: Called with the entry on the main process.
        labels: The metadata to list.

    """
    save = _Save(store, payload, shards, comm=comm, keep=keep, then=then, labels=labels)
    with save.folder_lock:
        # Gathered before the listing: the manifest must not name shards that are not on the disk yet.
        results = check_all_ranks(comm, save.writer.write)
        return _on_main(comm, lambda: save.register(results))


class ShardedWriter:
    """Saves a payload and every process's shards from background threads, one checkpoint at a time."""

    def __init__(self, store: CheckpointStore, comm: Collectives) -> None:
        self._store = store
        self._comm = comm
        self._payload_snapshot, self._shard_snapshot = CpuSnapshot(), CpuSnapshot()
        self._work: Future[None] | None = None  # the thread that is writing, listing or touching memory
        self._save: _Save | None = None  # set on every process or on none
        # Set by the thread and read by the main thread: replaced as a whole, so that a reader sees one or the other.
        self._status = _Status("writing")

    def prepare(self, shards: Sequence[TensorShard]) -> None:
        """Allocate memory for copies of shards like these; a background thread touches it."""
        touch = self._shard_snapshot.reserve({shard.place: shard.elements for shard in shards})
        self._work = start_thread(touch, name="checkpoint-memory")

    def save(
        self,
        payload: dict[str, Any],
        shards: Sequence[TensorShard],
        *,
        keep: Keep | None = None,
        then: OnSaved | None = None,
        **labels: Unpack[Labels],
    ) -> None:
        """Copy the payload and the shards and save the copies in the background; collective.

        Waits for an earlier save. `keep` and `then` are called in the main process's background thread; their errors
        are the save's.
        """
        # The earlier save first: its thread reads the copies whose memory is used again here.
        self.finish()
        self._join()
        elements = self._shard_snapshot.take({shard.place: shard.elements for shard in shards})
        copies = [replace(shard, elements=elements[shard.place]) for shard in shards]
        copied = self._payload_snapshot.take(payload) if self._comm.is_main else {}
        self._save = _Save(self._store, copied, copies, comm=self._comm, keep=keep, then=then, labels=labels)
        self._status = _Status("writing")
        self._work = start_thread(self._write, name=f"checkpoint-{labels['name']}")

    def check(self) -> bool:
        """Return True if a save has just become complete; raises its error. Collective during a save."""
        return self._save is not None and self._poll()

    def finish(self) -> bool:
        """Wait for a save; return True if there was one, or raise its error. Collective."""
        # Each turn is one collective of all ranks, on which they move on together.
        while self._save is not None:
            self._join()
            if self._poll():
                return True
        return False

    def close(self) -> None:
        """Abort a save: the run failed, and other processes may have ended. Not collective."""
        # No collective from here on: another rank may be gone. The main process alone removes the shards.
        save, self._save = self._save, None
        self._join()
        if save is not None:
            save.abort("the run ended before")
        self._payload_snapshot, self._shard_snapshot = CpuSnapshot(), CpuSnapshot()

    def _poll(self) -> bool:
        """Return True if the save is complete; raises CheckpointError on every process if one failed. Collective."""
        statuses = self._comm.all_gather_object(self._status)
        # The first one with an error, on every process: all of them raise the same.
        for status in statuses:
            if status.error is not None:
                self._fail(status.error)
        if any(status.phase == "writing" for status in statuses):
            return False
        if statuses[0].phase == "listed":
            self._save = None
            self._join()
            return True
        if statuses[0].phase == "written":
            # On every process, though the main one alone lists: only its status counts from here on.
            self._status = _Status("listing")
            if self._comm.is_main:
                self._join()
                results = [status.result for status in statuses if status.result is not None]
                self._work = start_thread(lambda: self._list(results), name="checkpoint-listing")
        return False

    def _fail(self, error: str) -> None:
        """Remove all files of the save and raise, on every process; collective."""
        save, self._save = self._save, None
        self._join()
        self._comm.barrier()  # no process writes any more into the folder that is removed now
        assert save is not None
        save.abort(error)
        raise CheckpointError(error)

    def _write(self) -> None:
        assert self._save is not None
        try:
            self._status = _Status("written", result=self._save.writer.write())
        # Not raised: the main threads of all processes learn of it in the next poll, and raise it together.
        except BaseException as error:
            self._note_failure(shard_error(self._comm.process, error_text(error)))

    def _list(self, results: list[ShardResult]) -> None:
        assert self._save is not None
        try:
            self._save.register(results)
            self._status = _Status("listed")
        except BaseException as error:
            self._note_failure(error_text(error))

    def _note_failure(self, error: str) -> None:
        assert self._save is not None
        logger.error("checkpoint '%s' was not saved: %s", self._save.labels["name"], error)
        self._status = _Status("writing", error=error)

    def _join(self) -> None:
        if self._work is not None:
            # Not `result()`: the errors of the thread are in its status.
            wait([self._work])
            self._work = None


class _Status(NamedTuple):
    """The progress of one process's background save."""

    phase: Literal["writing", "written", "listing", "listed"]
    result: ShardResult | None = None
    error: str | None = None


class _Save:
    """One save in progress, whose folder the main process has locked. Making one is collective.

    Raises CheckpointError on every process if one of them failed or does not see the folder.
    """

    def __init__(
        self,
        store: CheckpointStore,
        payload: dict[str, Any],
        shards: Sequence[TensorShard],
        *,
        comm: Collectives,
        keep: Keep | None,
        then: OnSaved | None,
        labels: Labels,
    ) -> None:
        self._store, self._payload, self._keep, self._then = store, payload, keep, then
        self.labels = labels
        with ExitStack() as stack:
            # The main process makes and locks the folder; the others get its path or its error.
            folder = _on_main(comm, lambda: stack.enter_context(store.shard_folder(labels["name"])))
            # Collective: a process on a machine that does not see the folder ends the save on all of them.
            if not all(comm.all_gather_object(folder.is_dir())):
                raise CheckpointError(
                    f"sharded=true has every machine write into {folder.parent}, but not all of them see it; put the "
                    "run's folder on a file system that they share (run_dir=PATH), or set "
                    "callbacks.checkpoint.sharded=false."
                )
            self.writer = ShardWriter(folder, shards, comm)
            self.folder_lock = stack.pop_all()  # of the main process; an error that leaves it removes the shards

    def register(self, results: Sequence[ShardResult]) -> CheckpointEntry:
        """List the checkpoint, release the folder, and call `then`; on the main process."""
        with self.folder_lock:
            files = self.writer.finish(results)
            entry = self._store.register_shards(
                self._payload, self.writer.folder, files, keep=self._keep, **self.labels
            )
        if self._then is not None:
            self._then(entry)
        return entry

    def abort(self, reason: str) -> None:
        """Remove the shards and release the folder."""
        error = CheckpointError(reason)
        try:
            with self.folder_lock:
                # Raised inside the lock's context, which removes the shards of a save that fails.
                raise error
        except CheckpointError as raised:
            # The disk's error while removing them: only logged, since the save has failed already.
            if raised is not error:
                logger.error("%s", raised)


def _on_main(comm: Collectives, work: Callable[[], T]) -> T:
    """Return on every process the result of the main one's work, or raise its error as CheckpointError; collective."""
    result: Any
    result, error = comm.broadcast_object(capture_error(work) if comm.is_main else (None, None))
    if error is not None:
        raise CheckpointError(error)
    value: T = result
    return value
