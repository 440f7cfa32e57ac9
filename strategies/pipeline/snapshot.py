"""Snapshot of a task: all that the code of a step can change, to be restored after a trace."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
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

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size, torch.layout),
)


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
            found.clear()
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
    ((list, deque, bytearray), _sequence),
    (set, _set),
    ((tuple, frozenset), lambda found: ([], list(found))),
    (functools._lru_cache_wrapper, _cache),
    (types.FunctionType, _function),
    (types.MethodType, lambda found: ([], [found.__self__])),
    (functools.partial, lambda found: ([], [found.func, found.args, found.keywords])),
    ((torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState), _generator),
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
