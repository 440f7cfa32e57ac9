"""Operations inside a unit of tensor-parallel ranks: what is computed in parts, on whole tensors, or not at all.

Inside a unit every tensor is a DTensor, and has the values of the whole to the code of the module. Operations of a list
are left to DTensor. Others are computed on whole tensors if all ranks have these, and else refused: DTensor does not
know them, or, as of random numbers, items and writes in place, computes what one process would not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

# Private: see `Division`.
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trainkit.errors import UserError
from trainkit.tree import map_tensors, tensors_in


class NotDivisible(UserError):
    """An operation of a unit cannot be computed in parts."""

    def __init__(self, unit: str, reason: str) -> None:
        super().__init__(
            f"{unit} is computed by tensor-parallel ranks in parts, and {reason}, for the first time in this call. "
            "Set strategy.tensor_plan without its layers, or strategy.tensor_parallel=1."
        )
        self.reason = reason


class InParts(TorchFunctionMode):
    """Computes the operations of a unit whose tensors are DTensors."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _QUERIES or (name == "__get__" and function not in _OF_PARAMETERS):
            return function(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        distributed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        if not distributed:
            return function(*args, **kwargs)
        if any(tensor.requires_grad for tensor in tensors if not isinstance(tensor, DTensor)):
            raise NotDivisible(self._unit, "it uses a tensor from outside of the module that needs a gradient")
        if _writes(function, name, args, kwargs) or function in _OF_PARAMETERS:
            raise NotDivisible(
                self._unit, f"{name.strip('_')} changes a tensor in place, or reads its data or gradient"
            )
        mesh, are_whole = distributed[0].device_mesh, all(map(_is_whole, distributed))
        # Of the first tensor alone: the weight of a linear layer may have blocks.
        has_blocks = isinstance(distributed[0].placements[0], _StridedShard)
        if function is torch.cat:
            # torch takes an empty vector beside tensors of any shape, DTensor does not: a cache of keys begins so.
            args = [tensor for tensor in args[0] if tensor.shape != (0,)] or args[0], *args[1:]
        compute = None if are_whole else _IN_PARTS.get(function)
        if compute is not None and (computed := compute(mesh, function, *args, **kwargs)) is not None:
            return computed
        if function in _KNOWN and not has_blocks and (name != "__getitem__" or _is_simple(args[1])):
            return function(*args, **kwargs)
        if are_whole:
            return _on_whole_tensors(mesh, function, args, kwargs)
        raise NotDivisible(self._unit, f"it calls {name} of a tensor that is divided")


def _is_whole(tensor: DTensor) -> bool:
    return isinstance(tensor.placements[0], Replicate)


_QUERIES = {"size", "dim", "numel", "ndimension", "nelement", "is_floating_point", "is_complex", "is_contiguous"} | {
    "__len__",
    "__hash__",
    "__repr__",
}
"""Functions that need no values."""


def getter(name: str) -> Any:
    """Return the function by which an attribute of tensors is read, as modes see it."""
    attribute: Any = getattr(Tensor, name)
    return attribute.__get__


_OF_PARAMETERS = [getter("data"), getter("grad"), getter("is_leaf")]
_NAMES = """
    linear matmul bmm baddbmm addmm mm einsum add sub mul div true_divide neg pow square sqrt rsqrt exp log log1p abs
    reciprocal relu relu6 gelu silu tanh sigmoid softplus elu selu leaky_relu hardtanh hardswish hardsigmoid mish
    logsigmoid erf softmax log_softmax clamp clip where masked_fill maximum minimum sin cos layer_norm rms_norm mean sum
    view reshape flatten unflatten transpose permute contiguous expand expand_as unsqueeze squeeze swapaxes swapdims
    movedim cat stack chunk split unbind narrow select repeat_interleave to type type_as float double half bfloat16
    clone detach tril triu eq ne lt le gt ge logical_and logical_or logical_not sign zeros_like ones_like lerp addcmul
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __matmul__ __rmatmul__ __neg__ __pow__
    __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__ __getitem__
"""
_KNOWN = {
    getattr(space, name) for name in _NAMES.split() for space in (torch, Tensor, functional) if hasattr(space, name)
}
"""Functions whose results DTensor has been seen to compute right."""


_MAY_WRITE = {
    function for function in _KNOWN if "inplace" in getattr(getattr(function, "__code__", None), "co_varnames", ())
}


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = {f"__i{name}__" for name in _OPERATORS}


def _writes(function: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Return True for a function that changes a tensor in place."""
    if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or kwargs.get("out") is not None:
        return True
    if name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"):
        return True
    is_told = kwargs.get("inplace") is True or (function in _MAY_WRITE and any(value is True for value in args[1:]))
    return is_told or name in ("__setitem__", "__set__", "__delete__")


def _is_simple(index: Any) -> bool:
    """Return True for an index without tensors and lists."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, (int, slice, type(None), type(...))) for part in parts)


def _attention(mesh: DeviceMesh, function: Any, *args: Any, **kwargs: Any) -> DTensor:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, mask = (kwargs.pop(name, None) for name in names[:4])
    operands = [_distributed(tensor, mesh) for tensor in (query, key, value)]
    by_heads = Shard(query.dim() - 3)
    # DTensor knows no attention on CPUs. Dropout's numbers are those of all heads.
    are_apart = all(tensor.placements[0] == by_heads for tensor in operands) and not kwargs.get("dropout_p")
    placements = [by_heads if are_apart else Replicate()]
    if mask is not None:
        mask = _distributed(mask, mesh)
        if are_apart and mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.redistribute(mesh, [Shard(mask.dim() - 3)]).to_local()
        else:
            # Each rank has the gradient from its heads.
            gradient = [Partial()] if are_apart else [Replicate()]
            mask = mask.redistribute(mesh, [Replicate()]).to_local(grad_placements=gradient)
    local = [tensor.redistribute(mesh, placements).to_local() for tensor in operands]
    return DTensor.from_local(function(*local, mask, **kwargs), mesh, placements, run_check=False)


def _dropout(mesh: DeviceMesh, function: Any, input: DTensor, *args: Any, **kwargs: Any) -> Any:
    p, training, inplace = {**_DROPOUT, **dict(zip(_DROPOUT, args, strict=False)), **kwargs}.values()
    if inplace:
        return None
    if not training or not p:
        return input
    ones = torch.ones(input.shape, dtype=input.dtype, device=input.to_local().device)
    return input * replicated(function(ones, p), mesh)  # the numbers of the whole


def _chunk(mesh: DeviceMesh, function: Any, input: DTensor, chunks: int, dim: int = 0) -> Any:
    return _blocks(input, mesh, chunks, dim)


def _split(mesh: DeviceMesh, function: Any, tensor: DTensor, split_size: Any, dim: int = 0) -> Any:
    sizes = [split_size] * (tensor.shape[dim] // split_size) if isinstance(split_size, int) else split_size
    return _blocks(tensor, mesh, len(sizes), dim) if len(set(sizes)) == 1 else None


def _unflatten(mesh: DeviceMesh, function: Any, input: DTensor, dim: int, sizes: Sequence[int]) -> Any:
    (placement,) = input.placements
    dim %= input.dim()
    if len(sizes) < 2 or sizes[1] % mesh.size():
        return None
    if not isinstance(placement, _StridedShard) or (placement.dim, placement.split_factor) != (dim, sizes[0]):
        return None
    width = sizes[1] // mesh.size() if sizes[1] > 0 else -1
    local = function(input.to_local(), dim, (sizes[0], width, *sizes[2:]))
    return DTensor.from_local(local, mesh, [Shard(dim + 1)], run_check=False)


def _view(mesh: DeviceMesh, function: Any, input: DTensor, *sizes: Any) -> Any:
    shape: Sequence[int] = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    last = input.dim() - 1
    if not all(isinstance(size, int) for size in shape) or tuple(shape[:last]) != tuple(input.shape[:last]):
        return None
    return _unflatten(mesh, Tensor.unflatten, input, last, shape[last:])


def _blocks(tensor: DTensor, mesh: DeviceMesh, count: int, dim: int) -> tuple[DTensor, ...] | None:
    """Return the blocks of a tensor, such as queries, keys and values, if each rank has a part of every block."""
    (placement,) = tensor.placements
    dim %= tensor.dim()
    if not isinstance(placement, _StridedShard) or (placement.dim, placement.split_factor) != (dim, count):
        return None
    blocks = tensor.to_local().chunk(count, dim)
    return tuple(DTensor.from_local(block, mesh, [Shard(dim)], run_check=False) for block in blocks)


_DROPOUT = {"p": 0.5, "training": True, "inplace": False}  # its arguments
_IN_PARTS: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.dropout: _dropout,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.split: _split,
    Tensor.split: _split,
    torch.unflatten: _unflatten,
    Tensor.unflatten: _unflatten,
    Tensor.view: _view,
    Tensor.reshape: _view,
}
"""What is computed by this module; `None` is returned for what is not."""


def _on_whole_tensors(mesh: DeviceMesh, function: Any, args: Any, kwargs: Any) -> Any:
    """Return what a function makes of whole tensors, on every rank."""

    def local(tensor: Tensor) -> Tensor:
        return whole(tensor, mesh) if isinstance(tensor, DTensor) else tensor

    outputs = function(*map_tensors(args, local), **map_tensors(kwargs, local))
    return map_tensors(outputs, lambda tensor: replicated(tensor, mesh))


def whole(tensor: DTensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole tensor, on each rank; collective if it is divided."""
    # What follows is computed on every rank in the same way, and so is its gradient.
    return tensor.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Replicate()])


def replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the DTensor of a tensor that is the same on each rank."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _distributed(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return tensor if isinstance(tensor, DTensor) else replicated(tensor, mesh)
