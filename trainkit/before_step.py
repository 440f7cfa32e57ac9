"""What a step changes besides parameters, so that it can be made as if it had not been."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import nn

from trainkit.metrics.sync import preserve_state, restore

_PLAIN = (bool, int, float, str, type(None))


class BeforeStep:
    """The random generators, the buffers of a task and the states of its metrics, as they are now.

    Args:
        task: Whose steps are made.
        metrics: The metric objects that it has.
        counters: Whether to put back plain attributes of modules too, such as a number of calls.

    """

    def __init__(self, task: nn.Module, metrics: Sequence[nn.Module], *, counters: bool = False) -> None:
        import numpy as np

        self._buffers = [(buffer, buffer.detach().clone()) for buffer in task.buffers()]
        self._metrics = preserve_state(metrics)
        self._plain = [(module, _plain(module)) for module in task.modules()] if counters else []
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back(self) -> None:
        """Let everything be as it was."""
        self.put_back_state()
        self._put_back_generators()

    def put_back_state(self) -> None:
        """Let buffers, metrics and counters be as they were; random numbers that were drawn stay drawn."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        restore(self._metrics)
        for module, attributes in self._plain:
            vars(module).update(attributes)

    def _put_back_generators(self) -> None:
        import numpy as np

        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def _plain(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
