"""Replicas of a task on several devices, and the scatter of a batch to them.

    parameters of the task (master)       w ----+-- copies --+---> w on device 1 ---> loss 1
                                           |    |            +---> w on device 2 ---> loss 2
                                           +--> loss 0
    backward                              grad 0 + (grad 1 + grad 2), summed on the master in this order

A replica on the master's device shares the memory of trained parameters. Buffers and frozen parameters, such as an EMA
teacher's, are always copied, because a step may write to them; only replica 0, which is the task itself, keeps its
writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.devices import has_streams
from trainkit.task import TaskModule
from trainkit.tree import rows, tree_leaves

Phase = Callable[[str], AbstractContextManager[Any]]
# Private tables of nn.Module. A replica is filled without its constructor, which could do anything.
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # ends of the names of tables of hooks


def replicate(
    task: TaskModule, devices: Sequence[torch.device], *, phase: Phase, kept: Sequence[Mapping[int, Any]] = ()
) -> list[TaskModule]:
    """Return the task, which is on the first device, and a replica for each further device.

    Gradients of all replicas are added to the task's parameters. A replica's own attributes are lost with it, except
    those of modules in `kept`: for each further device, the replacements of modules, by id. `phase` is entered as
    "sum" while gradients are copied to the master and summed.
    """
    others = list(devices[1:])
    if not others:
        return [task]
    trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
    fixed = [parameter for parameter in task.parameters() if not parameter.requires_grad]
    copied: Sequence[Tensor] = ()
    if trained:
        # One call for all replicas: its backward gets all their gradients at once and adds them in a fixed order.
        copied = Broadcast.apply(devices, phase, *trained)  # type: ignore[no-untyped-call] # torch's own
    replicas: list[TaskModule] = [task]
    for index, device in enumerate(others):
        replacements: dict[int, Any] = dict(kept[index]) if kept else {}
        # `Broadcast` returns the copies device by device.
        copies = copied[index * len(trained) : (index + 1) * len(trained)]
        # By id: what two modules share stays shared in the replica. The task keeps all of them alive.
        replacements.update(zip(map(id, trained), copies, strict=True))
        with torch.no_grad():
            # A copy also on the same device: a step may write to these.
            replacements.update((id(tensor), tensor.to(device, copy=True)) for tensor in (*fixed, *task.buffers()))
        replicas.append(_replica(task, replacements))
    return replicas


class Broadcast(torch.autograd.Function):
    """Copies parameters to each further device; backward sums their gradients on the master."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], phase: Phase, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.devices, ctx.phase, ctx.num_parameters = devices, phase, len(parameters)
        ctx.set_materialize_grads(False)  # a parameter that no replica uses has no gradient
        return tuple(copy for device in devices[1:] for copy in _copies(parameters, device))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        master, count = ctx.devices[0], ctx.num_parameters
        with ctx.phase("sum"):
            sums: list[Tensor | None] = [None] * count
            for start in range(0, len(gradients), count):
                _add(sums, gradients[start : start + count], master)
        return None, None, *sums


def _add(sums: list[Tensor | None], gradients: Sequence[Tensor | None], master: torch.device) -> None:
    """Add one replica's gradients to the sums."""
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    moved = _moved([gradient for gradient in gradients if gradient is not None], master)
    for index, gradient in zip(present, moved, strict=True):
        total = sums[index]
        # Not in place: the first gradient is a tensor of autograd, which may be used elsewhere.
        sums[index] = gradient if total is None else total + gradient


def _copies(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on `device`: copies, or on the same device tensors that share their memory."""
    # `forward` must not return its inputs; a detached tensor is another object with the same memory.
    return [tensor.detach() for tensor in _moved(tensors, device)]


def _moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on `device`; those of one dtype are moved with one copy."""
    moved = list(tensors)
    away: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device == device:
            continue
        # Sparse gradients cannot be concatenated.
        if tensor.layout is torch.strided:
            away.setdefault(tensor.dtype, []).append(index)
        else:
            moved[index] = tensor.to(device)
    for indices in away.values():
        # One copy costs one launch and one transfer, where a copy of each tensor waits for the latency of each.
        flat = torch.cat([tensors[index].reshape(-1) for index in indices]).to(device, non_blocking=has_streams(device))
        pieces = flat.split([tensors[index].numel() for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            moved[index] = piece.view(tensors[index].shape)
    return moved


def _replica(task: TaskModule, replacements: dict[int, Any]) -> TaskModule:
    """Return a copy of the task's structure in which `replacements` maps the ids of objects to their replacements."""
    modules = [module for module in task.modules() if id(module) not in replacements]
    for module in modules:
        # All modules first: an attribute may refer to a module that comes later.
        replacements[id(module)] = object.__new__(type(module))
    for module in modules:
        state = module.__dict__
        replica = replacements[id(module)]
        replica.__dict__.update({name: _mapped(value, replacements) for name, value in state.items()})
        for table in _TABLES:
            # Not by `_mapped`: the first entry may be None, such as an absent bias.
            replica.__dict__[table] = {name: replacements.get(id(value), value) for name, value in state[table].items()}
        for name, value in state.items():
            if name.endswith(_HOOKS) and type(value) is OrderedDict:  # which its step may register and remove
                replica.__dict__[name] = OrderedDict((key, _mapped(hook, replacements)) for key, hook in value.items())
        replica.__dict__["_compiled_call_impl"] = None  # it would call the original
    copied: TaskModule = replacements[id(task)]
    return copied


def _mapped(value: Any, replacements: dict[int, Any]) -> Any:
    """Return the replacement of an attribute, including bound methods and containers of tensors or modules."""
    if id(value) in replacements:
        return replacements[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, replacements.get(id(value.__self__), value.__self__))
    kind = type(value)
    # Exact types only: a subclass may have another constructor.
    if kind in (list, tuple) and value and _may_be_replaced(value[0]):
        return kind(_mapped(item, replacements) for item in value)
    if kind in (dict, OrderedDict) and value and _may_be_replaced(next(iter(value.values()))):
        return kind((key, _mapped(item, replacements)) for key, item in value.items())
    return value


def _may_be_replaced(value: Any) -> bool:
    """Return True if a container that begins with `value` is searched; a vocabulary of 50 000 words is not."""
    return isinstance(value, (Tensor, nn.Module, MethodType))


def scatter(batch: Any, count: int, *, num_shards: int) -> list[tuple[Any, int]]:
    """Return consecutive shards of a batch of `count` samples with their numbers of samples, which differ by at most 1.

    A batch with anything but tensors of one row per sample is not split: a value of the whole batch would count twice.
    """
    # No shard is empty: a mean over no samples is not a number.
    num_shards = min(num_shards, count)
    is_rows = all(
        leaf.dim() > 0 and leaf.shape[0] == count if isinstance(leaf, Tensor) else leaf is None
        for leaf in tree_leaves(batch)
    )
    if num_shards < 2 or not is_rows:
        return [(batch, count)]
    small, larger = divmod(count, num_shards)
    shards, start = [], 0
    for index in range(num_shards):
        size = small + (index < larger)
        shards.append((rows(batch, slice(start, start + size), of=count), size))
        start += size
    return shards
