"""What torch calls take: operations, bytes, and whether they draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .events import Cost
from .structures import tensors

_PROBABILITIES = ("p", "dropout_p", "dropout")
"""Names of arguments with which a random call draws nothing where they are 0."""


class CallCounter(TorchDispatchMode):
    """Adds up floating-point operations, bytes written and calls; `num_draws` counts calls that may draw numbers."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)  # mypy takes `super().__init__` for an untyped call of ours
        self.total = Cost()
        self.num_draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        if not func.is_view and func.namespace != "prim":  # which asks fake tensors for their devices
            self.total.num_calls += 1
            self.total.moved_bytes += sum(num_bytes(tensor) for tensor in tensors(result))
        if torch.Tag.nondeterministic_seeded in func.tags and _may_draw(func, args, kwargs or {}):
            self.num_draws += 1
        return result


def _may_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    asked = [given.get(name, defaults[name]) for name in _PROBABILITIES if name in defaults]
    return not asked or any(asked)


def estimated_seconds(cost: Cost) -> float:
    """Return about how long a forward takes: operations, memory traffic, and a price for each call."""
    return cost.flops / 3e10 + cost.moved_bytes / 5e9 + cost.num_calls * 5e-6


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
