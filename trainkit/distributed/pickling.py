"""Pickling of a run for other processes: the copy of a task has all that the task has.

    modules, tensors, hooks, functions ──> bytes ──> copy      outline of the task == outline of the copy

Beyond plain pickle: tensors of one storage have one storage in the copy, views of a parameter pass gradients on to it,
tensors keep hooks and attributes, parametrized modules and weak references are rebuilt, and functions without an
importable name, such as a hook that is a lambda, are sent with their variables. Tensors of an accelerator are copied to
the CPU: each rank moves its task to its own device.
"""

from __future__ import annotations

import io
import pickle
import sys
import weakref
from collections.abc import Collection, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.utils import parametrize
from torch.storage import TypedStorage
from torch.utils.hooks import RemovableHandle, unserializable_hook

from trainkit.errors import UserError

T = TypeVar("T")

_PROTOCOL = 5  # buffers are written without a copy
_MAX_ITEMS, _MAX_DEPTH = 1000, 3  # of containers in which an outline has the tensors
_REMEDY = "or start the program with torchrun, whose ranks build the task themselves"
_OWN_STATE = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")


def pickled(call: object, *, main_by_value: bool = False) -> bytes:
    """Return `call` as bytes for `unpickled`; raises UserError, which names what cannot be pickled.

    With `main_by_value`, the functions and classes of the main module are sent too, as other processes cannot import a
    notebook.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, main_by_value=main_by_value)
    try:
        pickler.dump(call)
        # By the same pickler, so that the roots are those in the call.
        pickler.dump((RemovableHandle.next_id, [(root, _outline(root)) for root in pickler.roots]))
    except Exception as error:  # of any type: objects define how they are pickled
        raise UserError(
            f"the run cannot be sent to other processes: {_part_named(pickler.roots)}{error}. Build it without what "
            f"cannot be pickled, such as locks, open files and generators: make that on each rank, in a callback's "
            f"on_fit_start; {_REMEDY}."
        ) from error
    return file.getvalue()


def unpickled(content: bytes) -> Any:
    """Return what `pickled` was called with; raises UserError if a module of the copy is not what it was."""
    unpickler = pickle.Unpickler(io.BytesIO(content))
    call = unpickler.load()
    next_id, outlines = unpickler.load()
    # Hooks have numbers that are unique in a process: one that is registered here must not get that of another.
    RemovableHandle.next_id = max(RemovableHandle.next_id, next_id)
    for module, outline in outlines:
        _check_outline(module, outline)
    return call


def copied(module: T, *, shared: Collection[int] = ()) -> T:
    """Return a copy of a module, with all hooks.

    Classes, functions without variables of others, and the tensors whose ids are in `shared` are not copied.
    """
    file = io.BytesIO()
    pickler = _Copier(file, frozenset(shared))
    pickler.dump(module)
    copy: T = _CopyUnpickler(io.BytesIO(file.getvalue()), pickler.shared).load()
    if isinstance(module, nn.Module) and not shared:
        _check_outline(copy, _outline(module))
    return copy


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """A pickler of runs; `roots` has the modules that were pickled, without those inside of them."""

    def __init__(self, file: io.BytesIO, *, main_by_value: bool = False) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.roots: list[nn.Module] = []
        self._modules: set[int] = set()
        self._storages: dict[tuple[str, int], UntypedStorage] = {}
        self._main_by_value = main_by_value

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is rebuilt; NotImplemented for the ways of plain pickle."""
        if isinstance(value, Tensor):
            return _reduced_tensor(value)
        if isinstance(value, nn.Module):
            return self._reduced_module(value)
        if isinstance(value, FunctionType):
            return self._reduced_function(value)
        if isinstance(value, type):
            is_importable = _is_importable(value) and not self._is_of_main(value)
            return NotImplemented if is_importable else super().reducer_override(value)
        reduce = _REDUCERS.get(type(value))
        if reduce is not None:
            return reduce(value)
        return self._reduced_storage(value) if isinstance(value, UntypedStorage) else NotImplemented

    def _reduced_storage(self, storage: UntypedStorage) -> Any:
        if not storage.nbytes():
            return UntypedStorage, (0,)
        # A storage may have several objects, as those of one numpy array.
        first = self._storages.setdefault((str(storage.device), storage.data_ptr()), storage)
        if first is not storage and first.nbytes() == storage.nbytes():
            # The same object again, so that tensors that share memory share it in the copy too.
            return _same, (first,)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
        return _storage_of, (pickle.PickleBuffer(flat.numpy().data),)

    def _reduced_module(self, module: nn.Module) -> Any:
        # By id, as modules may define `==`. The call holds them all, so that no id is used a second time.
        if id(module) not in self._modules:
            self.roots.append(module)
            self._modules.update(map(id, module.modules()))
        kind = type(module)
        if not parametrize.is_parametrized(module) or _is_importable(kind):
            return NotImplemented
        # A class that torch made for this module, which refuses to be pickled.
        original = kind.__bases__[0]
        state = original.__getstate__(module)  # type: ignore[call-arg] # a bound method to type checkers
        return _without_init, (original,), state, None, None, _parametrize

    def _reduced_function(self, function: FunctionType) -> Any:
        by_value = self._is_of_main(function)
        if not by_value and _is_importable(function):
            return NotImplemented
        module = sys.modules.get(function.__module__)
        if by_value or module is None or function.__globals__ is not vars(module):
            return super().reducer_override(function)
        # cloudpickle would copy the globals: the copy would not see what changes in its module.
        fields = ("__defaults__", "__kwdefaults__", "__qualname__", "__dict__")
        state = {name: getattr(function, name) for name in fields}
        parts = function.__module__, function.__code__, function.__name__, function.__closure__
        return _function_of, parts, state, None, None, _set_fields

    def _is_of_main(self, value: Any) -> bool:
        return self._main_by_value and value.__module__ == "__main__"


class _Copier(_Pickler):
    """A pickler for this process; `shared` has what is not copied."""

    def __init__(self, file: io.BytesIO, tensors: frozenset[int]) -> None:
        super().__init__(file)
        self.shared: list[Any] = []
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        """Return the index of a value in `shared`; None for what is copied."""
        is_plain = isinstance(value, FunctionType) and value.__closure__ is None
        if is_plain or isinstance(value, type) or id(value) in self._tensors:
            self.shared.append(value)
            return len(self.shared) - 1
        return None


class _CopyUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, index: int) -> Any:
        return self._shared[index]


class _PartPickler(_Pickler):
    """A pickler of one part of a module, without the modules that it refers to."""

    def persistent_id(self, value: Any) -> str | None:
        """Return a mark for a module; None for what is pickled."""
        return "module" if isinstance(value, nn.Module) else None


def _part_named(roots: list[nn.Module]) -> str:
    """Return the name of the first part of a module that cannot be pickled, before a message; empty if none is."""
    for root in roots:
        for prefix, module in root.named_modules():
            for key, value in vars(module).items():
                parts = value.items() if isinstance(value, dict) else [("", value)]
                for name, part in parts:
                    try:
                        _PartPickler(io.BytesIO()).dump(part)
                    except Exception:  # the one that the caller reports
                        places = (type(root).__name__, prefix, key.strip("_"), str(name))
                        return f"{'.'.join(filter(None, places))}: "
    return ""


# ---- Tensors


def _reduced_tensor(tensor: Tensor) -> Any:
    kind = type(tensor)
    # Private, as torch has no public way to read the hooks of a tensor.
    hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    if kind is nn.Parameter:
        build: Any = nn.Parameter, (tensor.data, tensor.requires_grad)
    elif kind is not Tensor:
        if tensor._backward_hooks:
            tensor = tensor.detach()  # torch warns about hooks, which it drops
        reduced = tensor.__reduce_ex__(_PROTOCOL)
        if not any(hooks) or len(reduced) > 2:
            return reduced
        return *reduced, (tensor.requires_grad, *hooks, {}), None, None, _finish_tensor
    elif tensor.grad_fn is not None:
        build = _reduced_result(tensor)
    else:
        build = tensor.detach().__reduce_ex__(_PROTOCOL)  # without hooks, of which torch warns
    attributes = vars(tensor)
    if not tensor.requires_grad and not attributes:
        return build
    # As state, after the tensor is there: hooks may refer to it and to the task.
    return *build, (tensor.requires_grad, *hooks, attributes), None, None, _finish_tensor


def _reduced_result(tensor: Tensor) -> Any:
    """Return how the result of a differentiable operation is rebuilt."""
    # Private, as torch has no public name for the tensor that a view was taken of.
    base = tensor._base
    if base is not None and base.is_leaf and base.requires_grad and base.dtype == tensor.dtype:
        return _view_of, (base, tuple(tensor.size()), tensor.stride(), tensor.storage_offset())
    return _result, (tensor.detach(), str(tensor.grad_fn).split(" ", 1)[0].lstrip("<"))


def _finish_tensor(tensor: Tensor, state: tuple[bool, Any, Any, dict[str, Any]]) -> None:
    requires_grad, backward_hooks, post_hooks, attributes = state
    if tensor.grad_fn is None:
        tensor.requires_grad_(requires_grad)
    # The dictionaries themselves, in which handles remove their hooks; private, as torch has no other way.
    if backward_hooks is not None:
        tensor._backward_hooks = backward_hooks
        if tensor.grad_fn is not None:
            tensor._register_hook_dict(backward_hooks)  # type: ignore[attr-defined]
    if post_hooks is not None:
        tensor._post_accumulate_grad_hooks = post_hooks
    vars(tensor).update(attributes)


def _view_of(base: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    with torch.enable_grad():
        return base.as_strided(size, stride, offset)


def _result(value: Tensor, operation: str) -> Tensor:
    """Return a tensor that a constructor computed; a gradient that reaches it would be lost, so it raises UserError."""

    def refuse(gradient: Tensor) -> None:
        raise UserError(
            f"the gradient reached a tensor of shape {tuple(value.shape)} that the task's constructor computed from "
            f"parameters ({operation}) and keeps in an attribute; other processes have its value, not its graph. "
            f"Compute it in the step, {_REMEDY}."
        )

    unserializable_hook(refuse)  # or torch warns where the tensor is copied once more
    value.requires_grad_().register_hook(refuse)
    return value


def _storage_of(content: bytearray) -> UntypedStorage:
    # Copied to where torch aligns its memory: results may depend on it in the last bit.
    return torch.frombuffer(content, dtype=torch.uint8).clone().untyped_storage()


def _typed_storage(storage: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # or torch warns that it is deprecated


# ---- Modules, functions and references


def _without_init(kind: type[T]) -> T:
    return kind.__new__(kind)


def _parametrize(module: nn.Module, state: Any) -> None:
    """Set the state of a module, and give it a class with properties for its parametrized tensors."""
    module.__setstate__(state)
    parametrizations = module._modules["parametrizations"]
    assert isinstance(parametrizations, nn.ModuleDict)
    # Private: torch's public function would register the parametrizations a second time.
    parametrize._inject_new_class(module)
    for name in parametrizations:
        parametrize._inject_property(module, name)


def _function_of(module: str, code: CodeType, name: str, closure: tuple[CellType, ...] | None) -> FunctionType:
    __import__(module)
    return FunctionType(code, vars(sys.modules[module]), name, closure=closure)


def _set_fields(target: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        setattr(target, name, value)


def _fill_cell(cell: CellType, contents: tuple[Any]) -> None:
    cell.cell_contents = contents[0]


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _reduced_cell(cell: CellType) -> Any:
    contents = _contents(cell)
    return (CellType, (), contents, None, None, _fill_cell) if contents else (CellType, ())


def _reduced_reference(reference: weakref.ref[Any]) -> Any:
    target = reference()
    return (_dead_reference, ()) if target is None else (weakref.ref, (target,))


class _Gone:
    """The target of dead references."""


def _dead_reference() -> weakref.ref[Any]:
    return weakref.ref(_Gone())


def _same(value: T) -> T:
    return value


_REDUCERS: dict[type, Any] = {
    TypedStorage: lambda storage: (_typed_storage, (storage._untyped_storage, storage.dtype)),
    CellType: _reduced_cell,
    weakref.ReferenceType: _reduced_reference,
}


def _is_importable(value: Any) -> bool:
    """Return True if a class or function is what its module has by its name."""
    target: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        target = getattr(target, part, None)
    return target is value


# ---- Comparison


def _outline(root: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what a copy of a module must have, by the names of its modules and tensors."""
    outline: dict[str, dict[str, Any]] = {}
    names: dict[int, str] = {}
    addresses: dict[int, str] = {}
    for prefix, module in root.named_modules():
        module_path = prefix or type(root).__name__
        fields = vars(module)
        tables = {key: len(table) for key, table in fields.items() if "_hooks" in key and isinstance(table, dict)}
        # A class that defines how it is pickled may leave out attributes on purpose.
        keeps_all = all(getattr(type(module), name, None) is getattr(nn.Module, name, None) for name in _OWN_STATE)
        outline[module_path] = {
            "modules": {
                name: names.setdefault(id(child), f"{prefix}.{name}") for name, child in module._modules.items()
            },
            "mode": "train" if module.training else "eval",
            **{name.lstrip("_"): count for name, count in tables.items()},
            "attributes": set(fields) if keeps_all else set(),
        }
        for name, tensor in _tensors(fields, prefix, _MAX_DEPTH):
            outline[name] = _outline_of(tensor, name, names, addresses)
    return outline


def _outline_of(tensor: Tensor, name: str, names: dict[int, str], addresses: dict[int, str]) -> dict[str, Any]:
    is_strided = tensor.layout is torch.strided and not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter)
    # By address, as one storage may have several objects.
    address = tensor.untyped_storage().data_ptr() if is_strided else 0
    attributes = getattr(tensor, "__dict__", {})
    return {
        "type": type(tensor).__name__,
        "same tensor": names.setdefault(id(tensor), name),
        "storage": addresses.setdefault(address, name) if address else None,
        "offset": tensor.storage_offset() if is_strided else 0,
        "strides": tensor.stride() if is_strided else (),
        "shape": None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "hooks": len(tensor._backward_hooks or ()) if tensor.is_leaf else None,
        "hooks after accumulation": len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()),
        "attributes": set(attributes),
    }


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested lists, tuples and dictionaries, with their names."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth and isinstance(value, (list, tuple, dict)) and len(value) <= _MAX_ITEMS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(item, (Tensor, list, tuple, dict)):
                part = "" if key in ("_parameters", "_buffers") else str(key)
                yield from _tensors(item, ".".join(filter(None, (name, part))), depth - 1)


def _check_outline(module: Any, expected: dict[str, dict[str, Any]]) -> None:
    """Raise UserError, with the first difference, unless the outline of a module is the expected one."""
    outline = _outline(module)
    for name, fields in expected.items():
        copy = outline.get(name, {})
        for field, value in fields.items():
            has = copy.get(field)
            # A class may add attributes, and the graph of a tensor has no counterpart (None).
            if value is None or (isinstance(value, set) and isinstance(has, set) and value <= has) or has == value:
                continue
            if isinstance(value, set) and isinstance(has, set):
                shown = f"without {', '.join(sorted(value - has))}"
            else:
                shown = "missing" if name not in outline else f"{has!r} in place of {value!r}"
            raise UserError(
                f"the copy of {type(module).__name__} that other processes get is not the same: {name}, {field}: "
                f"{shown}. Define in its class how it is pickled (__getstate__ and __setstate__), {_REMEDY}."
            )
