"""Parameters of a task that was built on the meta device, made where they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from trainkit.errors import UserError

RESETS = ("reset_parameters", "_reset_parameters")


def has_meta(task: nn.Module) -> bool:
    """Return whether any parameter or buffer has no elements yet."""
    return any(tensor.is_meta for tensor in chain(task.parameters(), task.buffers()))


def materialize(
    task: nn.Module,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    keep: Callable[[str], bool] = lambda name: True,
) -> None:
    """Leave every parameter and buffer that lay on the meta device with the values of its module's own reset.

    Each module's `reset_parameters` draws from a generator seeded by `seed` and the module's name, so the values do not
    depend on what else is made: stages that each `keep` a part have together what one process has. What is not kept
    has its shape, but only one element. Raises UserError for a module that cannot reset itself.
    """
    names = {id(tensor): name for name, tensor in chain(task.named_parameters(), task.named_buffers())}
    owned = {id(tensor) for tensor in chain(task.parameters(), task.buffers()) if tensor.is_meta}
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    # Children before parents, which may have more to say; of modules that share a parameter the first one last.
    for prefix, module in reversed(list(task.named_modules())):
        direct = [tensor for tensor in _direct_tensors(module) if id(tensor) in owned]
        reached = direct or [tensor for tensor in chain(module.parameters(), module.buffers()) if id(tensor) in owned]
        if not any(keep(names[id(tensor)]) for tensor in reached):
            continue
        reset = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
        if reset is None:
            if direct:
                raise _cannot_reset(module, prefix, names[id(direct[0])])
            continue
        for tensor in direct:
            if tensor.is_meta:
                _become(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(_seed_of(seed, prefix))
            reset()
    for tensor in list(chain(task.parameters(), task.buffers())):
        if id(tensor) in owned and not keep(names[id(tensor)]):
            _become(tensor, torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape))


def _direct_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _become(tensor: Tensor, content: Tensor) -> None:
    """Give a tensor other contents on another device; it stays the same object, which an optimizer may know."""
    if isinstance(tensor, nn.Parameter):
        content = nn.Parameter(content, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, content)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "big")


def _cannot_reset(module: nn.Module, prefix: str, name: str) -> UserError:
    return UserError(
        f"'{name}' lies on the meta device, and {type(module).__name__}{f' ({prefix})' if prefix else ''} does not say "
        "what it begins with. Define reset_parameters(self) there, which fills the module's own parameters and "
        "buffers in place, or build the task outside of torch.device('meta')."
    )
