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
_ATOMS = (*PLAIN, type, types.ModuleType, types.BuiltinFunctionType, torch.layout)
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
        self._restore: list[Restore] = []
        self._seen: dict[int, Any] = {}  # kept, so that ids stay unique
        pending = [root]
        while pending:
            found = pending.pop()
            if isinstance(found, _ATOMS) or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            restore, contents = next((save for kinds, save in _SAVED if isinstance(found, kinds)), _attributes)(found)
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


def _tensor(found: Tensor) -> Saved:
    memory, requires_grad = found.data, found.requires_grad
    is_plain = not found.is_meta and found.layout is torch.strided
    content = None if isinstance(found, nn.Parameter) or not is_plain else memory.clone()

    def restore() -> None:
        if found.is_leaf and found.requires_grad != requires_grad:
            found.requires_grad_(requires_grad)
        if content is None:
            return
        if found.data_ptr() != memory.data_ptr():
            found.data = memory
        if not torch.equal(memory, content):
            memory.copy_(content)

    return [restore], []


def _dictionary(found: dict[Any, Any]) -> Saved:
    items = list(found.items())

    def restore() -> None:
        if not _are_same([part for item in found.items() for part in item], [part for item in items for part in item]):
            found.clear()
            found.update(items)

    return [restore], list(found.values())


def _sequence(found: Any) -> Saved:
    items = list(found)

    def restore() -> None:
        if not _are_same(found, items):
            while found:
                found.pop()  # an array has no clear, a deque no slices
            found.extend(items)

    return [restore], items


def _set(found: set[Any]) -> Saved:
    items = set(found)

    def restore() -> None:
        found.clear()
        found.update(items)

    return [restore], []


def _cache(found: Any) -> Saved:
    size = found.cache_info().currsize
    return [lambda: None if found.cache_info().currsize == size else found.cache_clear()], []


def _function(found: types.FunctionType) -> Saved:
    cells = [(cell, cell.cell_contents) for cell in found.__closure__ or () if _is_filled(cell)]
    restore = [functools.partial(setattr, cell, "cell_contents", content) for cell, content in cells]
    return list(restore), [*(content for _, content in cells), *(found.__defaults__ or ()), found.__dict__]


def _generator(found: Any) -> Saved:
    restore: Callable[..., Any]
    if isinstance(found, random.Random):
        restore = functools.partial(found.setstate, found.getstate())
    elif isinstance(found, numpy.random.Generator):
        restore = functools.partial(setattr, found.bit_generator, "state", found.bit_generator.state)
    else:
        restore = functools.partial(found.set_state, found.get_state())
    return [restore], []


def _array(found: Any) -> Saved:
    return [functools.partial(numpy.copyto, found, found.copy())] if found.flags.writeable else [], []


def _attributes(found: Any) -> Saved:
    kinds = type(found).__mro__
    names = [name for name in slots(type(found)) if hasattr(found, name)]
    values = [getattr(found, name) for name in names]
    restore = [functools.partial(object.__setattr__, found, *item) for item in zip(names, values, strict=True)]
    caches = [
        value for kind in kinds for value in vars(kind).values() if isinstance(value, functools._lru_cache_wrapper)
    ]
    attributes = getattr(found, "__dict__", None)
    return list(restore), [*values, *caches, *([attributes] if type(attributes) is dict else [])]


_SAVED: tuple[tuple[Any, Callable[[Any], Saved]], ...] = (
    (Tensor, _tensor),
    (dict, _dictionary),
    ((list, deque, bytearray, array), _sequence),
    (set, _set),
    ((tuple, frozenset), lambda found: ([], list(found))),
    (functools._lru_cache_wrapper, _cache),
    (types.FunctionType, _function),
    (types.MethodType, lambda found: ([], [found.__self__])),
    (functools.partial, lambda found: ([], [found.func, found.args, found.keywords])),
    (_GENERATORS, _generator),
    (numpy.ndarray, _array),
)


def _are_same(now: Iterable[Any], before: Sequence[Any]) -> bool:
    now = list(now)
    return len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def slots(kind: type) -> list[str]:
    """Return the names of the slots of a class and of those it inherits from."""
    names = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    every = [name for own in names for name in ([own] if isinstance(own, str) else own)]
    return [name for name in every if not name.startswith("__")]


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
            if id(module) not in skipped and not isinstance(module, torch.jit.ScriptModule)
        }
        self._task_modules = {id(module) for module in task.modules()}
        copies: dict[int, _Copy] = {}
        self._before = {
            (prefix, key): _copied(value, copies, self._task_modules)
            for prefix, module in self._modules.items()
            for key, value in module_attributes(module)
        }
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
        found: dict[str, Any] = {}
        missing = set(self._before)
        for prefix, module in self._modules.items():
            for key, value in module_attributes(module):
                missing.discard((prefix, key))
                before = self._before.get((prefix, key))
                if before is None or not before.equals(value, by_version=key not in module._buffers):
                    found[full_name(prefix, key)] = value
        return found | {full_name(*place): None for place in missing}

    def tensors_in(self, value: Any) -> list[Tensor]:
        """Return the tensors in a value, its containers and plain objects, but not those of the task's modules."""
        return list(tensors_in(value, self._task_modules))

    def replaced(self) -> list[str]:
        """Return the names of parameters and sub-modules that are other objects now, and of new buffers."""
        names = []
        for prefix, module in self._modules.items():
            now, before = dict([*module._parameters.items(), *module._modules.items()]), self._registered[prefix]
            names += [full_name(prefix, key) for key in before | now if before.get(key) is not now.get(key)]
            new = [key for key in module._buffers if (prefix, key) not in self._before]
            names += [full_name(prefix, key) for key in new if key not in module._non_persistent_buffers_set]
        return names


def full_name(prefix: str, key: str) -> str:
    """Return the name of an attribute in the task."""
    return f"{prefix}.{key}" if prefix else key


def module_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and values of a module's attributes and buffers."""
    # What the wrapper of torch.compile has of its own changes at its first call, which one stage alone makes.
    of_wrapper = getattr(type(module), "_opt_mod_attributes", ())
    own = [(key, value) for key, value in vars(module).items() if key not in OF_TORCH and key not in of_wrapper]
    return own + list(module._buffers.items())


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
    if (known := copies.get(id(value))) is not None:
        return known
    copied = copies[id(value)] = _Copy(value)
    if isinstance(value, Tensor):
        copied.version = _version(value)
    elif isinstance(value, numpy.ndarray) and value.size <= MOST_ITEMS:
        copied.array = value.copy()
    elif isinstance(value, _GENERATORS):
        copied.generator = _generator_state(value)
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
    return repr(generator.get_state(legacy=False))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
