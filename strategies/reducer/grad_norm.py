"""Global norm of gradients, accurate for flat buffers of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .bucket import Bucket

CHUNK_ELEMENTS = 64 * 1024  # few enough for an accurate sum in float32


def total_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the 2-norm of all elements together, a float32 or float64 scalar on `device`."""
    squares = [_sum_of_squares(tensor.detach()) for tensor in tensors]
    dtype = norm_dtype(tensors)
    if not squares:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.stack([square.to(device) for square in squares]).sum().sqrt().to(dtype)


def norm_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return float64 if one of the tensors is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def whole_gradients(buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return tensors that hold all gradients once: a flat bucket if all its `.grad` are views, else each `.grad`."""
    if not buckets:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients: list[Tensor] = []
    for bucket in buckets:
        # A user may have replaced a `.grad`, or a parameter has none: then the buffer is not what the optimizer sees.
        if bucket.contents is not None and all(entry.parameter.grad is entry.view for entry in bucket.entries):
            gradients.append(bucket.flat)
        else:
            gradients += [entry.parameter.grad for entry in bucket.entries if entry.parameter.grad is not None]
    return gradients


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares.

    A float32 sum over a large flat buffer on the CPU is inaccurate (relative error 4e-3 at 50 million elements), so it
    is taken in chunks, whose sums are added in float64.
    """
    if tensor.is_sparse:  # not coalesced, it has several values for one element
        tensor = tensor.coalesce().values()
    if tensor.device.type != "cpu":  # GPUs add in a tree, which is accurate
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if half else None)
        return norm.square()
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    parts = [torch.dot(chunk, chunk) for chunk in flat.split(CHUNK_ELEMENTS)]
    return torch.stack(parts).sum(dtype=torch.float64) if parts else torch.zeros((), dtype=torch.float64)
