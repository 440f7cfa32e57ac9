"""State of a module that a call changes, preserved: a repeated batch or a trial must leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainkit.metrics.sync import metrics_in, preserve_state, restore
from trainkit.rng import preserve_rng


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Restore buffers, metrics, random generators and numbers in attributes of modules at the end."""
    # Counters such as `num_calls`: a step without samples must not be counted.
    numbers = [
        (vars(part), {name: value for name, value in vars(part).items() if isinstance(value, (int, float))})
        for part in module.modules()
    ]
    buffers = [
        (part._buffers, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    metrics = preserve_state(metrics_in(module))
    try:
        with preserve_rng():
            yield
    finally:
        restore(metrics)
        for attributes, values in numbers:
            attributes.update(values)
        with torch.no_grad():
            for table, name, buffer, content in buffers:
                # The step may have written to the buffer, or have put another one in its place.
                table[name] = buffer.copy_(content)
