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
from trainkit.optim.chained_optimizer import ChainedOptimizer, members

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

    The number of its groups and the names of their settings have been checked. Of an optimizer with a step of its own,
    not fused, only the memory of tensors is.
    """
    try:
        problem = next(_problems(optimizer, shapes, saved), None)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        # An altered value of another kind, such as a tensor in place of a flag, fails where it is compared.
        problem = f"{type(error).__name__}: {error}"
    # Cut, as values of an altered file may stand in the message.
    return None if problem is None else f"{problem:.300}"


def _problems(optimizer: Optimizer, shapes: Sequence[torch.Size], saved: Mapping[str, Any]) -> Iterator[str]:
    groups, state, first = saved["param_groups"], saved["state"], 0
    if [index for group in groups for index in group["params"]] != list(range(len(shapes))):
        yield "param_groups do not number the parameters"
    for number, (run_group, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        member, last = optimizer, first + len(run_group["params"])
        if isinstance(optimizer, ChainedOptimizer):
            member = optimizer.optimizers[run_group["optimizer"]]
            if not isinstance(group["optimizer"], int) or group["optimizer"] != run_group["optimizer"]:
                yield f"param_groups[{number}].optimizer is not {run_group['optimizer']}, as in this run"
        if _reads_as_torch(member):
            for index in range(first, last):
                # A parameter without a gradient so far has no state.
                if index in state:
                    yield from _problems_of_parameter(member, group, state[index], shapes[index], f"state[{index}]")
        first = last
    is_torchs = any(map(_reads_as_torch, members(optimizer)))
    # Memory is bounded for every optimizer: an expanded tensor of a few bytes is written out where it is copied. One
    # with a step of its own may have such tensors, up to the size of the largest parameter.
    most_expanded = 0 if is_torchs else max((shape.numel() for shape in shapes), default=0)
    for path, tensor in _tensors(state, "state"):
        if is_torchs and isinstance(optimizer, LBFGS) and tensor.shape not in ((), (_size_of_lbfgs(optimizer),)):
            yield f"{path} has the shape {tuple(tensor.shape)}, not {(_size_of_lbfgs(optimizer),)}"
        if isinstance(tensor, Tensor) and (tensor.is_meta or tensor.numel() > max(_num_saved(tensor), most_expanded)):
            yield f"{path} has more elements than are saved"


def _reads_as_torch(member: Optimizer) -> bool:
    """Return True for an optimizer of torch, and for a subclass with the same step or with torch's fused kernel."""
    has_same_step = type(member).step.__module__.startswith("torch.optim.")
    is_fused = any(group.get("fused") for group in member.param_groups)
    return isinstance(member, (*_REQUIRED, Adafactor, LBFGS)) and (has_same_step or is_fused)


def _problems_of_parameter(
    member: Optimizer, group: Mapping[str, Any], values: Any, shape: torch.Size, path: str
) -> Iterator[str]:
    if not isinstance(values, dict):
        yield f"{path} is {_shown(values)}, not a mapping"
        return
    kind = next((kind for kind in type(member).__mro__ if kind in _REQUIRED), None)
    # A step initializes a state that is empty, and takes any other for complete.
    if kind is not None and values:
        needed = [*_REQUIRED[kind], *(name for key, name in _REQUIRED_BY_SETTING.items() if group.get(key))]
        yield from (f"{path}.{name} is missing" for name in needed if name not in values)
    for name, value in values.items():
        if not _fits_parameter(member, name, value, shape):
            yield f"{path}.{name} is {_shown(value)}, and its parameter has the shape {tuple(shape)}"


def _fits_parameter(member: Optimizer, name: str, value: Any, shape: torch.Size) -> bool:
    """Return False if the optimizer cannot have this value of a parameter; True if it is not known."""
    is_tensor = isinstance(value, Tensor | StoredTensor)
    if isinstance(member, Adafactor) and is_tensor and value.dim():  # the means of rows or columns, or of all elements
        sizes = value.shape
        return len(sizes) == len(shape) and all(size in (1, full) for size, full in zip(sizes, shape, strict=True))
    if not isinstance(member, tuple(_REQUIRED)):
        return True
    if name in _NUMBERS:
        return _is_number(value)
    # `None` before the first gradient, and sparse for sparse gradients.
    if name in _MOMENTS and isinstance(member, SGD):
        return value is None or (is_tensor and value.shape == shape)
    if name in _MOMENTS:
        return is_tensor and value.shape == shape and _is_dense(value)
    return True


def _size_of_lbfgs(optimizer: LBFGS) -> int:
    """Return the size of the tensors in its state: of all parameters, whose complex elements are two numbers."""
    return sum((1 + parameter.is_complex()) * parameter.numel() for parameter in optimizer.param_groups[0]["params"])


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor | StoredTensor):
        return value.shape in ((), (1,)) and _is_dense(value) and not value.dtype.is_complex
    return isinstance(value, Real) and not (isinstance(value, int) and abs(value) >= 2**1023)  # float() fails beyond


def _is_dense(value: Tensor | StoredTensor) -> bool:
    return isinstance(value, StoredTensor) or (
        value.layout is torch.strided and not value.is_quantized and not value.is_meta
    )


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor | StoredTensor]]:
    """Yield all tensors in a state with their places; a file's containers are a tree, so each is visited once."""
    if isinstance(value, Tensor | StoredTensor):
        yield path, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple, set)):
        items = enumerate(value)
    for key, item in items:
        yield from _tensors(item, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}")


def _num_saved(tensor: Tensor) -> int:
    """Return how many elements can be read from the first one on: kernels do so, whatever the strides are."""
    # Tensors of other layouts have no storage to ask.
    if tensor.layout is not torch.strided:
        return tensor.numel()
    return int(tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset())


def _shown(value: Any) -> str:
    if isinstance(value, Tensor | StoredTensor):
        return f"a tensor{'' if _is_dense(value) else ' without plain values,'} of the shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    return f"{value!r:.40}" if isinstance(value, str) else f"a value of the type {type(value).__name__}"
