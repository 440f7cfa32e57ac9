"""How the elements of a tensor are distributed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Histogram:
    """Counts of finite elements between edges; numbers of the host."""

    edges: tuple[float, ...]
    """One more than there are counts, ascending."""
    counts: tuple[int, ...]
    total: float
    total_of_squares: float
    num_nonfinite: int = 0

    @property
    def num_elements(self) -> int:
        """Finite elements."""
        return sum(self.counts)


def histogram_of(values: Tensor, *, bins: int = 64) -> Histogram:
    """Return the histogram of a tensor's elements; waits for the device."""
    flat = values.detach().flatten().float()
    finite = flat[torch.isfinite(flat)].cpu()
    if finite.numel() == 0:
        return Histogram((0.0, 1.0), (0,), 0.0, 0.0, num_nonfinite=flat.numel())
    low, high = float(finite.min()), float(finite.max())
    if low == high:  # torch would widen the range by itself, and past the largest float
        low, high = low - 0.5 * max(1.0, abs(low) * 1e-3), high + 0.5 * max(1.0, abs(high) * 1e-3)
    counts = torch.histc(finite.double(), bins=bins, min=low, max=high)
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    doubles = finite.double()
    return Histogram(
        edges=tuple(edges.tolist()),
        counts=tuple(int(count) for count in counts.tolist()),
        total=float(doubles.sum()),
        total_of_squares=float(doubles.square().sum()),
        num_nonfinite=flat.numel() - finite.numel(),
    )
