"""Images and histograms in the form that loggers take, and PNG."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor

from trainkit.errors import UserError
from trainkit.logger import Histogram


def to_uint8_image(image: Tensor) -> Tensor:
    """Return an image as uint8 on the host, (height, width, 3).

    It may be (height, width), (channels, height, width) with one or three channels, or (height, width, 3) in uint8;
    floating-point values from 0 to 1 become 0 to 255.
    """
    if not (image.dim() == 2 or (image.dim() == 3 and (image.shape[0] in (1, 3) or image.shape[2] == 3))):
        raise UserError(
            f"an image has the shape (height, width) or (channels, height, width) with 1 or 3 channels, got "
            f"{tuple(image.shape)}."
        )
    values = image.detach().cpu()
    if values.is_floating_point():
        values = values.float().nan_to_num(0.0).clamp(0, 1).mul(255).round()
    if values.dim() == 2:
        values = values[None]
    if values.shape[0] in (1, 3):
        values = values.permute(1, 2, 0)
    return values.expand(-1, -1, 3).clamp(0, 255).to(torch.uint8).contiguous()


def png(image: Tensor) -> bytes:
    """Return an image (uint8, height x width x 3) as a PNG file."""
    height, width, _ = image.shape
    # In PNG each row begins with the number of its filter; 0 is none.
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), image.reshape(height, width * 3)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, true colour, not interlaced
    pixels = zlib.compress(rows.numpy().tobytes(), 6)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")):
        file += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return file


def histogram_of(values: Tensor, *, bins: int = 64) -> Histogram:
    """Return the histogram of a tensor's elements; waits for the device."""
    flat = values.detach().flatten().float()
    # Selected on the device and summed in float64 on the host, as not every device has it.
    finite = flat[torch.isfinite(flat)].cpu().double()
    if finite.numel() == 0:
        return Histogram((0.0, 1.0), (0,), 0.0, 0.0, num_nonfinite=flat.numel())
    low, high = float(finite.min()), float(finite.max())
    if low == high:  # torch would widen the range by itself, and past the largest float
        low, high = low - 0.5 * max(1.0, abs(low) * 1e-3), high + 0.5 * max(1.0, abs(high) * 1e-3)
    counts = torch.histc(finite, bins=bins, min=low, max=high)
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    return Histogram(
        edges=tuple(edges.tolist()),
        counts=tuple(int(count) for count in counts.tolist()),
        total=float(finite.sum()),
        total_of_squares=float(finite.square().sum()),
        num_nonfinite=flat.numel() - finite.numel(),
    )
