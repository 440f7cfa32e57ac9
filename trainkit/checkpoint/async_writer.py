"""AsyncWriter: save in a background thread; training waits only for a copy of its state in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.checkpoint.serialization import Labels, PayloadVisitor, storage_key
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore, Keep, OnSaved
from trainkit.files import start_thread

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)


class AsyncWriter:
    """Saves into a store from a background thread, one checkpoint at a time.

    An error of the thread is raised once, by the next call of `check`, `save`, `wait` or `close`.
    The copies' memory is reused by the next save, so host memory grows by one payload.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._snapshot = CpuSnapshot()
        self._work: Future[CheckpointEntry | None] | None = None

    def save(
        self,
        payload: dict[str, Any],
        *,
        keep: Keep | None = None,
        then: OnSaved | None = None,
        **labels: Unpack[Labels],
    ) -> None:
        """Copy the payload and save the copy in the background; the caller may change its tensors at once.

        Waits for an earlier save. `keep` and `then` are called in the background thread; their errors are the save's.
        """
        self.wait()
        # After the wait: the copies' memory is that of the earlier save, which may still be written.
        copied = self._snapshot.take(payload)
        labels["metrics"] = dict(labels.get("metrics", {}))  # the caller may change its dict

        def write() -> CheckpointEntry:
            try:
                entry = self._store.save(copied, keep=keep, **labels)
                if then is not None:
                    then(entry)
            # Logged at once: the next call that would raise it may come many steps later, or never.
            except BaseException as error:
                logger.error("checkpoint '%s' was not saved: %s", labels["name"], error)
                raise
            return entry

        self._work = start_thread(write, name=f"checkpoint-{labels['name']}")

    def prepare(self, payload: dict[str, Any]) -> None:
        """Allocate memory for payloads like this one, so that the first save is as quick as the others.

        Touching fresh memory takes longer than the copy itself; here a background thread does it. Best called after the
        first step, when the optimizer has its state.
        """
        self.wait()
        self._work = start_thread(self._snapshot.reserve(payload), name="checkpoint-memory")

    def check(self) -> None:
        """Raise the error of a save that failed; never waits."""
        if not self.busy:
            self.wait()

    @property
    def busy(self) -> bool:
        """True while the thread is working."""
        return self._work is not None and not self._work.done()

    def wait(self) -> CheckpointEntry | None:
        """Wait for the background thread; return the entry it has saved, if any, or raise its error."""
        work, self._work = self._work, None
        return None if work is None else work.result()

    def close(self) -> None:
        """Wait for the background thread and free the memory."""
        try:
            self.wait()
        finally:
            self._snapshot = CpuSnapshot()


class CpuSnapshot:
    """A copy of a payload in host memory, overwritten by the next one."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, payload: dict[str, Any]) -> Callable[[], None]:
        """Allocate memory for a copy of the payload; the returned function touches it and may run in any thread."""
        buffers: dict[str, Tensor] = {}
        copied_keys: set[tuple[object, ...]] = set()

        def allocate(tensor: Tensor, path: str) -> Tensor:
            # Tensors that share their bytes share a copy, in `take` too.
            if tensor.layout is torch.strided and storage_key(tensor) not in copied_keys:
                copied_keys.add(storage_key(tensor))
                buffers[path] = self._buffer(tensor, path)
            return tensor

        PayloadVisitor(allocate).convert(payload)
        self._buffers = buffers

        def touch() -> None:
            for buffer in buffers.values():
                buffer.zero_()  # touched, so that the system gives the pages

        return touch

    def take(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the payload, valid until the next call; tensors that share their bytes share a copy."""
        used: dict[str, Tensor] = {}
        copies: dict[tuple[object, ...], Tensor] = {}
        devices: set[torch.device] = set()

        def copy(tensor: Tensor, path: str) -> Tensor:
            if tensor.layout is not torch.strided:
                # Sparse tensors cannot be copied into a buffer of another number of elements.
                return tensor.cpu() if tensor.is_cuda else tensor.clone()
            key = storage_key(tensor)
            if key not in copies:
                buffer = self._buffer(tensor, path)
                # All copies of a device are in its queue at once, and waited for below.
                buffer.copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
                used[path] = copies[key] = buffer
            return copies[key]

        copied: dict[str, Any] = PayloadVisitor(copy).convert(payload)
        for device in devices:
            if device.type == "cuda":
                # Before the caller changes its tensors, and before the thread reads the copies.
                torch.cuda.synchronize(device)
        self._buffers = used  # frees those of tensors that the payload no longer has
        return copied

    def _buffer(self, tensor: Tensor, path: str) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        # Pinned memory takes copies from the device at full speed, all of them at once.
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
