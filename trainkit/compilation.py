"""Compiling a task's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compile_forward(task: nn.Module) -> None:
    """Compile the task's forward with `torch.compile`, in place: the names in its state dict stay as they are.

    For a task without a forward of its own, each direct child module is compiled instead.
    """
    if type(task).forward is not nn.Module.forward:
        task.compile()
        return
    for module in task.children():
        _compile_call(module)


def _compile_call(module: nn.Module) -> None:
    """Compile a module's call as `module.compile()` does, also where the module is one of torch's own."""
    call = module._call_impl

    def inlined(*inputs: Any, **named: Any) -> Any:
        # A frame outside torch: the compiler passes over calls whose outermost frame is torch's.
        return call(*inputs, **named)  # type: ignore[no-untyped-call] # torch does not annotate it

    module._compiled_call_impl = torch.compile(inlined)
