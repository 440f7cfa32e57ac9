"""HostCopier: copies between the device, where tensors are, and the host memory from which they are sent.

The end of a copy is an event on the copier's stream, or `None` for one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainkit.devices import current_stream, end_of, has_streams, pin_in_place

Event = torch.Event | None


class HostCopier:
    """Synchronous copies on the CPU."""

    def mark(self) -> Event:
        """Return the end of the work queued on the current stream so far."""
        return None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory that can be copied to and from."""
        return torch.empty(numel, dtype=dtype)

    def pin(self, tensor: Tensor) -> None:
        """Pin existing host memory for asynchronous copies; `close` unpins it."""

    def to_host(self, source: Tensor, target: Tensor, *, after: Event) -> Event:
        """Copy to host memory after the event `after`, in the dtype of the target; return the end of the copy."""
        target.copy_(source)
        return None

    def to_device(self, source: Tensor, target: Tensor) -> Event:
        """Copy from host memory to the device; return the end of the copy."""
        target.copy_(source)
        return None

    def close(self) -> None:
        """Finish copies and unpin memory; may be called twice."""


class StreamHostCopier(HostCopier):
    """Copies between a device and pinned memory on a separate stream, concurrent with the training stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)
        self._unpin: list[Callable[[], object]] = []

    def mark(self) -> Event:
        return end_of(current_stream(self.device))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)  # which torch caches

    def pin(self, tensor: Tensor) -> None:
        # Copies from pageable memory would wait for the device.
        if (unpin := pin_in_place(tensor)) is not None:
            self._unpin.append(unpin)

    def to_host(self, source: Tensor, target: Tensor, *, after: Event) -> Event:
        with self.stream:
            if after is not None:
                self.stream.wait_event(after)
            # The dtype is changed on the device: fewer bytes are copied.
            target.copy_(source.to(target.dtype), non_blocking=True)
            return end_of(self.stream)

    def to_device(self, source: Tensor, target: Tensor) -> Event:
        with self.stream:
            target.copy_(source.to(self.device, non_blocking=True), non_blocking=True)
            return end_of(self.stream)

    def close(self) -> None:
        self.stream.synchronize()
        for unpin in self._unpin:
            unpin()
        self._unpin = []


def open_host_copier(device: torch.device) -> HostCopier:
    """Return the copier for a device."""
    return StreamHostCopier(device) if has_streams(device) else HostCopier()
