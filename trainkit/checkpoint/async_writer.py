"""Saving in the background: training waits for a copy of its state in memory, a second thread writes it to the disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.serialization import PayloadVisitor, storage_key
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore

logger = logging.getLogger(__name__)


class AsyncWriter:
    """Saves into a store from a background thread, one checkpoint at a time.

    What goes wrong there is raised by the next call of `check`, `save`, `wait` or `close`, once.
    The copies' memory is kept and used again by the next save, so host memory grows by one payload.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._snapshot = CpuSnapshot()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._entry: CheckpointEntry | None = None

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def save(
        self,
        payload: dict[str, Any],
        *,
        name: str,
        step: int,
        epoch: int,
        metrics: Mapping[str, float] = MappingProxyType({}),
        reason: str = "interval",
        then: Callable[[CheckpointEntry], object] | None = None,
    ) -> None:
        """Have a copy of the payload on its way to the disk; the caller may change its tensors at once.

        Waits for the save before it, if that is still going on. `then` is called with the entry in the background
        thread, to prune for example; its errors are the save's.
        """
        self.wait()
        copied = self._snapshot.take(payload)
        saved = dict(metrics)

        def write() -> None:
            try:
                entry = self._store.save(copied, name=name, step=step, epoch=epoch, metrics=saved, reason=reason)
                self._entry = entry
                if then is not None:
                    then(entry)
            except BaseException as error:
                logger.error("checkpoint '%s' was not saved: %s", name, error)
                self._error = error

        # Not a daemon: the interpreter waits for a save that is going on when it ends.
        self._thread = threading.Thread(target=write, name=f"checkpoint-{name}")
        self._thread.start()

    def prepare(self, payload: dict[str, Any]) -> None:
        """Have memory ready for payloads like this one, so that the first save is as quick as the others.

        Touching fresh memory takes longer than the copy itself; here a second thread does it. Without this call the
        first save pays. Best called after the first step, when the optimizer has its state.
        """
        self.wait()
        self._thread = threading.Thread(target=self._snapshot.reserve(payload), name="checkpoint-memory")
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a save that failed; costs next to nothing and never waits."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def busy(self) -> bool:
        """Whether a save is going on."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> CheckpointEntry | None:
        """Wait for the save that is going on and return the last one's entry; raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        return self._entry

    def close(self) -> None:
        """Wait for the save that is going on and give the memory back."""
        try:
            self.wait()
        finally:
            self._snapshot = CpuSnapshot()


class CpuSnapshot:
    """A copy of a payload in host memory that the next copy is written over."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, payload: dict[str, Any]) -> Callable[[], None]:
        """Allot the memory for a copy of the payload; the returned function touches all of it and may run anywhere."""
        buffers: dict[str, Tensor] = {}
        known: set[tuple[object, ...]] = set()

        def reserved(tensor: Tensor, place: str) -> Tensor:
            if tensor.layout is torch.strided and storage_key(tensor) not in known:
                known.add(storage_key(tensor))
                buffers[place] = self._buffer(tensor, place)
            return tensor

        PayloadVisitor(reserved).convert(payload, "")
        self._buffers = buffers

        def touch() -> None:
            for buffer in buffers.values():
                buffer.zero_()

        return touch

    def take(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the payload, valid until the next call; tensors that are the same bytes stay one."""
        used: dict[str, Tensor] = {}
        copies: dict[tuple[object, ...], Tensor] = {}
        devices: set[torch.device] = set()

        def copied(tensor: Tensor, place: str) -> Tensor:
            if tensor.layout is not torch.strided:
                return tensor.cpu() if tensor.is_cuda else tensor.clone()
            identity = storage_key(tensor)
            if identity not in copies:
                buffer = self._buffer(tensor, place)
                buffer.copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
                used[place] = copies[identity] = buffer
            return copies[identity]

        converted: dict[str, Any] = PayloadVisitor(copied).convert(payload, "")
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._buffers = used
        return converted

    def _buffer(self, tensor: Tensor, place: str) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        # Pinned memory takes copies from the device at full speed, all of them at once.
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
