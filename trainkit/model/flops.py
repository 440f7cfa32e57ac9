"""FLOPs and activation memory of a training step, by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
    """Yield a list with the names of the modules that are running, the innermost last."""
    scopes: list[str] = []
    handles: list[Any] = []
    for name, module in root.named_modules():
        handles += [
            module.register_forward_pre_hook(partial(_enter, scopes, name)),
            module.register_forward_hook(partial(_leave, scopes), always_call=True),
        ]
    try:
        yield scopes
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class StepCost:
    """Sums for each module with all that it calls; the task itself is `""`."""

    flops: Counter[str] = field(default_factory=Counter)
    """Floating-point operations of one forward of each step: a multiplication and an addition are two."""
    saved_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that a forward keeps for backward, without parameters; the maximum over phases."""


def cost_of_step(task: TaskModule, batch: Any, *, steps: Sequence[str] = ("training_step",)) -> StepCost:
    """Return the cost of a task's step, or of the steps of its phases; the task does not change.

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
                of_step = StepCost()
                saved = _SavedTensors(of_step, scopes, set(parameters))
                count = partial(_count, of_step.flops, scopes)
                with saved_tensors_hooks(saved.pack, lambda tensor: tensor), FlopCount(count):
                    getattr(task, name)(batch)
                cost.flops += of_step.flops
                cost.saved_bytes |= of_step.saved_bytes
    finally:
        for module, mode in modes.items():
            module.training = mode
    return cost


def steps_of(task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> list[str]:
    """Return the names of the methods that a training step calls; those of a manual task if it declares them."""
    return [part.step_name for part in phase_optimizers if callable(getattr(task, part.step_name, None))]


class _SavedTensors:
    """Counts each storage that backward will read once, for the module that saved it first."""

    def __init__(self, cost: StepCost, scopes: list[str], known: set[int]) -> None:
        self._cost, self._scopes, self._known = cost, scopes, known
        self._alive: list[Tensor] = []  # or the address of a freed storage would be taken for a known one

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._alive.append(tensor)
            _count(self._cost.saved_bytes, self._scopes, storage.nbytes())
        return tensor


class FlopCount(TorchDispatchMode):
    """While entered, calls `add` with the FLOPs of each operation of this thread, backward included."""

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


def _enter(scopes: list[str], name: str, *_: Any) -> None:
    scopes.append(name)


def _leave(scopes: list[str], *_: Any) -> None:
    scopes.pop()


def _count(sums: Counter[str], scopes: list[str], amount: int) -> None:
    for name in {"", *scopes}:
        sums[name] += amount
