"""Running a task's step without anybody noticing afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import python_generators
from .structures import rebuild


@contextmanager
def unchanged(task: nn.Module) -> Iterator[None]:
    """Put back the task's buffers and the random generators when the block has ended."""
    places = [
        (module, name, buffer)
        for module in task.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    contents = [buffer.detach().clone() for _, _, buffer in places]
    python_state = python_generators.state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        python_generators.restore(python_state)
        with torch.no_grad():
            for (module, name, buffer), content in zip(places, contents, strict=True):
                module._buffers[name] = buffer
                if not buffer.is_meta:
                    buffer.copy_(content)


def with_tensors(batch: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with each of its tensors replaced."""
    return rebuild(batch, lambda leaf: replace(leaf) if isinstance(leaf, Tensor) else leaf)


def copied(batch: Any) -> Any:
    """Return the batch with copies of its tensors."""
    return with_tensors(batch, lambda tensor: tensor.detach().clone())
