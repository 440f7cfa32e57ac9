"""Absent tensors: those of other stages, which have name, shape and type, and raise where their values are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import UserError
from trainkit.tree import tensors_in

from ..trace.interceptor import FREEZING, METADATA, function_name

_WITHOUT_VALUES = (
    METADATA
    | FREEZING
    | {f"{name}_like" for name in ("zeros", "ones", "empty", "full", "rand", "randn")}
    | {f"new_{name}" for name in ("zeros", "ones", "empty", "full", "tensor")}
    # Private ones too: `register_hook` assigns these to the tensor.
    | {"register_hook", "register_post_accumulate_grad_hook", "_backward_hooks=", "_post_accumulate_grad_hooks="}
)
"""Calls that need no values of the tensor."""
_PLACE = "_trainkit_place"
"""Attribute of an absent tensor: where it is, in words."""


class AbsentTensors:
    """The tensors of a task that this rank does not hold.

    Each stays the same object, which optimizers and users may have; only its class changes. So it costs nothing in a
    step, and `readable` gives the class back for code that reads the zeros in its place.
    """

    def __init__(self) -> None:
        self._classes: dict[int, tuple[Tensor, type[Tensor]]] = {}  # by identity
        self._left: dict[str, Tensor] = {}
        """What the last step has left in attributes of other stages: placeholders, or values of an earlier step."""

    def add(self, places: Mapping[str, str], named: Mapping[str, Tensor]) -> None:
        """Make the named tensors absent; `places` tells where each of them is."""
        for name, tensor in named.items():
            # Only once, or the class to give back would be the absent one. The entry keeps the tensor, and so its id.
            if id(tensor) not in self._classes:
                self._classes[id(tensor)] = tensor, type(tensor)
                setattr(tensor, _PLACE, f"run.task.{name} is on {places[name]}")
        self._mark()

    def hide(self, place: str, name: str, tensor: Tensor) -> Tensor:
        """Return an absent tensor for one that the step has left; that of an earlier step is forgotten."""
        last = self._left.get(name)
        # The entry of the last one goes, or each step would add a tensor that is kept for the whole run.
        if tensor is last:
            return tensor
        if last is not None:
            # From both: an attribute that holds another absent tensor next gets no entry of its own.
            del self._classes[id(last)], self._left[name]
        # A new object: the step uses its placeholders again, which must stay readable for it.
        if id(tensor) not in self._classes:
            tensor = self._left[name] = tensor.detach()
            self.add({name: place}, {name: tensor})
        return tensor

    def clear(self) -> None:
        """Make all of them ordinary tensors."""
        self._unmark()  # first: without the entries no class can be given back
        self._classes.clear()
        self._left.clear()

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Let the tensors be read and written in the block; their values are zeros, in one element of memory."""
        self._unmark()
        try:
            yield
        finally:
            self._mark()

    def _mark(self) -> None:
        for tensor, original in self._classes.values():
            tensor.__class__ = _absent(original)

    def _unmark(self) -> None:
        for tensor, original in self._classes.values():
            tensor.__class__ = original


@cache
def _absent(original: type[Tensor]) -> type[Tensor]:
    """Return the class of absent tensors that are of class `original` where they are held."""

    def torch_function(
        cls: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function_name(function) not in _WITHOUT_VALUES:
            raise _refusal(next(tensor for tensor in tensors_in([args, kwargs]) if hasattr(tensor, _PLACE)))
        # As torch's own subclasses call what they let pass; else this function would be called again.
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def set_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None:
            raise _refusal(tensor)

    namespace = {
        "__torch_function__": classmethod(torch_function),
        "__repr__": lambda tensor: f"<{getattr(tensor, _PLACE)}>",
        # A property, as optimizers ask for it in every step, and a torch function costs ten times as much.
        "grad": property(lambda tensor: None, set_gradient),
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    # A subclass, so that `isinstance` stays true, and by the metaclass that `Parameter` has.
    metaclass: Any = type(original)
    absent: type[Tensor] = metaclass(original.__name__, (original,), namespace)
    return absent


def _refusal(tensor: Tensor) -> UserError:
    return UserError(
        f"{getattr(tensor, _PLACE)}: its values are not here. Use, on every rank: `with run.whole_task() as task:`, in "
        "which the task has all of its values, and what rank 0 changes in place is written back to every stage; or "
        "type strategy=ddp."
    )
