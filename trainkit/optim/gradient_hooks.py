"""Check of hooks on gradients: with several ranks or backward passes they get parts of the gradient of a step.

hook(g0) + hook(g1) == hook(g0 + g1)      a factor, a mask, a projection: the same weights as in one batch
clamp(g0) + clamp(g1) != clamp(g0 + g1)   refused before the first step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.distributed.pickling import copied
from trainkit.errors import UserError
from trainkit.rng import preserve_rng

_FACTOR = 2.0**20
"""Larger than limits that people set, in proportion to a gradient of about 1."""
_TOLERANCE = 64
"""Units in the last place."""
_CALLS = 5
"""Of each hook."""


def check_gradient_hooks(task: nn.Module, *, num_ranks: int, num_backwards: int) -> None:
    """Raise UserError for a hook on a parameter that changes the sum of parts otherwise than the parts.

    The hooks are tried on copies of the task, so that their own state stays as it is.
    """
    hooked = [(name, p) for name, p in task.named_parameters() if p.requires_grad and (_before(p) or _after(p))]
    if num_ranks * num_backwards == 1 or not hooked:
        return
    names = {id(parameter) for _, parameter in hooked}
    others = [id(parameter) for parameter in task.parameters() if id(parameter) not in names]
    with preserve_rng():
        try:
            # With several backward passes a hook that counts its calls counts too many: one copy for all calls.
            copies = [copied(task, shared=others) for _ in range(_CALLS if num_backwards == 1 else 1)] * _CALLS
        except Exception:  # a task that cannot be copied, which is in no other process either
            return
        for name, parameter in hooked:
            if parameter.is_meta or not parameter.dtype.is_floating_point:
                continue
            for kind in (_before, _after):
                for key, hook in kind(parameter).items():
                    targets = [copy.get_parameter(name) for copy in copies[:_CALLS]]
                    calls = [_call_of(kind, key, target) for target in targets]
                    if not _is_exact(calls, targets[0], changes=kind is _before or num_backwards == 1):
                        raise _refusal(name, hook, num_ranks, num_backwards)


def _before(parameter: nn.Parameter) -> dict[int, Any]:
    return getattr(parameter, "_backward_hooks", None) or {}  # private, as torch lists hooks nowhere else


def _after(parameter: nn.Parameter) -> dict[int, Any]:
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def _call_of(kind: Any, key: int, parameter: nn.Parameter) -> Callable[[Tensor], Tensor | None]:
    """Return what a hook makes of a gradient; `None` if it also changes the parameter."""
    hook = kind(parameter)[key]

    def call(gradient: Tensor) -> Tensor | None:
        if kind is _before:
            returned: Tensor | None = hook(gradient)
            return gradient if returned is None else returned
        values, parameter.grad = parameter.detach().clone(), gradient
        hook(parameter)
        gradient_after, parameter.grad = parameter.grad, None
        return gradient_after if torch.equal(values, parameter) else None

    return call


def _is_exact(calls: Iterable[Callable[[Tensor], Tensor | None]], like: Tensor, *, changes: bool) -> bool:
    """Return True if calls of one hook are linear; without `changes`, if they leave gradients as they are."""
    first, second = torch.randn_like(like.detach()), torch.randn_like(like.detach())
    factor = min(_FACTOR, torch.finfo(like.dtype).max ** 0.5)
    inputs = (first, second, first + second, first * factor, torch.zeros_like(first))
    try:
        outputs = [call(gradient.clone()) for call, gradient in zip(calls, inputs, strict=True)]
    except Exception:  # of a hook that needs a forward pass before it; training raises the others
        return True
    if any(output is None for output in outputs):
        return False
    one, two, both, scaled, nothing = (output.detach() for output in outputs if output is not None)
    if not changes and not torch.equal(one, first):
        return False
    limit = _TOLERANCE * torch.finfo(like.dtype).eps * (both.norm() + one.norm() + two.norm())
    is_linear = bool((both - one - two).norm() <= limit) and bool((scaled / factor - one).norm() <= limit)
    return is_linear and not nothing.any()  # weight decay, which may be too small for the limit


def _refusal(name: str, hook: Any, num_ranks: int, num_backwards: int) -> UserError:
    parts = f"{num_ranks} ranks, {num_backwards} backward passes of each"
    return UserError(
        f"the hook {getattr(hook, '__qualname__', repr(hook))} on the gradient of {name!r} is called for parts of a "
        f"step's gradient ({parts}), and what it does is not the same on their sum. Clip by trainer.max_grad_norm or "
        "trainer.max_grad_value, change gradients by optimizer.register_step_pre_hook, or train with strategy=single "
        "strategy.accumulate=1."
    )
