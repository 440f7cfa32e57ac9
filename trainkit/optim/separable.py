"""Separable optimizers: those whose update of a parameter depends on no other parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.errors import UserError
from trainkit.optim.chained_optimizer import ChainedOptimizer
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.rng import preserve_rng
from trainkit.tree import tensors_in

_GRADIENT_SCALES = (1e-3, 1.0, 1e3)
"""Sizes of the gradients in the steps that are tried: the limit of a clipped norm is between two of them."""
_SIDE = 2
"""Elements of a copy in each dimension: enough for a norm, and 1000 parameters take milliseconds."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class SeparableCheck:
    """Refuses an optimizer that uses several parameters together, as the strategy's `setting` steps parts of them."""

    def __init__(self, setting: str, phase_optimizer: PhaseOptimizer) -> None:
        self.setting, self.optimizer = setting, phase_optimizer.optimizer
        if phase_optimizer.has_mode:
            raise UserError(
                f"{type(self.optimizer).__name__} counts its steps, and {setting}=true makes one for each part of the "
                f"parameters. Set strategy.{setting}=false."
            )
        self.hooks: list[Callable[..., Any]] | None = None
        """Hooks of the optimizer's steps that were tried."""
        self.check()

    def check(self) -> None:
        """Raise UserError if the optimizer or its present hooks use several parameters together."""
        # Trying copies takes milliseconds, and this runs between any two steps: only a new hook is tried.
        hooks = step_hooks(self.optimizer)
        if hooks == self.hooks:
            return
        culprit, self.hooks = coupled_by(self.optimizer), hooks
        if culprit is not None:
            raise UserError(
                f"{culprit} may use several parameters or gradients together, and {self.setting}=true steps the "
                "optimizer for parts of them. To clip gradients type trainer.max_grad_norm=1.0; otherwise set "
                f"strategy.{self.setting}=false."
            )


def coupled_by(optimizer: Optimizer, *, of_elements: bool = False) -> str | None:
    """Return the optimizer's class or step hooks that let an update depend on other parameters; `None` without any.

    With `of_elements`, also those that let the update of an element depend on other elements of its parameter.

    Steps of small copies of all parameters are compared with steps in which only some of them have a gradient. Nothing
    else changes: neither the optimizer, nor objects that its hooks refer to, nor random generators. Class and hooks of
    which no copy can make a step are returned too, with the reason.
    """
    optimizers = list(_optimizers_in(optimizer))
    classes = [type(member).__name__ for member in optimizers if not _is_of_torch(member)]
    hooks = [f"the step hook {_name(hook)}" for member in optimizers for hook in step_hooks(member)]
    # Classes first and without hooks, so that the message names the hooks only where they are the cause.
    for names, with_hooks in ((classes, False), (hooks, True)):
        if not names:
            continue
        description = " or ".join(dict.fromkeys(names))
        try:
            # A step may draw, and the trials seed the global generators.
            with preserve_rng():
                if _is_coupled(optimizer, with_hooks=with_hooks, of_elements=of_elements):
                    return description
        # Of the user's code, of which a copy may be impossible: what cannot be tried counts as coupled.
        except Exception as error:
            return f"{description}, which cannot be tried on copies ({type(error).__name__}: {error})"
    return None


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that an optimizer calls around each step."""
    # Torch has no public way to list them; wrappers of an optimizer may not have called its constructor.
    return [hook for name in _HOOKS for hook in vars(optimizer).get(name, {}).values()]


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _is_of_torch(optimizer: Optimizer) -> bool:
    is_chain = type(optimizer) is ChainedOptimizer
    # With a dot, as the module of Muon is `torch.optim` itself.
    is_torch = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    return (is_chain or is_torch) and _has_own_class_step(optimizer)


def _has_own_class_step(optimizer: Optimizer) -> bool:
    """Return False if a step was set on the object, other than by a learning-rate scheduler, which only counts."""
    # Private: torch's schedulers mark by this attribute the step that they put around the optimizer's.
    step = vars(optimizer).get("step")
    return step is None or hasattr(step, "_wrapped_by_lr_sched")


def _optimizers_in(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimizer and those that it wraps."""
    yield optimizer
    for value in vars(optimizer).values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, Optimizer):
                yield from _optimizers_in(item)


def _is_coupled(optimizer: Optimizer, *, with_hooks: bool, of_elements: bool) -> bool:
    masks = [torch.ones([min(size, _SIDE) for size in parameter.shape]) for parameter in _parameters(optimizer)]
    together = _tried(optimizer, masks, with_hooks=with_hooks, with_all=of_elements)
    # By the bits of their indices, of which any two differ in one: each two parameters are once in different parts, in
    # 2 log2(n) trials instead of n.
    parts = [
        [mask * ((index >> bit) & 1 == value) for index, mask in enumerate(masks)]
        for bit in range((len(masks) - 1).bit_length())
        for value in (0, 1)
    ]
    if of_elements:
        parts += [[_row(mask, index) for mask in masks] for index in range(_SIDE)]
    for part in parts:
        alone = _tried(optimizer, part, with_hooks=with_hooks, with_all=of_elements)
        for index, mask in enumerate(part):
            if mask.any() and _differ(*([value * mask for value in tried[index]] for tried in (together, alone))):
                return True
    return False


def _row(mask: Tensor, index: int) -> Tensor:
    """Return a mask of one row of a parameter, which is what a shard has of it."""
    row = torch.zeros_like(mask)
    if mask.dim():
        row[index : index + 1] = 1
    return row


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    listed = (parameter for group in optimizer.param_groups for parameter in group["params"])
    # By identity: `==` compares tensors by elements.
    return list({id(parameter): parameter for parameter in listed}.values())


def _tried(optimizer: Optimizer, part: Sequence[Tensor], *, with_hooks: bool, with_all: bool) -> list[list[Tensor]]:
    """Return the values of each parameter's copy, at first and after each step in which `part` has gradients.

    `part` has 1 where an element of a copy is part of it. The others are zeros, as are parameters that a strategy
    leaves out of memory; their gradients are zeros `with_all`, else None.
    """
    # A new copy for each trial: a step changes the moments and what the hooks count.
    clone, parameters = _clone(optimizer, with_hooks=with_hooks)
    generator = torch.Generator().manual_seed(0)  # its draws do not depend on `part`
    for parameter, mask in zip(parameters, part, strict=True):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * mask)
    values = [[parameter.detach().clone()] for parameter in parameters]
    # For steps that draw: each trial must draw the same. Any seed would do, here and above.
    torch.manual_seed(0)
    for scale in _GRADIENT_SCALES:
        for parameter, mask in zip(parameters, part, strict=True):
            gradient = (torch.randn(parameter.shape, generator=generator) * scale * mask).to(parameter)
            parameter.grad = gradient if (with_all or mask.any()) and parameter.requires_grad else None
        clone.step()
        for parameter, history in zip(parameters, values, strict=True):
            history.append(parameter.detach().clone())
    return values


def _clone(optimizer: Optimizer, *, with_hooks: bool) -> tuple[Optimizer, list[nn.Parameter]]:
    """Return a copy of an optimizer, of what it wraps and of what its hooks refer to, with copies of the parameters."""
    # The memo of `deepcopy`: what it has under the id of an object is taken in its place, wherever that is referred to.
    # The ids stay valid, as the optimizer holds the objects.
    memo: dict[int, Any] = {}
    optimizers = list(_optimizers_in(optimizer))
    parameters = [
        nn.Parameter(_small(original), requires_grad=original.requires_grad) for original in _parameters(optimizer)
    ]
    memo.update(zip(map(id, _parameters(optimizer)), parameters, strict=True))
    # All optimizers before any attribute, as they may refer to each other.
    for original in optimizers:  # torch's own deepcopy of an optimizer drops the attributes of a subclass
        memo[id(original)] = object.__new__(type(original))
        for tensor in tensors_in([list(vars(original).values()), list(vars(original).get("state", {}).values())]):
            memo.setdefault(id(tensor), _small(tensor))
    for original in optimizers:
        # Without the step that a scheduler has set on the object: it would step the original.
        attributes = {
            key: value for key, value in vars(original).items() if key != "step" or not _has_own_class_step(original)
        }
        hooks = {name: attributes.pop(name, {}) for name in _HOOKS}
        vars(memo[id(original)]).update(
            {key: _copied(value, memo) for key, value in attributes.items()},
            **{
                name: type(table)({key: _copied(hook, memo) for key, hook in table.items()} if with_hooks else {})
                for name, table in hooks.items()
            },
        )
    return memo[id(optimizer)], parameters


def _small(tensor: Tensor) -> Tensor:
    shape = [min(size, _SIDE) for size in tensor.shape]
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):  # such as a shard
        return torch.zeros(shape, dtype=tensor.dtype)
    return tensor.detach()[tuple(slice(size) for size in shape)].clone()


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, which for a function includes the variables around it that it refers to."""
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    # `deepcopy` returns a function as it is, with the variables of the original.
    cells = tuple(CellType(_copied(cell.cell_contents, memo)) for cell in value.__closure__ or ())
    defaults = copy.deepcopy(value.__defaults__, memo)
    function = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
    function.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__, memo)
    return function


def _differ(together: Sequence[Tensor], alone: Sequence[Tensor]) -> bool:
    """Return True if the updates of a parameter differ by more than rounding."""
    for index in range(1, len(together)):
        first, second = together[index].double(), alone[index].double()
        eps = torch.finfo(together[index].dtype).eps if together[index].is_floating_point() else 0.0
        update = (first - together[index - 1].double()).abs().amax() if first.numel() else first.sum()
        size = first.abs().amax() if first.numel() else first.sum()
        # What another order of sums explains: half the digits of the update, and some last digits of the value.
        bound = eps**0.5 * update + 16 * eps * size
        if not torch.equal(first.nan_to_num(), second.nan_to_num()) and bool(((first - second).abs() > bound).any()):
            return True
    return False
