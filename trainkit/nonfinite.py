"""Where a loss that is not finite came from, and going back to before it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.batches import tensors_in


class GoBack(Exception):  # no error: training goes on
    """A loss was not finite after `step - 1` sound steps; raised on all ranks at the same point."""

    def __init__(self, step: int, place: str) -> None:
        super().__init__(place)
        self.step = step
        self.place = place


class ModuleWatch:
    """While open, finds the first module whose output is not finite; every output is looked at, which waits for it."""

    def __init__(self, task: nn.Module) -> None:
        self.found: str | None = None
        self._task = task

    @contextmanager
    def open(self) -> Iterator[ModuleWatch]:
        """Listen to every module of the task but the task itself."""
        handles = [
            module.register_forward_hook(self._hook(name)) for name, module in self._task.named_modules() if name
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.found is None and not _is_finite(output):
                given = "finite inputs" if _is_finite(inputs) else "inputs that were not finite already"
                self.found = f"{name} ({type(module).__name__}), from {given}"

        return look


def nonfinite_state(task: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that are not finite; waits for the device once if all are."""
    named = [*task.named_parameters(), *task.named_buffers()]
    candidates = [(name, tensor.detach()) for name, tensor in named if _may_be_nan(tensor)]
    # A sum is finite only if all that was added is, and takes a fortieth of the time of looking at each element.
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


def nonfinite_gradient(task: nn.Module, *, among: Collection[int] | None = None) -> str | None:
    """Return the name of the first parameter whose gradient is not finite; waits for the device.

    `among` are the identities of the parameters to look at, if not all.
    """
    parameters = task.named_parameters()
    named = [(name, parameter.grad) for name, parameter in parameters if among is None or id(parameter) in among]
    return next((name for name, gradient in named if gradient is not None and not _is_finite(gradient)), None)


def is_finite_state(state: dict[str, Any], *, but_for: Collection[str] = ()) -> bool:
    """Return whether every tensor of a state dict is finite, but for those of some names."""
    return all(_is_finite(value) for name, value in state.items() if name not in but_for)


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(value) if _may_be_nan(tensor))


def _may_be_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta
