"""BackgroundSave: a checkpoint that threads write while training goes on, which waits only for a copy of its state.

    main threads              copy  step  poll  step  poll: all have written  step  poll: complete
    every process's thread          write ..........
    the main process's thread                                register ......

Threads only write files. The processes of a save exchange their status after each step, on their main threads, so that
all of them continue, raise, or are done after the same step. One process alone has nobody to ask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainkit.checkpoint.serialization import Labels, PayloadVisitor, storage_key
from trainkit.checkpoint.sharded_state import TensorShard
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore, Keep, OnSaved
from trainkit.devices import has_streams, pin_in_place, synchronize
from trainkit.distributed.collectives import Collectives, same_errors
from trainkit.errors import CheckpointError, UserError
from trainkit.files import start_thread

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_SHARDS = "trainkit_shards"  # a key beside the payload's


class BackgroundSave:
    """One save, from its start in a thread of each process to its end. Its methods are collective but for `close`.

    Args:
        write: Writes what this process holds.
        comm: The processes that write.
        name: The name of the checkpoint.
        register: Lists the checkpoint once all have written; called in a thread of the main process with the results of
            all. By default `write` does it.
        abandon: Removes what was written, on the main process, if the save fails.

    """

    def __init__(
        self,
        write: Callable[[], Any],
        comm: Collectives,
        *,
        name: str,
        register: Callable[[list[Any]], CheckpointEntry] | None = None,
        abandon: Callable[[], object] | None = None,
    ) -> None:
        self.entry: CheckpointEntry | None = None
        """The checkpoint once it is complete, on every process."""
        self._comm, self._name, self._register, self._abandon = comm, name, register, abandon
        self._work: Future[Any] | None = self._started(write)  # set on every process or on none

    def poll(self) -> bool:
        """Return True if the save has just become complete; raises its error on every process."""
        if self._work is None:
            return False
        statuses = self._comm.all_gather_object(_Status.of(self._work))
        # The first one with an error, on every process: all of them raise the same.
        error = next((status.error for status in statuses if status.error is not None), None)
        if error is not None:
            wait([self._work])
            self._comm.barrier()  # no process writes any more into what is removed now
            self._end()
            raise error
        if not all(status.is_done for status in statuses):
            return False
        if self._register is None:
            self._work, self.entry = None, statuses[0].result
            return True
        # On every process, though the main one alone lists: the others remain done until it is.
        register, self._register = self._register, None
        if self._comm.is_main:
            results = [status.result for status in statuses]
            self._work = self._started(lambda: register(results))
        return False

    def wait(self) -> bool:
        """Wait for the end; return True if the save has become complete, or raise its error."""
        # Each turn is one collective of all processes, on which they move on together.
        while self._work is not None:
            wait([self._work])
            if self.poll():
                return True
        return False

    def close(self) -> None:
        """End the save: wait for it if this process makes it alone, else abandon it, as others may be gone."""
        if self._comm.num_processes == 1:
            self.wait()
        elif self._work is not None:
            wait([self._work])
            self._end()

    def _end(self) -> None:
        self._work = None
        if self._abandon is not None:
            self._abandon()

    def _started(self, work: Callable[[], Any]) -> Future[Any]:
        def logged() -> Any:
            try:
                return work()
            # Logged at once: the next poll may come many steps later, or never.
            except BaseException as error:
                logger.error("checkpoint '%s' was not saved: %s", self._name, error)
                # Other processes get the error as a message, which not every error can be.
                if isinstance(error, UserError) or self._comm.num_processes == 1:
                    raise
                raise CheckpointError(f"{type(error).__name__}: {error}") from error

        return start_thread(logged, name=f"checkpoint-{self._name}")


class _Status(NamedTuple):
    """The progress of one process."""

    is_done: bool
    result: Any = None
    error: BaseException | None = None

    @staticmethod
    def of(work: Future[Any]) -> _Status:
        if not work.done():
            return _Status(False)
        error = work.exception()
        return _Status(True, error=error) if error is not None else _Status(True, work.result())


def save_copy(
    store: CheckpointStore,
    payload: dict[str, Any],
    snapshot: CpuSnapshot,
    *,
    keep: Keep | None = None,
    then: OnSaved | None = None,
    **labels: Unpack[Labels],
) -> BackgroundSave:
    """Copy the payload and start to save the copy, on one process; the caller may change its tensors at once.

    An earlier save from the same snapshot must have ended. `keep`, and `then` with the entry, are called in the thread;
    their errors are the save's. Raises UserError for a payload that could not be read back.
    """
    copied = snapshot.take(payload)

    def write() -> CheckpointEntry:
        entry = store.save(copied, keep=keep, **labels)
        if then is not None:
            then(entry)
        return entry

    return BackgroundSave(write, Collectives(), name=labels["name"])


def save_shards(
    store: CheckpointStore,
    payload: dict[str, Any],
    shards: Sequence[TensorShard],
    *,
    comm: Collectives,
    snapshot: CpuSnapshot | None = None,
    keep: Keep | None = None,
    then: OnSaved | None = None,
    **labels: Unpack[Labels],
) -> BackgroundSave:
    """Start to save the main process's payload and all processes' shards as one checkpoint; collective.

    Until its end the main process holds the lock of the store. Raises CheckpointError on every process if one of them
    failed or does not see the folder; earlier checkpoints are intact then.

    Args:
        store: Where the checkpoint is listed.
        payload: The main process's payload, with placeholders for sharded tensors.
        shards: The shards of this process.
        comm: The processes that save.
        snapshot: Copies the state first, for a caller that changes it before the end of the save.
        keep: Chooses, on the main process, the checkpoints that stay.
        then: Called with the entry in the thread of the main process; its errors are the save's.
        labels: The metadata to list.

    """
    from trainkit.checkpoint.shard_files import ShardResult, ShardWriter  # which takes half a second to import

    if snapshot is not None:
        copied = snapshot.take(payload if comm.is_main else {}, shards)
        elements = copied.pop(_SHARDS, {})
        payload, shards = copied, [replace(shard, elements=elements[shard.place]) for shard in shards]
    with ExitStack() as stack:
        folder = None
        with same_errors(comm):
            if comm.is_main:
                folder = stack.enter_context(store.shard_folder(labels["name"]))
        folder = comm.broadcast_object(folder)
        assert folder is not None
        # A process on a machine that does not see the folder ends the save on all of them.
        if not all(comm.all_gather_object(folder.is_dir())):
            raise CheckpointError(
                f"sharded=true has every machine write into {folder.parent}, but not all of them see it; put the "
                "run's folder on a file system that they share (run_dir=PATH), or set "
                "callbacks.checkpoint.sharded=false."
            )
        writer = ShardWriter(folder, shards, comm)
        folder_lock = stack.pop_all()  # of the main process; its end removes shards that are not listed

    def register(results: list[ShardResult]) -> CheckpointEntry:
        with folder_lock:
            entry = store.register_shards(payload, folder, writer.finish(results), keep=keep, **labels)
        if then is not None:
            then(entry)
        return entry

    return BackgroundSave(writer.write, comm, name=labels["name"], register=register, abandon=folder_lock.close)


class CpuSnapshot:
    """A copy of a payload in host memory, overwritten by the next one, so that it grows by one payload only."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._touching: Future[None] | None = None

    def reserve(self, payload: dict[str, Any], shards: Sequence[TensorShard] = ()) -> None:
        """Allocate memory for state like this, so that the first copy is as quick as the others.

        Touching fresh memory takes longer than the copy itself; here a background thread does it. Best called after the
        first step, when the optimizer has its state.
        """
        self._wait()
        buffers: dict[str, Tensor] = {}
        copied_keys: set[tuple[object, ...]] = set()

        def allocate(tensor: Tensor, path: str) -> Tensor:
            # Tensors that share their bytes share a copy, in `take` too.
            if tensor.layout is torch.strided and storage_key(tensor) not in copied_keys:
                copied_keys.add(storage_key(tensor))
                buffers[path] = self._buffer(tensor, path)
            return tensor

        PayloadVisitor(allocate).convert(_joined(payload, shards))
        self._buffers = buffers

        def touch() -> None:
            for buffer in buffers.values():
                buffer.zero_()  # touched, so that the system gives the pages

        self._touching = start_thread(touch, name="checkpoint-memory")

    def take(self, payload: dict[str, Any], shards: Sequence[TensorShard] = ()) -> dict[str, Any]:
        """Return a copy of the payload, valid until the next call; tensors that share their bytes share a copy.

        Copies of shards' elements are in it under one more key.
        """
        self._wait()
        used: dict[str, Tensor] = {}
        copies: dict[tuple[object, ...], Tensor] = {}
        devices: set[torch.device] = set()

        def copy(tensor: Tensor, path: str) -> Tensor:
            if tensor.layout is not torch.strided:
                # Sparse tensors cannot be copied into a buffer of another number of elements.
                return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
            key = storage_key(tensor)
            if key not in copies:
                buffer = self._buffer(tensor, path)
                # All copies of a device are in its queue at once, and waited for below.
                buffer.copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
                used[path] = copies[key] = buffer
            return copies[key]

        copied: dict[str, Any] = PayloadVisitor(copy).convert(_joined(payload, shards))
        for device in devices:
            # Before the caller changes its tensors, and before the thread reads the copies.
            synchronize(device)
        self._buffers = used  # frees those of tensors that the payload no longer has
        return copied

    def close(self) -> None:
        """Free the memory."""
        self._wait()
        self._buffers = {}

    def _wait(self) -> None:
        """Wait for the thread that touches the memory, or raise its error."""
        touching, self._touching = self._touching, None
        if touching is not None:
            touching.result()

    def _buffer(self, tensor: Tensor, path: str) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        buffer = torch.empty_like(tensor, device="cpu")
        # Pinned memory takes copies from the device at full speed, all of them at once.
        if has_streams(tensor.device):
            pin_in_place(buffer)
        return buffer


def _joined(payload: dict[str, Any], shards: Sequence[TensorShard]) -> dict[str, Any]:
    # Together, so that the devices are waited for once.
    return {**payload, _SHARDS: {shard.place: shard.elements for shard in shards}} if shards else payload
