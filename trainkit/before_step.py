"""What a step changes besides parameters, so that it can be made as if it had not been."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainkit.metrics.sync import preserve_state, restore
from trainkit.rng import rng_state, set_rng_state

_PLAIN = (bool, int, float, str, type(None))


class BeforeStep:
    """The random generators, the buffers of a task and the states of its metrics, as they are now.

    Args:
        task: Whose steps are made.
        metrics: The metric objects that it has.
        counters: Whether to put back plain attributes of modules too, such as a number of calls.

    """

    def __init__(self, task: nn.Module, metrics: Sequence[nn.Module], *, counters: bool = False) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in task.buffers()]
        self._metrics = preserve_state(metrics)
        self._plain = [(module, _plain(module)) for module in task.modules()] if counters else []
        self._rng = rng_state()

    def put_back(self) -> None:
        """Let everything be as it was."""
        self.put_back_state()
        set_rng_state(self._rng)

    def put_back_state(self) -> None:
        """Let buffers, metrics and counters be as they were; random numbers that were drawn stay drawn."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        restore(self._metrics)
        for module, attributes in self._plain:
            vars(module).update(attributes)


def _plain(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
