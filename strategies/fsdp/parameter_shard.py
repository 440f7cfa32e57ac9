"""ParameterShard: a parameter of which each rank has a shard; using the shard as the whole raises UserError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from trainkit.errors import UserError
from trainkit.tree import tensors_in

from .tensor_operations import getter
from .tensor_plan import Division


@dataclass(eq=False)
class ParameterShard:
    """A parameter of the task, and the elements of it that this rank holds.

        between steps         task.a.weight is `sharded`     guarded: has shape, type, hooks and gradient, no values
        while its unit runs   task.a.weight is `gathered`    autograd computes its gradient and calls the hooks
        in a whole task       task.a.weight is `original`    what the user built

    All of them have the same Python attributes.
    """

    name: str
    original: nn.Parameter
    """Empty while the task is sharded."""
    sharded: nn.Parameter
    """A DTensor."""
    local: nn.Parameter
    """The elements of this rank, in the memory of `sharded`; the optimizer's parameter."""
    shape: torch.Size
    """Of the whole parameter."""
    division: Division | None = None
    """How the parameter is divided over tensor-parallel ranks, before it is sharded over others."""
    gathered: nn.Parameter | None = None
    """Known from the first forward of its unit on."""

    def share_attributes(self) -> None:
        """Give `sharded` and `local` the attributes of the original, now and later."""
        attributes = vars(self.original) | vars(self.sharded)  # torch marks a DTensor as a parameter by an attribute
        for tensor in (self.original, self.sharded, self.local):
            tensor.__dict__ = attributes

    def attach(self, gathered: nn.Parameter) -> None:
        """Let the parameter that autograd sees have the attributes and hooks of the original."""
        self.gathered = gathered
        _set_class(gathered, _Gathered if self.division is None else Part)
        gathered.__dict__ = vars(self.original)
        if self.division is not None:
            _SHARDS[id(gathered)] = self
        self._share_hooks()

    def add_hook(self, register: Callable[[Tensor, Any], RemovableHandle], hook: Any) -> RemovableHandle:
        """Register a hook on the gradient of the whole parameter."""
        if self.division is not None:
            raise UserError(
                f"a hook on the gradient of {self.name} would get a part of it, as tensor-parallel ranks divide the "
                "parameter. Set strategy.tensor_plan without its layer, or strategy.tensor_parallel=1."
            )
        with torch._C.DisableTorchFunctionSubclass():  # `original` is guarded
            self.original.requires_grad_(self.sharded.requires_grad)  # torch refuses hooks without a gradient
            handle = register(self.original, hook)
        self._share_hooks()
        return handle

    def _share_hooks(self) -> None:
        # The dictionaries themselves, in which handles remove their hooks; private, as torch has no other way.
        with torch._C.DisableTorchFunctionSubclass():
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(self.original, name)
                if self.gathered is not None and hooks is not None:
                    setattr(self.gathered, name, hooks)

    def guard(self) -> None:
        """Let every use of the values of `original` and `sharded` raise UserError."""
        _SHARDS[id(self.original)] = _SHARDS[id(self.sharded)] = self
        _set_class(self.original, _Replaced)
        _set_class(self.sharded, _GuardedShard)
        try:
            self.sharded.detach()
        except UserError:
            return
        _set_class(self.sharded, _ShardGuardedByMode)

    def unguard(self) -> None:
        """Make `original` and `sharded` ordinary tensors."""
        _set_class(self.original, nn.Parameter)
        _set_class(self.sharded, DTensor)


_SHARDS: WeakValueDictionary[int, ParameterShard] = WeakValueDictionary()
"""By the ids of `original` and `sharded`, which the shard keeps alive."""


class _GuardedShard(DTensor):
    """A DTensor whose values cannot be used. What needs no values costs the same as that of a DTensor."""

    __slots__ = ()  # or the class of a DTensor could not be changed to it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch calls it as this
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _uses_values(function):
            raise refusal(*_shards_in(args, kwargs))
        return super().__torch_dispatch__(function, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _refuse(self, *args: Any) -> Any:
        raise refusal(self)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override] # of the whole parameter, as user code expects
        return _SHARDS[id(self)].shape

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the whole parameter, or the size of a dimension."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements of the whole parameter."""
        return self.shape.numel()

    data = property(_refuse, _refuse)  # assigned, it would not reach the shard
    numpy = tolist = __reduce_ex__ = _refuse  # type: ignore[assignment] # they raise errors of torch, or pickle a shard

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the whole parameter, of which each rank has a shard: that of `local`."""
        gradient = _SHARDS[id(self)].local.grad
        return None if gradient is None else like(self, gradient)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None and not isinstance(gradient, DTensor):
            raise refusal(self)
        _SHARDS[id(self)].local.grad = None if gradient is None else gradient.to_local()

    def register_hook(self, hook: Any) -> RemovableHandle:
        """Register a hook on the gradient of the whole parameter."""
        return _SHARDS[id(self)].add_hook(Tensor.register_hook, hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> RemovableHandle:
        """Register a hook that is called with the whole parameter after its gradient was accumulated."""
        return _SHARDS[id(self)].add_hook(Tensor.register_post_accumulate_grad_hook, hook)


class _Guard(TorchDispatchMode):
    """Checks the operations of a function that is called with a shard."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shards = _shards_in(args, kwargs)
        if shards and _uses_values(function):
            raise refusal(*shards)
        return function(*args, **(kwargs or {}))


class _ShardGuardedByMode(_GuardedShard):
    """A guarded shard for a torch that computes on a DTensor of any class without a call of Python, as 2.11 does.

    What needs no values is a call of Python then: 7 to 12 microseconds for a shape.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass(), _Guard():  # type: ignore[no-untyped-call]
            return function(*args, **(kwargs or {}))


class _Gathered(nn.Parameter):
    """A gathered parameter, of which changes by `data` are seen: they would be lost."""

    def _read(self) -> Tensor:
        return self.detach()  # which counts changes together with the parameter, as that of torch does not

    def _refuse(self, values: Tensor) -> None:
        raise UserError(
            f"the data of a parameter of shape {tuple(self.shape)} was assigned during a step, where it is a gathered "
            "copy of its shards: the change would be lost. Change parameters in a callback's on_step_end, in `with "
            "run.whole_task() as task:`, or set strategy=single."
        )

    data = property(_read, _refuse)


# What PyTorch calls while it gathers parameters, and what needs no values.
_HARMLESS = ("__get__", "__set__", "__delete__", "untyped_storage", "requires_grad_", "element_size", "dim")
_GRADIENT = getter("grad")
_VIEWS = [getter(name) for name in ("T", "H", "mT", "mH", "real", "imag")]


class Part(_Gathered):
    """A gathered part of a parameter that tensor-parallel ranks divide; only its unit can use the whole."""

    is_in_step: ClassVar[bool] = False
    """True while code of the user runs, which would take the gradient for that of the whole."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_gradient_of_step = cls.is_in_step and function == _GRADIENT
        if function.__name__ not in _HARMLESS or function in _VIEWS or is_gradient_of_step:
            part = next(tensor for tensor in tensors_in([args, kwargs]) if isinstance(tensor, Part))
            name = _SHARDS[id(part)].name
            raise UserError(
                f"{name} is used outside of the module that tensor-parallel ranks compute together, or recomputed in "
                "backward by a checkpoint inside of it, and each rank has a part of it. Put a checkpoint around the "
                "module; else set strategy.tensor_plan without its layer, or strategy.tensor_parallel=1."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @property
    def shape(self) -> torch.Size:  # type: ignore[override] # of the whole parameter, as user code expects
        return _SHARDS[id(self)].shape

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the whole parameter, or the size of a dimension."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements of the whole parameter."""
        return self.shape.numel()


class _Replaced(nn.Parameter):
    """A parameter that is not part of the task now."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise refusal(*(tensor for tensor in tensors_in([args, kwargs]) if type(tensor) is _Replaced))


def _uses_values(operation: Any) -> bool:
    name = operation.overloadpacket.__name__
    return not (name.endswith("_like") or name.startswith("new_"))


def _shards_in(*arguments: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(arguments) if isinstance(tensor, _GuardedShard)]


def _set_class(tensor: Any, kind: type[Tensor]) -> None:
    tensor.__class__ = kind


def refusal(*tensors: Tensor) -> UserError:
    """Return the error of a use of one of these `original` or `sharded` parameters."""
    shard = _SHARDS.get(id(tensors[0])) if tensors else None
    return UserError(
        f"{'a parameter' if shard is None else shard.name} is used as a whole, where each rank has a shard of it under "
        "strategy=fsdp. In a callback use, on every rank: `with run.whole_task() as task:`, in which the task has all "
        "values, and what rank 0 changes in place is written back to every shard. In a step use it by its module's "
        "attribute, in the forward of its unit, or set strategy.units=[], with which all parameters are whole during a "
        "step. Or set strategy=ddp."
    )


def like(sharded: Tensor, local: Tensor) -> DTensor:
    """Return the DTensor on the mesh's devices of which each rank has the elements `local`, sharded as `sharded`."""
    assert isinstance(sharded, DTensor)
    shape = torch.Size(Tensor.size(sharded))  # of this tensor-parallel rank's part
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=shape, stride=sharded.stride()
    )
