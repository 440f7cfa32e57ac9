"""Snapshot of a task: all that the code of a step can change, to be restored after a trace."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.rng import preserve_rng


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
    """Contents of objects, and of all that can be reached from them.

    These are attributes of modules and of other objects, containers, tensors (of parameters only the memory that they
    use, not a copy), arrays, random generators, and what functions such as hooks have in their closures. Classes are
    not restored, except the caches of `functools` on methods.
    """

    def __init__(self, root: Any) -> None:
        self._restore: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # kept, so that ids stay unique
        pending = [root]
        while pending:
            found = pending.pop()
            if isinstance(found, _ATOMS) or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            pending.extend(self._save(found))

    def restore(self) -> None:
        """Give everything its saved contents."""
        with torch.no_grad():
            for restore in self._restore:
                restore()

    def _save(self, found: Any) -> list[Any]:
        """Save one object, and return what it refers to."""
        if isinstance(found, Tensor):
            self._restore.append(_saved_tensor(found))
            return []
        if isinstance(found, dict):
            self._restore.append(functools.partial(_restore_dict, found, list(found.items())))
            return list(found.values())
        if isinstance(found, (list, deque, bytearray, set)):
            self._restore.append(functools.partial(_restore_items, found, list(found)))
            return [] if isinstance(found, (bytearray, set)) else list(found)
        if isinstance(found, (tuple, frozenset)):
            return list(found)
        if isinstance(found, functools._lru_cache_wrapper):
            self._restore.append(functools.partial(_restore_cache, found, found.cache_info().currsize))
            return []
        if isinstance(found, types.FunctionType):
            return self._save_closure(found)
        if isinstance(found, types.MethodType):
            return [found.__self__]
        if isinstance(found, functools.partial):
            return [found.func, found.args, found.keywords]
        generator = _saved_generator(found)
        if generator is not None:
            self._restore.append(generator)
            return []
        return self._save_attributes(found)

    def _save_closure(self, function: types.FunctionType) -> list[Any]:
        contents = []
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            self._restore.append(functools.partial(setattr, cell, "cell_contents", content))
            contents.append(content)
        return [*contents, *(function.__defaults__ or ()), *function.__dict__.values()]

    def _save_attributes(self, found: Any) -> list[Any]:
        attributes = getattr(found, "__dict__", None)
        names = [name for kind in type(found).__mro__ for name in _slots(kind)]
        slots = {name: getattr(found, name) for name in names if hasattr(found, name)}
        for name, value in slots.items():
            self._restore.append(functools.partial(_restore_slot, found, name, value))
        caches = [
            value
            for kind in type(found).__mro__
            for value in vars(kind).values()
            if isinstance(value, functools._lru_cache_wrapper)
        ]
        contents = [*slots.values(), *caches]
        return [attributes, *contents] if type(attributes) is dict else contents


_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType, types.CodeType,
    torch.dtype, torch.device, torch.Size, torch.layout,
)  # fmt: skip


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _saved_tensor(tensor: Tensor) -> Callable[[], None]:
    """Return a function that restores the tensor: its memory, contents and flag; of parameters no contents."""
    memory, requires_grad = tensor.data, tensor.requires_grad
    content = None if isinstance(tensor, nn.Parameter) or tensor.is_meta else memory.clone()

    def restore() -> None:
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if content is None:
            return
        if tensor.data_ptr() != memory.data_ptr():
            tensor.data = memory
        if not torch.equal(memory, content):
            memory.copy_(content)

    return restore


def _saved_generator(found: Any) -> Callable[[], None] | None:
    """Return a function that restores a random generator or an array of numpy; `None` for anything else."""
    if isinstance(found, torch.Generator):
        return functools.partial(found.set_state, found.get_state())
    if isinstance(found, random.Random):
        return functools.partial(found.setstate, found.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(found, numpy.random.Generator):
        return functools.partial(setattr, found.bit_generator, "state", found.bit_generator.state)
    if isinstance(found, numpy.random.RandomState):
        return functools.partial(found.set_state, found.get_state())
    if isinstance(found, numpy.ndarray) and found.flags.writeable:
        return functools.partial(numpy.copyto, found, found.copy())
    return None


def _restore_dict(found: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    if len(found) != len(items) or any(
        key is not old_key or value is not old for (key, value), (old_key, old) in zip(found.items(), items, strict=True)
    ):
        found.clear()
        found.update(items)


def _restore_items(found: Any, items: list[Any]) -> None:
    if isinstance(found, set):
        found.clear()
        found.update(items)
    elif len(found) != len(items) or any(now is not old for now, old in zip(found, items, strict=True)):
        found.clear()
        found.extend(items)


def _restore_slot(found: Any, name: str, value: Any) -> None:
    if getattr(found, name, None) is not value:
        object.__setattr__(found, name, value)


def _restore_cache(cache: Any, size: int) -> None:
    if cache.cache_info().currsize != size:
        cache.cache_clear()
