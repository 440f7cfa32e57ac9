"""The saved state of an optimizer, checked before the optimizer gets it: a fused kernel reads what shapes promise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from trainkit.checkpoint.sharded_state import StoredTensor
from trainkit.optim.chained_optimizer import ChainedOptimizer

_ADAM = ("step", "exp_avg", "exp_avg_sq")
_REQUIRED: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: (),
    **dict.fromkeys((Adam, torch.optim.AdamW, RAdam, SparseAdam), _ADAM),
    NAdam: (*_ADAM, "mu_product"),
    Adamax: ("step", "exp_avg", "exp_inf"),
    Adagrad: ("step", "sum"),
    Adadelta: ("step", "square_avg", "acc_delta"),
    RMSprop: ("step", "square_avg"),
    Rprop: ("step", "prev", "step_size"),
    ASGD: ("step", "eta", "mu", "ax"),
    **({torch.optim.Muon: ("momentum_buffer",)} if hasattr(torch.optim, "Muon") else {}),  # from torch 2.9 on
}
"""torch's optimizers that update each element by itself (Muon: each matrix), and their values of a parameter."""
_REQUIRED_BY_SETTING = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Values that are one number; the others have an element for each of the parameter's."""
_MOMENTS = frozenset({"momentum_buffer", *_REQUIRED_BY_SETTING.values()}.union(*_REQUIRED.values())) - _NUMBERS


def state_problem(optimizer: Optimizer, shapes: Sequence[torch.Size], saved: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a saved state of the optimizer, whose parameters have these shapes; `None` if nothing.

    The number and settings of its groups have been checked. Of an optimizer that is not torch's, only the memory of
    tensors is.
    """
    return next(_problems(optimizer, shapes, saved), None)


def _problems(optimizer: Optimizer, shapes: Sequence[torch.Size], saved: Mapping[str, Any]) -> Iterator[str]:
    groups, state, first = saved["param_groups"], saved["state"], 0
    if [index for group in groups for index in group["params"]] != list(range(len(shapes))):
        yield "param_groups do not number the parameters"
    for number, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        yield from _problems_of_group(own, group, f"param_groups[{number}]")
        one, last = optimizer, first + len(own["params"])
        if isinstance(optimizer, ChainedOptimizer):
            one = optimizer.optimizers[own["optimizer"]]
            if group["optimizer"] != own["optimizer"]:
                yield f"param_groups[{number}].optimizer is {group['optimizer']}, and {own['optimizer']} in this run"
        for index in range(first, last):
            if state.get(index):
                yield from _problems_of_parameter(one, group, state[index], shapes[index], f"state[{index}]")
        first = last
    for place, tensor in _tensors(state, "state"):
        if isinstance(optimizer, LBFGS) and tensor.shape not in _shapes_of_lbfgs(shapes):
            yield f"{place} has the shape {tuple(tensor.shape)}, not {_shapes_of_lbfgs(shapes)[1]}"
        if isinstance(tensor, Tensor) and not _has_own_memory(tensor):
            yield f"{place} has more elements than are saved"


def _problems_of_group(own: Mapping[str, Any], saved: Mapping[str, Any], place: str) -> Iterator[str]:
    for name in own:
        if name in saved and name not in ("params", "fused", "foreach") and not _is_alike(saved[name], own[name]):
            yield f"{place}.{name} is {_shown(saved[name])}, and {_shown(own[name])} in this run"


def _problems_of_parameter(
    one: Optimizer, group: Mapping[str, Any], values: Any, shape: torch.Size, place: str
) -> Iterator[str]:
    if not isinstance(values, dict):
        yield f"{place} is {_shown(values)}, not a mapping"
        return
    if type(one) in _REQUIRED:
        needed = [*_REQUIRED[type(one)], *(name for key, name in _REQUIRED_BY_SETTING.items() if group.get(key))]
        yield from (f"{place}.{name} is missing" for name in needed if name not in values)
    for name, value in values.items():
        if not _fits_parameter(one, name, value, shape):
            yield f"{place}.{name} is {_shown(value)}, and its parameter has the shape {tuple(shape)}"


def _fits_parameter(one: Optimizer, name: str, value: Any, shape: torch.Size) -> bool:
    """Return False if the optimizer cannot have this value of a parameter; True if it is not known."""
    is_tensor = isinstance(value, Tensor | StoredTensor)
    if isinstance(one, Adafactor) and is_tensor and value.dim():  # the means of rows or columns, or of all elements
        sizes = value.shape
        return len(sizes) == len(shape) and all(size in (1, own) for size, own in zip(sizes, shape, strict=True))
    if not isinstance(one, tuple(_REQUIRED)):
        return True
    if name in _NUMBERS:
        return _is_number(value)
    if name in _MOMENTS:
        return (is_tensor and value.shape == shape) or (value is None and isinstance(one, SGD))
    return True


def _shapes_of_lbfgs(shapes: Sequence[torch.Size]) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in its state: of all parameters, whose complex elements are two numbers."""
    total = sum(shape.numel() for shape in shapes)
    return [(), (total,), (2 * total,)]


def _is_alike(saved: Any, own: Any) -> bool:
    """Return True if a saved setting of a group can take the place of the group's own."""
    if own is None:
        return True
    if isinstance(own, str):
        return saved is None or isinstance(saved, str)
    if isinstance(own, (tuple, list)):
        is_list = isinstance(saved, (tuple, list)) and len(saved) == len(own)
        return is_list and all(map(_is_alike, saved, own))
    return _is_number(saved) if _is_number(own) else type(saved) is type(own)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor | StoredTensor):
        return value.shape in ((), (1,))
    return isinstance(value, Real) and not (isinstance(value, int) and abs(value) >= 2**1023)  # float() fails beyond


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Tensor | StoredTensor]]:
    """Yield all tensors in a state with their places; a file's containers are a tree, so each is visited once."""
    if isinstance(value, Tensor | StoredTensor):
        yield place, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple, set)):
        items = enumerate(value)
    for key, item in items:
        yield from _tensors(item, f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}")


def _has_own_memory(tensor: Tensor) -> bool:
    """Return True if all elements can be read from the first one on: kernels do so, whatever the strides are."""
    if tensor.is_meta:
        return False
    if tensor.layout is not torch.strided:
        return True
    stop = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return stop <= tensor.untyped_storage().nbytes()


def _shown(value: Any) -> str:
    if isinstance(value, Tensor | StoredTensor):
        return f"a tensor of the shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    return f"{value!r:.40}" if isinstance(value, str) else f"a value of the type {type(value).__name__}"
