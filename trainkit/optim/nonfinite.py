"""Parameters and buffers that are not finite, and gradients that are spikes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.tree import tensors_in

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


def nonfinite_state(task: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that are not finite; waits for the device once if all are."""
    named = [*task.named_parameters(), *task.named_buffers()]
    candidates = [(name, tensor.detach()) for name, tensor in named if _may_be_nan(tensor)]
    # A sum is finite only if all its terms are; it takes a fortieth of the time of checking each element.
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
    """Return True if every tensor of a state dict is finite, except those named in `except_for`."""
    return all(_is_finite(value) for name, value in state.items() if name not in except_for)


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(value) if _may_be_nan(tensor))


def _may_be_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta
