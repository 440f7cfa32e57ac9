"""Offloading: the tensors that backward needs wait in host memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainkit.devices import current_stream


class _OnHost(NamedTuple):
    tensor: Tensor


def offloaded(copies: torch.Stream) -> saved_tensors_hooks:
    """Return the context of a forward whose saved tensors are copied to pinned memory on the stream `copies`, and back.

    Neither way waits for the device. As torch's `save_on_cpu`, but that one waits for each copy, and copies weights.
    """
    device = copies.device

    def pack(tensor: Tensor) -> Tensor | _OnHost:
        # A weight stays on the device anyway; what a product saves of it is a view.
        is_weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        if is_weight or tensor.device != device or tensor.layout is not torch.strided:
            return tensor
        copies.wait_stream(current_stream(device))
        with copies:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            on_host.copy_(tensor, non_blocking=True)
        # Forward drops the tensor at once: its memory must not be used again before it is copied.
        tensor.record_stream(copies)
        return _OnHost(on_host)

    def unpack(packed: Tensor | _OnHost) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        current_stream(device).wait_stream(copies)
        return packed.tensor.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)
