"""What a forward of the training step costs, by module: operations, and memory that waits for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.rng import preserve_rng

if TYPE_CHECKING:
    from trainkit.optim.optimizer import PhaseOptimizer
    from trainkit.task import TaskModule


@contextmanager
def module_scopes(root: nn.Module) -> Iterator[list[str]]:
    """Yield a list that holds, while modules run, the names of those being called, the innermost last."""
    scopes: list[str] = []
    handles: list[Any] = []
    for name, module in root.named_modules():
        handles += [
            module.register_forward_pre_hook(_entering(scopes, name)),
            module.register_forward_hook(lambda *_: _leave(scopes), always_call=True),
        ]
    try:
        yield scopes
    finally:
        for handle in handles:
            handle.remove()


def _entering(scopes: list[str], name: str) -> Callable[..., None]:
    return lambda *_: scopes.append(name)


def _leave(scopes: list[str]) -> None:
    scopes.pop()


@dataclass
class StepCost:
    """Sums for each module with all that it calls; the task itself is `""`."""

    flops: Counter[str] = field(default_factory=Counter)
    """Floating-point operations of one forward of each step: a multiplication and an addition are two."""
    saved_bytes: Counter[str] = field(default_factory=Counter)
    """What a forward keeps for backward, parameters left out; the most that one of several phases keeps."""


def cost_of_step(task: TaskModule, batch: Any, *, steps: Sequence[str] = ("training_step",)) -> StepCost:
    """Return the cost of a task's step, or of those of its phases; nothing of the task changes.

    The methods in `steps` are called with the batch once each, in evaluation mode. Attention, matrix products and
    convolutions are counted, as by torch's own counter; elementwise operations are not.
    """
    cost = StepCost()
    modes = {module: module.training for module in task.modules()}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in task.parameters()}
    task.eval()
    try:
        with preserve_rng(), torch.enable_grad(), module_scopes(task) as scopes:
            for name in steps:
                own = StepCost()
                kept = _Kept(own, scopes, set(parameters))
                with saved_tensors_hooks(kept.pack, lambda tensor: tensor), FlopCount(_adding_to(own, scopes)):
                    getattr(task, name)(batch)
                cost.flops += own.flops
                cost.saved_bytes |= own.saved_bytes
    finally:
        for module, mode in modes.items():
            module.training = mode
    return cost


def steps_of(task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> list[str]:
    """Return the methods that a step of training calls; those of a manual task only as far as they are known."""
    return [part.step_name for part in phase_optimizers if callable(getattr(task, part.step_name, None))]


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


class FlopCount(TorchDispatchMode):
    """While open, calls `add` with the floating-point operations of each call that this thread makes, backwards too."""

    def __init__(self, add: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's constructor is not annotated
        from torch.utils.flop_counter import flop_registry

        self._add, self._registry = add, flop_registry

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
            self._add(int(formula(*args, **(kwargs or {}), out_val=returned)))
        return returned


def _adding_to(cost: StepCost, scopes: list[str]) -> Callable[[int], None]:
    return lambda amount: _count(cost.flops, scopes, amount)


def _count(sums: Counter[str], scopes: list[str], amount: int) -> None:
    for name in {"", *scopes}:
        sums[name] += amount
