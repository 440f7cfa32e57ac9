"""Snapshots of a task: one restores all that the code of a step can change, the other finds what it has changed."""

from __future__ import annotations

import functools
import random
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainkit.rng import preserve_rng

MOST_ITEMS = 10_000
"""Longer containers are compared by their length alone."""
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# Not followed: their content never changes, or belongs to the whole process.
_ATOMS = (*PLAIN, type, types.ModuleType, types.BuiltinFunctionType, torch.layout)
# Compared by identity alone: they are code, and what they refer to is not state of a step.
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType)
_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


# ---- Restored after a trace


@contextmanager
def preserve_task(task: nn.Module) -> Iterator[None]:
    """Restore the task and all random generators at the end of the block."""
    snapshot = Snapshot(task)
    try:
        with preserve_rng():
            yield
    finally:
        snapshot.restore()


class Snapshot:
    """Contents of an object, and of all that can be reached from it.

    These are attributes of modules and of other objects, containers, tensors (of parameters only whether they need a
    gradient), arrays, random generators, and what functions such as hooks have in their closures. Of classes only the
    caches of `functools` are restored: they are emptied if they have grown.
    """

    def __init__(self, root: Any) -> None:
        # A stack and not recursion: chains of objects may be longer than Python's recursion limit.
        self._restore: list[Restore] = []
        self._seen: dict[int, Any] = {}  # kept, so that ids stay unique
        pending = [root]
        while pending:
            value = pending.pop()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            restore, contents = next((save for kinds, save in _SAVED if isinstance(value, kinds)), _attributes)(value)
            self._restore += restore
            pending += contents

    def restore(self) -> None:
        """Give everything its saved contents."""
        with torch.no_grad():
            for restore in self._restore:
                restore()


Restore = Callable[[], None]
Saved = tuple[list[Restore], list[Any]]
"""Functions that restore an object, and what it refers to."""


def _tensor(tensor: Tensor) -> Saved:
    memory, requires_grad = tensor.data, tensor.requires_grad
    is_plain = not tensor.is_meta and tensor.layout is torch.strided
    # Parameters are not copied: only the optimizer changes their values, and a copy would need their memory again.
    content = None if isinstance(tensor, nn.Parameter) or not is_plain else memory.clone()

    def restore() -> None:
        # requires_grad_ raises for a tensor that is not a leaf.
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if content is None:
            return
        # The step may have given the tensor other memory, by `.data =` or `set_`.
        if tensor.data_ptr() != memory.data_ptr():
            tensor.data = memory
        if not torch.equal(memory, content):
            memory.copy_(content)

    return [restore], []


def _dictionary(dictionary: dict[Any, Any]) -> Saved:
    items = list(dictionary.items())

    def restore() -> None:
        # Subclasses may override clear and update: they are called only if something changed.
        if not _are_same(
            [part for item in dictionary.items() for part in item], [part for item in items for part in item]
        ):
            dictionary.clear()
            dictionary.update(items)

    return [restore], list(dictionary.values())


def _sequence(sequence: Any) -> Saved:
    items = list(sequence)

    def restore() -> None:
        if not _are_same(sequence, items):
            while sequence:
                sequence.pop()  # an array has no clear, a deque no slices
            sequence.extend(items)

    return [restore], items


def _set(members: set[Any]) -> Saved:
    items = set(members)

    def restore() -> None:
        members.clear()
        members.update(items)

    return [restore], []


def _cache(cached_function: Any) -> Saved:
    size = cached_function.cache_info().currsize
    return [lambda: None if cached_function.cache_info().currsize == size else cached_function.cache_clear()], []


def _function(function: types.FunctionType) -> Saved:
    # A hook may keep its state in a variable of the function around it, or in a mutable default.
    cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if _is_filled(cell)]
    restore = [functools.partial(setattr, cell, "cell_contents", content) for cell, content in cells]
    return list(restore), [*(content for _, content in cells), *(function.__defaults__ or ()), function.__dict__]


def _generator(generator: Any) -> Saved:
    restore: Callable[..., Any]
    if isinstance(generator, random.Random):
        restore = functools.partial(generator.setstate, generator.getstate())
    elif isinstance(generator, numpy.random.Generator):
        restore = functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    else:
        restore = functools.partial(generator.set_state, generator.get_state())
    return [restore], []


def _array(ndarray: Any) -> Saved:
    return [functools.partial(numpy.copyto, ndarray, ndarray.copy())] if ndarray.flags.writeable else [], []


def _attributes(instance: Any) -> Saved:
    kinds = type(instance).__mro__
    names = [name for name in slots(type(instance)) if hasattr(instance, name)]
    values = [getattr(instance, name) for name in names]
    # Past the __setattr__ of the class, which may refuse, as in frozen dataclasses, or have effects.
    restore = [functools.partial(object.__setattr__, instance, *item) for item in zip(names, values, strict=True)]
    caches = [
        # Private: functools has no public name for the type of a cached function.
        value
        for kind in kinds
        for value in vars(kind).values()
        if isinstance(value, functools._lru_cache_wrapper)
    ]
    attributes = getattr(instance, "__dict__", None)
    return list(restore), [*values, *caches, *([attributes] if type(attributes) is dict else [])]


# The first kind that matches applies: of a subclass of a container only the contents are restored.
_SAVED: tuple[tuple[Any, Callable[[Any], Saved]], ...] = (
    (Tensor, _tensor),
    (dict, _dictionary),
    ((list, deque, bytearray, array), _sequence),
    (set, _set),
    ((tuple, frozenset), lambda value: ([], list(value))),
    (functools._lru_cache_wrapper, _cache),
    (types.FunctionType, _function),
    (types.MethodType, lambda value: ([], [value.__self__])),
    (functools.partial, lambda value: ([], [value.func, value.args, value.keywords])),
    (_GENERATORS, _generator),
    (numpy.ndarray, _array),
)


def _are_same(items: Iterable[Any], saved_items: Sequence[Any]) -> bool:
    items = list(items)
    return len(items) == len(saved_items) and all(item is saved for item, saved in zip(items, saved_items, strict=True))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    # An empty cell: its variable has no value yet.
    except ValueError:
        return False


def slots(kind: type) -> list[str]:
    """Return the names of the slots of a class and of those it inherits from."""
    names = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names_in_slots = [name for declared in names for name in ([declared] if isinstance(declared, str) else declared)]
    # __dict__ and __weakref__ are slots too, but not attributes.
    return [name for name in names_in_slots if not name.startswith("__")]


# ---- Compared after a step


class AttributeSnapshot:
    """The attributes and buffers of a task's modules, except `ignored` and scripted ones, with copies of containers.

    Containers and plain objects are followed: a counter in an object, a list that grows and a tensor in a dict count.
    Tensors are not copied: they count as changed if they are other tensors, or, in attributes, were written in place.
    """

    def __init__(self, task: nn.Module, ignored: Iterable[nn.Module] = ()) -> None:
        skipped = {id(module) for module in ignored}
        self._modules = {
            name: module
            for name, module in task.named_modules()
            # A scripted module keeps its attributes in C++, where vars() does not see them.
            if id(module) not in skipped and not isinstance(module, torch.jit.ScriptModule)
        }
        self._task_modules = {id(module) for module in task.modules()}
        # Shared by all attributes: an object that several of them hold is copied once, and cycles end.
        copies: dict[int, _Copy] = {}
        self._before = {
            (prefix, key): _copied(value, copies, self._task_modules)
            for prefix, module in self._modules.items()
            for key, value in module_attributes(module)
        }
        # Private dictionaries: named_parameters() and named_modules() skip None and the second name of a shared one.
        self._registered = {
            prefix: dict([*module._parameters.items(), *module._modules.items()])
            for prefix, module in self._modules.items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each attribute with the tensors that it holds; buffers are not attributes."""
        for (prefix, key), copied in self._before.items():
            if key not in self._modules[prefix]._buffers:
                for tensor in copied.tensors():
                    yield full_name(prefix, key), tensor

    def changed(self) -> dict[str, Any]:
        """Return by name the present values of attributes and buffers that changed; `None` for one that is gone."""
        changed_values: dict[str, Any] = {}
        missing = set(self._before)
        for prefix, module in self._modules.items():
            for key, value in module_attributes(module):
                missing.discard((prefix, key))
                copied = self._before.get((prefix, key))
                # Buffers are written in place by design, as by batch norms; the
                # version counter does not count for them.
                if copied is None or not copied.equals(value, by_version=key not in module._buffers):
                    changed_values[full_name(prefix, key)] = value
        return changed_values | {full_name(*location): None for location in missing}

    def tensors_in(self, value: Any) -> list[Tensor]:
        """Return the tensors in a value, its containers and plain objects, but not those of the task's modules."""
        return list(tensors_in(value, self._task_modules))

    def replaced(self) -> list[str]:
        """Return the names of parameters and sub-modules that are other objects now, and of new buffers."""
        names = []
        for prefix, module in self._modules.items():
            current, saved = (
                dict([*module._parameters.items(), *module._modules.items()]),
                self._registered[prefix],
            )
            names += [full_name(prefix, key) for key in saved | current if saved.get(key) is not current.get(key)]
            new = [key for key in module._buffers if (prefix, key) not in self._before]
            names += [full_name(prefix, key) for key in new if key not in module._non_persistent_buffers_set]
        return names


def full_name(prefix: str, key: str) -> str:
    """Return the name of an attribute in the task."""
    return f"{prefix}.{key}" if prefix else key


def module_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and values of a module's attributes and buffers."""
    # Private: the wrapper of torch.compile lists its attributes there. They change at its first call, which only
    # one stage makes.
    of_wrapper = getattr(type(module), "_opt_mod_attributes", ())
    attributes = [
        (key, value)
        for key, value in vars(module).items()
        # Also private: what `fully_shard` has of a module, and changes in each step.
        if key not in OF_TORCH and key not in of_wrapper and not key.startswith("__composable_api_state_key")
    ]
    return attributes + list(module._buffers.items())


def tensors_in(value: Any, task_modules: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in a value, its containers and plain objects, but not in modules with the given ids."""
    return _copied(value, {}, task_modules).tensors()


@dataclass(slots=True, eq=False)
class _Copy:
    """A value, and copies of what it contained."""

    value: Any
    version: int = 0
    array: Any = None
    generator: Any = None
    """State of a random generator."""
    length: int = -1  # of what is inside; negative if that is not followed
    keys: list[Any] | None = None
    parts: list[_Copy] = field(default_factory=list)
    _busy: bool = False  # a container may contain itself

    def equals(self, value: Any, *, by_version: bool = True) -> bool:
        if isinstance(value, PLAIN):
            # The type counts: True, 1 and 1.0 are equal in Python.
            return type(value) is type(self.value) and bool(value == self.value)
        if value is not self.value:
            return False
        if isinstance(value, Tensor):
            return not by_version or _version(value) == self.version
        if self.array is not None:
            return numpy.array_equal(value, self.array)
        if self.generator is not None:
            return bool(_generator_state(value) == self.generator)
        return self._busy or self._contains(value)

    def _contains(self, value: Any) -> bool:
        items = _items(value) if self.length >= 0 else None
        if items is None:
            return True
        keys, inside = items
        if len(inside) != self.length or (self.keys is not None and keys != self.keys):
            return False
        self._busy = True
        try:
            # The lengths may differ: of containers longer than MOST_ITEMS no parts are copied.
            return all(part.equals(item) for part, item in zip(self.parts, inside, strict=False))
        finally:
            self._busy = False

    def tensors(self) -> Iterator[Tensor]:
        if isinstance(self.value, Tensor):
            yield self.value
        elif not self._busy:
            self._busy = True
            for part in self.parts:
                yield from part.tensors()
            self._busy = False


def _copied(value: Any, copies: dict[int, _Copy], task_modules: set[int]) -> _Copy:
    if isinstance(value, PLAIN):
        return _Copy(value)
    if (existing := copies.get(id(value))) is not None:
        return existing
    # Entered before the contents are copied, or a container that holds itself would never end. Each copy holds its
    # value, so that no other object gets the id.
    copied = copies[id(value)] = _Copy(value)
    if isinstance(value, Tensor):
        copied.version = _version(value)
    elif isinstance(value, numpy.ndarray) and value.size <= MOST_ITEMS:
        copied.array = value.copy()
    elif isinstance(value, _GENERATORS):
        copied.generator = _generator_state(value)
    # The modules of the task have separate entries.
    elif id(value) not in task_modules and (items := _items(value)) is not None:
        keys, inside = items
        copied.length = len(inside)
        if len(inside) <= MOST_ITEMS:
            copied.keys = keys
            copied.parts = [_copied(item, copies, task_modules) for item in inside]
    return copied


def _items(value: Any) -> tuple[list[Any] | None, list[Any]] | None:
    """Return the keys and the contents of a container or plain object; `None` for anything else."""
    if isinstance(value, (list, tuple, set, frozenset, deque, bytearray, array)):
        return None, list(value)
    if isinstance(value, dict):
        return list(value), list(value.values())
    if isinstance(value, _OPAQUE):
        return None
    contents = {name: getattr(value, name) for name in slots(type(value)) if hasattr(value, name)}
    contents |= getattr(value, "__dict__", {})
    return (list(contents), list(contents.values())) if contents else None


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return repr(generator.bit_generator.state)
    # Its 624 words are all in the text: numpy shortens arrays of more than 1,000 elements only.
    return repr(generator.get_state(legacy=False))


def _version(tensor: Tensor) -> int:
    # Private: torch has no public count of writes in place. An inference tensor has none, and asking for it raises.
    return 0 if tensor.is_inference() else tensor._version
