"""Steps whose gradient is far larger than those before it."""

from __future__ import annotations

import torch
from torch import Tensor

WARM_UP_STEPS = 20
"""Steps to learn from before any is called a spike."""
MEMORY_STEPS = 100
"""Over about so many steps the average is taken."""


class SpikeWatch:
    """Compares the norm of each step's gradient with the average of the steps before; nothing waits for the device.

    The norm is that of the whole task, so that all ranks and stages come to the same answer without asking.

    Args:
        factor: How many times the average a norm must be to be a spike.

    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._seen: Tensor | None = None  # (2,): how many steps, and the average norm

    def is_spike(self, norm: Tensor) -> Tensor:
        """Return whether a norm is a spike or not finite, a scalar on the device; any other is averaged."""
        seen = self._seen
        if seen is None or seen.device != norm.device:
            seen = torch.zeros(2, device=norm.device) if seen is None else seen.to(norm.device)
        count, average = seen[0], seen[1]
        spike = (count >= WARM_UP_STEPS) & (norm > self.factor * average)
        left_out = spike | ~torch.isfinite(norm)
        grown = count + 1
        nearer = average + (norm - average) / grown.clamp(max=MEMORY_STEPS)
        self._seen = torch.where(left_out, seen, torch.stack([grown, nearer.to(seen.dtype)]))
        return left_out

    def state_dict(self) -> dict[str, list[float]]:
        """Return what a checkpoint keeps; waits for the device."""
        return {} if self._seen is None else {"seen": self._seen.tolist()}

    def load_state_dict(self, saved: dict[str, list[float]]) -> None:
        """Go on with what was seen before a checkpoint."""
        self._seen = torch.tensor(saved["seen"]) if "seen" in saved else None
