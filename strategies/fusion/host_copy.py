"""Copies between the device, where gradients are, and the host's memory, in which they travel."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class HostCopy(Protocol):
    """A copy that may be under way."""

    def is_done(self) -> bool:
        """Whether the target may be read on the host; does not wait."""

    def wait(self) -> None:
        """Return once the target may be read on the host."""

    def order_current_stream(self) -> None:
        """Let what is put on the current stream from now on run after the copy; does not wait."""


class HostCopier:
    """Copies on the CPU, which are done at once."""

    def mark(self) -> Any:
        """Return a mark of the present moment on the device, behind which a buffer is filled."""
        return None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory that can be copied to and from."""
        return torch.empty(numel, dtype=dtype)

    def adopt(self, tensor: Tensor) -> None:
        """Prepare host memory that is already there for copies; undone by `close`."""

    def to_host(self, source: Tensor, target: Tensor, *, after: Any) -> HostCopy:
        """Copy to host memory what is on the device at a mark, in the number format of the target."""
        target.copy_(source)
        return DONE

    def to_device(self, source: Tensor, target: Tensor) -> HostCopy:
        """Copy from host memory to the device."""
        target.copy_(source)
        return DONE

    def close(self) -> None:
        """Undo what `adopt` did; may be called twice."""


class CudaHostCopier(HostCopier):
    """Copies on a stream of their own between a CUDA device and pinned memory, so that backward goes on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._adopted: list[Tensor] = []

    def mark(self) -> Any:
        """Return an event on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory, which torch keeps for the next time."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def adopt(self, tensor: Tensor) -> None:
        """Pin memory that is already there: copies from pageable memory would wait for the device."""
        if tensor.nbytes:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
            self._adopted.append(tensor)

    def to_host(self, source: Tensor, target: Tensor, *, after: Any) -> HostCopy:
        """Start to copy to host memory what is on the device at a mark."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(after)
            # A change of format is made on the device: fewer bytes are copied.
            target.copy_(source.to(target.dtype), non_blocking=True)
            return _StreamCopy(self.stream)

    def to_device(self, source: Tensor, target: Tensor) -> HostCopy:
        """Start to copy from host memory to the device."""
        with torch.cuda.stream(self.stream):
            target.copy_(source.to(self.device, non_blocking=True), non_blocking=True)
            return _StreamCopy(self.stream)

    def close(self) -> None:
        """Wait for copies under way and unpin what was pinned; may be called twice."""
        self.stream.synchronize()
        for tensor in self._adopted:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._adopted = []


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""

    def order_current_stream(self) -> None:
        """Nothing is on a stream."""


DONE: HostCopy = _Done()


class _StreamCopy:
    """What is on a stream so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def order_current_stream(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def open_host_copier(device: torch.device) -> HostCopier:
    """Return the way of copying that fits a device."""
    return CudaHostCopier(device) if device.type == "cuda" else HostCopier()
