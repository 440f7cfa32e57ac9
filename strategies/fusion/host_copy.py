"""Copies between the device, where gradients are, and the host memory from which they are sent."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class HostCopy(Protocol):
    """A copy that may be in progress."""

    def is_done(self) -> bool:
        """Return True if the target may be read on the host; does not wait."""

    def wait(self) -> None:
        """Return once the target may be read on the host."""

    def order_current_stream(self) -> None:
        """Order later work on the current stream after the copy; does not wait."""


class HostCopier:
    """Synchronous copies on the CPU."""

    def mark(self) -> Any:
        """Return a mark of the work queued on the device so far."""
        return None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory that can be copied to and from."""
        return torch.empty(numel, dtype=dtype)

    def pin(self, tensor: Tensor) -> None:
        """Pin existing host memory for asynchronous copies; `close` unpins it."""

    def to_host(self, source: Tensor, target: Tensor, *, after: Any) -> HostCopy:
        """Copy to host memory after the work before the mark `after`, in the dtype of the target."""
        target.copy_(source)
        return _DONE

    def to_device(self, source: Tensor, target: Tensor) -> HostCopy:
        """Copy from host memory to the device."""
        target.copy_(source)
        return _DONE

    def close(self) -> None:
        """Finish copies and unpin memory; may be called twice."""


class CudaHostCopier(HostCopier):
    """Copies between a CUDA device and pinned memory on a separate stream, concurrent with backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._pinned: list[Tensor] = []

    def mark(self) -> Any:
        """Return an event on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory, which torch caches."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def pin(self, tensor: Tensor) -> None:
        """Pin existing memory: copies from pageable memory would wait for the device."""
        if tensor.nbytes:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
            self._pinned.append(tensor)

    def to_host(self, source: Tensor, target: Tensor, *, after: Any) -> HostCopy:
        """Start to copy to host memory after the work before the mark `after`."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(after)
            # The dtype is changed on the device: fewer bytes are copied.
            target.copy_(source.to(target.dtype), non_blocking=True)
            return _StreamCopy(self.stream)

    def to_device(self, source: Tensor, target: Tensor) -> HostCopy:
        """Start to copy from host memory to the device."""
        with torch.cuda.stream(self.stream):
            target.copy_(source.to(self.device, non_blocking=True), non_blocking=True)
            return _StreamCopy(self.stream)

    def close(self) -> None:
        """Wait for the stream and unpin memory; may be called twice."""
        self.stream.synchronize()
        for tensor in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._pinned = []


def open_host_copier(device: torch.device) -> HostCopier:
    """Return the copier for a device."""
    return CudaHostCopier(device) if device.type == "cuda" else HostCopier()


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def order_current_stream(self) -> None:
        pass


_DONE: HostCopy = _Done()


class _StreamCopy:
    """The work queued on a stream so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def order_current_stream(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
