"""The state of a whole task and its optimizer, of which each stage holds a part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .placement import Placement


def gather_state(task: nn.Module, placement: Placement, *, stage: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the task's state dict, complete in stage 0: each stage sends what it holds. Collective over stages."""
    state: dict[str, Any] = task.state_dict()
    names = _canonical_names(task)
    for key, own in list(state.items()):
        source = placement.holders[names[key]][0] if key in names else 0
        if source == 0:
            continue
        if stage == source:
            dist.send(own.cpu().contiguous(), group=group, group_dst=0)
        elif stage == 0:
            whole = torch.empty(own.shape, dtype=own.dtype)
            dist.recv(whole, group=group, group_src=source)
            state[key] = whole
    return state


def load_own_state(task: nn.Module, placement: Placement, saved: dict[str, Any], *, stage: int) -> None:
    """Give the task what `stage` holds of a whole state dict."""
    current = task.state_dict()
    if set(current) != set(saved):
        task.load_state_dict(saved)  # raises with the names that differ
    names = _canonical_names(task)
    with torch.no_grad():
        for key, tensor in current.items():
            if key in names and placement.is_held(names[key], stage):
                tensor.copy_(saved[key])


def make_whole(task: nn.Module, placement: Placement, *, group: dist.ProcessGroup) -> None:
    """Leave every parameter and buffer complete in host memory on every stage. Collective over stages."""
    for name, tensor in (*task.named_parameters(), *task.named_buffers()):
        source = placement.holders[name][0]
        held = placement.is_held(name, group.rank())
        content = tensor.detach().cpu().contiguous() if held else torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.broadcast(content, group=group, group_src=source)
        tensor.data = content


def gather_optimizer_state(optimizer: Optimizer, *, stage: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the optimizer's state dict, complete in stage 0. Collective over stages."""
    state: dict[str, Any] = optimizer.state_dict()
    parts: list[Any] = [None] * group.size()
    dist.gather_object(state["state"], parts if stage == 0 else None, group=group, group_dst=0)
    if stage == 0:
        whole = {index: found for part in reversed(parts) for index, found in part.items()}
        state["state"] = dict(sorted(whole.items()))
    return state


def load_own_optimizer_state(
    optimizer: Optimizer, task: nn.Module, placement: Placement, saved: dict[str, Any], *, stage: int
) -> None:
    """Give the optimizer the state of the parameters that `stage` holds."""
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {
        index: state
        for index, state in saved["state"].items()
        if placement.is_held(names[id(parameters[index])], stage)
    }
    optimizer.load_state_dict({**saved, "state": own})


def keep_own_optimizer_state(
    optimizer: Optimizer, task: nn.Module, placement: Placement, *, stage: int, device: torch.device
) -> None:
    """Drop the state of parameters that `stage` does not hold, and move the rest to `device`."""
    for name, parameter in task.named_parameters():
        if parameter not in optimizer.state:
            continue
        if not placement.is_held(name, stage):
            del optimizer.state[parameter]
            continue
        state = optimizer.state[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:  # step counts stay where they are
                state[key] = value.to(device)


def _canonical_names(task: nn.Module) -> dict[str, str]:
    """Return for each key of the state dict the first name of the parameter or buffer there."""
    first = {id(tensor): name for name, tensor in (*task.named_parameters(), *task.named_buffers())}
    state = task.state_dict(keep_vars=True)
    return {key: first[id(tensor)] for key, tensor in state.items() if id(tensor) in first}
