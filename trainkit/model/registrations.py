"""Registrations: a count of the parameters and modules that modules of this process register."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


@contextmanager
def count_registrations(of: Container[int] | None = None) -> Iterator[list[int]]:
    """Count the parameters and modules that modules register in the context: any, or those whose id is in `of`."""
    # A list, so that the caller sees it grow.
    registrations = [0]

    def count(module: nn.Module, name: str, value: object) -> None:
        if of is None or id(module) in of:
            registrations[0] += 1

    # torch's hooks for all modules of the process: other modules register too, so `of` selects.
    hooks = [register_module_parameter_registration_hook(count), register_module_module_registration_hook(count)]
    try:
        yield registrations
    finally:
        for hook in hooks:
            hook.remove()
