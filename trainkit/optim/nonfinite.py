"""Parameters and buffers that are not finite, and gradients that are spikes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.tree import tensors_in

WARM_UP_STEPS = 20
"""Steps to learn from before any is called a spike."""
MEMORY_STEPS = 100
"""Over about so many steps the average is taken."""


class SpikeDetector:
    """Compares the norm of each step's gradient with the average of the steps before; nothing waits for the device.

    The norm is that of the whole task, so that all ranks and stages come to the same answer without a collective.

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
        skipped = spike | ~torch.isfinite(norm)
        grown = count + 1
        nearer = average + (norm - average) / grown.clamp(max=MEMORY_STEPS)
        self._seen = torch.where(skipped, seen, torch.stack([grown, nearer.to(seen.dtype)]))
        return skipped

    def state_dict(self) -> dict[str, list[float]]:
        """Return what a checkpoint keeps; waits for the device."""
        return {} if self._seen is None else {"seen": self._seen.tolist()}

    def load_state_dict(self, saved: dict[str, list[float]]) -> None:
        """Restore the average of a checkpoint."""
        self._seen = torch.tensor(saved["seen"]) if "seen" in saved else None


def nonfinite_state(task: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that are not finite; waits for the device once if all are."""
    named = [*task.named_parameters(), *task.named_buffers()]
    candidates = [(name, tensor.detach()) for name, tensor in named if _may_be_nan(tensor)]
    # A sum is finite only if all its terms are, and takes a fortieth of the time of checking each element.
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, tensor in candidates:
        by_device.setdefault(tensor.device, []).append(torch.isfinite(tensor.sum()))
    if all(bool(torch.stack(finite).all()) for finite in by_device.values()):
        return []
    return [name for name, tensor in candidates if not _is_finite(tensor)]


def untrained_nonfinite_state(task: nn.Module) -> list[str]:
    """Return the names of buffers and frozen parameters that are not finite, such as a mask of minus infinity."""
    trained = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    return [name for name in nonfinite_state(task) if name not in trained]


def is_finite_state(state: dict[str, Any], *, except_for: Collection[str] = ()) -> bool:
    """Return whether every tensor of a state dict is finite, except those of some names."""
    return all(_is_finite(value) for name, value in state.items() if name not in except_for)


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(value) if _may_be_nan(tensor))


def _may_be_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta
