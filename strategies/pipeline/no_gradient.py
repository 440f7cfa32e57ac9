"""A gradient that does not exist, as a message: a stage that waits for a tensor of known shape gets one, and no zeros.

A parameter with a gradient of zeros is moved by weight decay and momentum, one without is left alone. So all elements
are one particular NaN, whose bits no computation leaves: what computes sets all of the lowest bits, or none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = {1: [0x7D], 2: [0xD5, 0x7F], 4: [0x55, 0x55, 0xD5, 0x7F], 8: [0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0xFD, 0x7F]}


def no_gradient(tensor: Tensor) -> Tensor:
    """Return what says that there is no gradient of `tensor`, in host memory."""
    pattern = torch.tensor(_pattern(tensor), dtype=torch.uint8)
    return pattern.repeat(tensor.numel()).view(tensor.dtype).view(tensor.shape)


def is_no_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor in host memory says that there is no gradient."""
    pattern = _pattern(tensor)
    flat = tensor.view(-1)
    if flat[:1].view(torch.uint8).tolist() != pattern:
        return False
    rows = flat.view(torch.uint8).view(-1, len(pattern))
    return bool((rows == torch.tensor(pattern, dtype=torch.uint8)).all())


def _pattern(tensor: Tensor) -> list[int]:
    size = tensor.element_size()
    return _BYTES.get(size) or _BYTES[8] * (size // 8)
