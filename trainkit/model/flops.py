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
from trainkit.task import evaluation_mode

if TYPE_CHECKING:
    from trainkit.task import TaskModule


@contextmanager
def module_scopes(root: nn.Module) -> Iterator[list[str]]:
    """Put modules into evaluation mode, and yield a list with the names of those that run, the innermost last.

    At the end of the block modes, buffers and random generators are restored.
    """
    scopes: list[str] = []
    handles: list[Any] = []
    # A forward may write its buffers in evaluation mode too.
    written = [buffer for buffer in root.buffers() if buffer.layout is torch.strided]
    buffers = [(buffer, buffer.detach().clone()) for buffer in written]
    for name, module in root.named_modules():
        handles += [
            module.register_forward_pre_hook(partial(_enter, scopes, name)),
            # Also for a forward that raises, or its name would stay on the list.
            module.register_forward_hook(partial(_leave, scopes), always_call=True),
        ]
    try:
        with evaluation_mode(root), preserve_rng():
            yield scopes
    finally:
        with torch.no_grad():
            for buffer, values in buffers:
                if not torch.equal(buffer, values):  # a write would count as a change
                    buffer.copy_(values)
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
    parameters = {parameter.untyped_storage().data_ptr() for parameter in task.parameters()}
    # Callers may be inside no_grad, where nothing is saved for backward.
    with torch.enable_grad(), module_scopes(task) as scopes:
        for name in steps:
            # A copy of the addresses: what one step saves counts again in the next one.
            of_step = _cost_of(partial(getattr(task, name), batch), scopes, storage_addresses=set(parameters))
            cost.flops += of_step.flops
            cost.saved_bytes |= of_step.saved_bytes
    return cost


def _cost_of(step: Callable[[], Any], scopes: list[str], *, storage_addresses: set[int]) -> StepCost:
    """Return the cost of one step; each storage that backward will read counts once, where it was saved first."""
    cost = StepCost()
    alive: list[Tensor] = []  # or the address of a freed storage would be taken for a known one

    def pack(tensor: Tensor) -> Tensor:
        # By the storage: several views of one tensor need its memory once.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storage_addresses:
            storage_addresses.add(storage.data_ptr())
            alive.append(tensor.detach())
            _count(cost.saved_bytes, scopes, storage.nbytes())
        # Or the result of an operation would be held by its own graph: a cycle, if backward does not run.
        return tensor.detach() if tensor.requires_grad else tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), FlopCount(partial(_count, cost.flops, scopes)):
        step()
    return cost


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
        # Private: torch's counter looks formulas up by the packet of all
        # overloads, which an operator has under this name.
        formula: Callable[..., Any] | None = self._registry.get(func._overloadpacket)
        if formula is not None:
            self._add(int(formula(*args, **(kwargs or {}), out_val=returned)))
        return returned


def _enter(scopes: list[str], name: str, *_: Any) -> None:
    scopes.append(name)


def _leave(scopes: list[str], *_: Any) -> None:
    scopes.pop()


def _count(sums: Counter[str], scopes: list[str], amount: int) -> None:
    # A set: a module that calls itself is on the list twice, and counts once.
    for name in {"", *scopes}:
        sums[name] += amount
