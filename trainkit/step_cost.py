"""What a forward of the training step costs, by module: operations, and memory that waits for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.module_scopes import module_scopes
from trainkit.rng import rng_untouched

if TYPE_CHECKING:
    from trainkit.task import TaskModule


@dataclass
class StepCost:
    """Sums for each module with all that it calls; the task itself is `""`."""

    flops: Counter[str] = field(default_factory=Counter)
    """Floating-point operations of one forward: a multiplication and an addition are two."""
    saved_bytes: Counter[str] = field(default_factory=Counter)
    """What a forward keeps for backward, parameters left out."""


def cost_of_step(task: TaskModule, batch: Any) -> StepCost:
    """Return the cost of `task.training_step(batch)`, which runs once in evaluation mode; nothing of the task changes.

    Attention, matrix products and convolutions are counted, as by torch's own counter; elementwise operations are not.
    """
    cost = StepCost()
    modes = {module: module.training for module in task.modules()}
    task.eval()
    try:
        with rng_untouched(), torch.enable_grad(), module_scopes(task) as scopes:
            kept = _Kept(cost, scopes, {parameter.untyped_storage().data_ptr() for parameter in task.parameters()})
            with saved_tensors_hooks(kept.pack, lambda tensor: tensor), _Counting(cost, scopes):
                task.training_step(batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return cost


class _Kept:
    """Counts each storage that backward will read once, for the module that kept it first."""

    def __init__(self, cost: StepCost, scopes: list[str], known: set[int]) -> None:
        self._cost, self._scopes, self._known = cost, scopes, known
        self._alive: list[Tensor] = []  # or the memory of one that is gone would be taken for another

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._alive.append(tensor)
            _count(self._cost.saved_bytes, self._scopes, storage.nbytes())
        return tensor


class _Counting(TorchDispatchMode):
    def __init__(self, cost: StepCost, scopes: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's constructor is not annotated
        from torch.utils.flop_counter import flop_registry

        self._cost, self._scopes, self._registry = cost, scopes, flop_registry

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        formula: Callable[..., Any] | None = self._registry.get(func._overloadpacket)
        if formula is not None:
            _count(self._cost.flops, self._scopes, int(formula(*args, **(kwargs or {}), out_val=returned)))
        return returned


def _count(sums: Counter[str], scopes: list[str], amount: int) -> None:
    for name in {"", *scopes}:
        sums[name] += amount
