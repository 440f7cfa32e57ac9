"""Where a step reads and writes the attributes of a task's modules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import nn

from trainkit.model.attribute_snapshot import MOST_ITEMS, OF_TORCH, PLAIN, full_name, module_attributes


@dataclass(slots=True)
class Access:
    """The nodes at which a step reads and writes one attribute: the node that runs, or the next one."""

    first: int
    last: int
    reads_first: bool
    """True if it is read before it is written."""
    last_write: int | None = None
    writers: set[str] = field(default_factory=set)
    """Leaf modules in whose calls it is written; an empty name for code between nodes."""
    users: set[str] = field(default_factory=set)
    """The same for all accesses."""


class AttributeWatch:
    """Records the accesses to the attributes of a task's modules while it is installed.

    `where` returns the index of the present node, and the name of the leaf module that runs or an empty name. The class
    of each module is swapped, as attributes are looked up on it.
    """

    def __init__(self, task: nn.Module, where: Callable[[], tuple[int, str]]) -> None:
        self.accesses: dict[str, Access] = {}
        self.iterators: dict[str, None] = {}
        """The attributes among them that are iterators."""
        self.drawing: set[str] = set()
        """The modules that read a random generator of their own, outside of leaf modules."""
        # Read and compared around each call of a leaf module: inside one there are no nodes for the single writes.
        self._outlines: dict[str, tuple[Any, Any]] = {}  # of containers, where the present leaf module first reads them
        self._where = where
        self._modules = [module for module in task.modules() if not isinstance(module, torch.jit.ScriptModule)]
        # The ids stay unique: `_modules` and the task hold the modules.
        self._names = {id(module): name for name, module in task.named_modules()}
        self._keys = {
            id(module): {"training", *(key for key, _ in module_attributes(module))} for module in self._modules
        }
        self._classes: dict[type, type] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record in the block."""
        originals = [(module, type(module)) for module in self._modules]
        try:
            for module, original in originals:
                # Past the __setattr__ of modules, which the swapped class records and users may override.
                object.__setattr__(module, "__class__", self._watching(original))
            yield
        finally:
            for module, original in originals:
                object.__setattr__(module, "__class__", original)

    def changed_containers(self) -> list[str]:
        """Return the attributes whose containers have changed since the leaf module read them that ends now."""
        names = [name for name, (value, earlier) in self._outlines.items() if outline(value) != earlier]
        self._outlines.clear()
        return names

    def _note_value(self, module: nn.Module, key: str, value: Any) -> None:
        name = full_name(self._names[id(module)], key)
        # Reading an iterator moves it, without a write that could be recorded.
        if hasattr(type(value), "__next__"):
            self.iterators[name] = None
        elif hasattr(type(value), "random") and not self._where()[1]:  # of Python or numpy, which a trace cannot follow
            self.drawing.add(self._names[id(module)])
        elif isinstance(value, (list, dict, set, deque)) and self._where()[1] and name not in self._outlines:
            self._outlines[name] = value, outline(value)

    def _record(self, module: nn.Module, key: str, *, writes: bool) -> None:
        node, user = self._where()
        name = full_name(self._names[id(module)], key)
        access = self.accesses.get(name)
        if access is None:
            access = self.accesses[name] = Access(node, node, not writes)
        access.last = node
        access.users.add(user)
        if writes:
            access.last_write = node
            access.writers.add(user)

    def _watching(self, original: type) -> type:
        # One subclass for each class: modules of the same type must keep the
        # same type, or comparisons of types would fail.
        if original in self._classes:
            return self._classes[original]
        keys, record, note = self._keys, self._record, self._note_value

        get_, set_, delete_ = (getattr(original, f"__{name}__") for name in ("getattribute", "setattr", "delattr"))

        def get(module: Any, key: str) -> Any:
            # A copy of a module that the step makes has the swapped class too, but no entry here.
            if key in keys.get(id(module), ()):
                record(module, key, writes=False)
                value = get_(module, key)
                note(module, key, value)
                return value
            return get_(module, key)

        def assign(module: Any, key: str, value: Any) -> None:
            # An attribute that the step creates counts from its first assignment.
            if id(module) in keys and key not in _NOT_WATCHED:
                keys[id(module)].add(key)
                record(module, key, writes=True)
            set_(module, key, value)

        def delete(module: Any, key: str) -> None:
            if key in keys.get(id(module), ()):
                record(module, key, writes=True)
            delete_(module, key)

        namespace = {
            "__getattribute__": get,
            "__setattr__": assign,
            "__delattr__": delete,
            # The names of the original: they are in messages, and decide whether a module is torch's.
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
        }
        # By the class of the class: a class with a custom metaclass needs it for its subclasses too.
        self._classes[original] = type(original)(original.__name__, (original,), namespace)
        return self._classes[original]


# The mode is state that a step may change; torch's other attributes are bookkeeping.
_NOT_WATCHED = OF_TORCH - {"training"}


# The depth also ends the cycles of containers that contain themselves.
def outline(value: Any, depth: int = 6) -> Any:
    """Return the structure and the plain values of nested containers and dataclasses, to be compared."""
    if isinstance(value, PLAIN):
        return value
    is_data = is_dataclass(value) and not isinstance(value, type)
    if depth == 0 or not (is_data or isinstance(value, (list, tuple, dict, set, deque))):
        return type(value)
    if isinstance(value, dict) or is_data:
        items = vars(value) if is_data and hasattr(value, "__dict__") else value if isinstance(value, dict) else {}
        return {key: outline(item, depth - 1) for key, item in items.items()}
    if isinstance(value, set) or len(value) > MOST_ITEMS:
        return len(value)
    return [outline(item, depth - 1) for item in value]
