"""Registrations: a count of the parameters and modules that modules of this process register."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


@contextmanager
def count_registrations() -> Iterator[list[int]]:
    """Count the parameters and modules that any module registers in the context, beginning at 1 for those before it."""
    registrations = [1]

    def count(module: nn.Module, name: str, value: object) -> None:
        registrations[0] += 1

    hooks = [register_module_parameter_registration_hook(count), register_module_module_registration_hook(count)]
    try:
        yield registrations
    finally:
        for hook in hooks:
            hook.remove()
