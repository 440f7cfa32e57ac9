"""A task whose tensors have shapes and types but no elements, for as long as it takes to record a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_TENSORS = ("_parameters", "_buffers", "_modules")


@contextmanager
def faked(task: nn.Module) -> Iterator[None]:
    """Give the task fake parameters and buffers; afterwards it is what it was.

    What is computed with them is fake too, and on the CPU as far as the step can tell. What follows from the batch
    alone is computed, so that the step takes the same branches as ever. Whatever the step leaves in attributes of
    modules is dropped again, since it may be fake.
    """
    attributes = [(module, dict(module.__dict__)) for module in task.modules()]
    contents = [(module, [dict(getattr(module, kind)) for kind in _TENSORS]) for module in task.modules()]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            _replace_tensors(task)
        yield
    finally:
        for module, kept in attributes:
            module.__dict__.clear()
            module.__dict__.update(kept)
        for module, kinds in contents:
            for kind, content in zip(_TENSORS, kinds, strict=True):
                current = getattr(module, kind)
                current.clear()
                current.update(content)


def _replace_tensors(task: nn.Module) -> None:
    made: dict[int, Tensor] = {}  # a shared parameter stays one
    for module in task.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _fake(tensor)
                    held[name] = made[id(tensor)]  # type: ignore[assignment] # a parameter for a parameter


def _fake(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
