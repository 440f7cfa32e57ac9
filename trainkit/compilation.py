"""Compiling a task's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainkit.task import TaskModule


def compile_forward(task: TaskModule) -> None:
    """Leave the task's forward to `torch.compile`, in place, so that the names in its state dict stay as they are.

    A task without a forward of its own has each of its direct sub-modules compiled instead.
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
