"""Compiling a task's forward."""

from __future__ import annotations

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
        module.compile()
