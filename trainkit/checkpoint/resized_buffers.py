"""Buffers that get another shape in training: a bank of features, the range of an observer, one that was None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

RESIZED = "resized_buffers"
"""Key of a payload: the names of the buffers that have another shape than in a new task."""
Shapes = Mapping[str, torch.Size | None]


def buffer_shapes(task: nn.Module) -> dict[str, torch.Size | None]:
    """Return the shape of each buffer, also of one that is None or has no size yet."""
    return {
        f"{prefix}.{name}" if prefix else name: None if tensor is None or is_lazy(tensor) else tensor.shape
        for prefix, module in task.named_modules(remove_duplicate=False)
        # Private: `named_buffers` leaves out a buffer that is None.
        for name, tensor in module._buffers.items()
    }


def resized_names(state: Mapping[str, Any], first: Shapes, task: nn.Module) -> list[str]:
    """Return the names of tensors in a task's state that are no parameters, and had another shape at first."""
    parameters = {name for name, _ in task.named_parameters(remove_duplicate=False)}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in parameters}
    return [name for name, tensor in tensors.items() if first.get(name) != tensor.shape]


def resize_buffers(task: nn.Module, saved: Mapping[str, Any], names: Iterable[str], device: torch.device) -> None:
    """Give buffers the shapes of those that were saved; one that is None, or that the module lacks, is made."""
    modules = dict(task.named_modules(remove_duplicate=False))
    for name in names:
        prefix, _, key = name.rpartition(".")
        module, shape = modules.get(prefix), getattr(saved.get(name), "shape", None)
        # The name is a parameter's, or another attribute's: `check_state_dict` refuses it.
        if module is None or (key not in module._buffers and hasattr(module, key)):
            continue
        buffer = module._buffers.get(key)
        if shape is None:
            if name not in saved and key in module._buffers:
                # Private, since `register_buffer` would also change whether the buffer is persistent.
                module._buffers[key] = None
        elif buffer is None:
            module._buffers[key] = torch.zeros(shape, dtype=saved[name].dtype, device=device)
        elif not is_lazy(buffer) and buffer.shape != shape:
            buffer.data = buffer.new_zeros(shape)  # the same object, which others may refer to


def without_custom_loading(task: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state that torch's own `load_state_dict` copies as they are, key by key.

    Other modules load in their own way: by `_load_from_state_dict` or a hook.
    """
    # Private: torch has no public question for whether a module loads in its own way.
    prefixes = tuple(
        f"{prefix}." if prefix else "" for prefix, module in task.named_modules(remove_duplicate=False)
        if module._load_state_dict_pre_hooks
        or not type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
    )  # fmt: skip
    return {name: value for name, value in state.items() if not name.startswith(prefixes)} if prefixes else {**state}
