"""SpikeDetector: gradients far above the running average of their norm."""

from __future__ import annotations

import torch
from torch import Tensor

WARM_UP_STEPS = 20
"""Steps that are averaged before any is called a spike."""
MEMORY_STEPS = 100
"""Approximate number of steps of the running average."""


class SpikeDetector:
    """Compares each step's gradient norm with the running average of the steps before; nothing waits for the device.

    A norm above `factor` times the average is a spike. It is that of the whole task, so all ranks and stages get the
    same result without a collective.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._seen: Tensor | None = None  # (2,): number of steps, average norm

    def is_spike(self, norm: Tensor) -> Tensor:
        """Return True for a norm that is a spike or not finite, as a scalar on the device; average any other."""
        seen = self._seen
        if seen is None or seen.device != norm.device:
            seen = torch.zeros(2, device=norm.device) if seen is None else seen.to(norm.device)
        count, average = seen[0], seen[1]
        spike = (count >= WARM_UP_STEPS) & (norm > self.factor * average)
        skipped = spike | ~torch.isfinite(norm)
        grown = count + 1
        nearer = average + (norm - average) / grown.clamp(max=MEMORY_STEPS)
        self._seen = torch.where(skipped, seen, torch.stack([grown, nearer.to(seen.dtype)]))
        return skipped

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state to save; waits for the device."""
        return {} if self._seen is None else {"seen": self._seen.tolist()}

    def load_state_dict(self, saved: dict[str, list[float]]) -> None:
        """Restore a saved state."""
        self._seen = torch.tensor(saved["seen"]) if "seen" in saved else None
