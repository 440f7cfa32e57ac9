"""Attributes of a task's modules: what a step changes in them, where it reads and writes them, and their values before.

Attributes are what a module has beside parameters, buffers, sub-modules and torch's own fields. Containers and plain
objects in them are followed, so that a counter in an object, a list that grows and a tensor in a dict count as changes.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainkit.errors import UserError

from .snapshot import slots

MOST_ITEMS = 10_000
"""Longer containers are compared by their length alone."""

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OPAQUE = (type, ModuleType, FunctionType, MethodType)
_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)

Table = MutableMapping[str, Any]


class AttributeSnapshot:
    """The attributes and buffers of a task's modules, except `ignored` and scripted ones, with copies of containers.

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
            for key, value in _attributes(module)
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
            for key, value in _attributes(module):
                missing.discard((prefix, key))
                before = self._before.get((prefix, key))
                if before is None or not before.equals(value, by_version=key not in module._buffers):
                    found[full_name(prefix, key)] = value
        return found | {full_name(*place): None for place in missing}

    def tensors_in(self, value: Any) -> list[Tensor]:
        """Return the tensors in a value, its containers and plain objects, but not those of the task's modules."""
        return list(_copied(value, {}, self._task_modules).tensors())

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


def place_of(task: nn.Module, name: str) -> tuple[Table, str]:
    """Return the dictionary and the key of an attribute, parameter or buffer of the task."""
    prefix, _, key = name.rpartition(".")
    return table_of(task.get_submodule(prefix), key), key


def table_of(module: nn.Module, key: str) -> Table:
    """Return the dictionary of a module that has its attribute, parameter or buffer `key`."""
    return next((table for table in (module._parameters, module._buffers) if key in table), module.__dict__)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    own = [(key, value) for key, value in vars(module).items() if key not in _OF_TORCH]
    return own + list(module._buffers.items())


# ---- Copies of values


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
        if isinstance(value, _PLAIN):
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
    if isinstance(value, _PLAIN):
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
    if isinstance(value, (list, tuple, set, frozenset, deque)):
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


# ---- Values sent to other stages


def outline(value: Any, depth: int = 6) -> Any:
    """Return the structure and the plain values of nested containers and dataclasses, to be compared."""
    if isinstance(value, _PLAIN):
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


def class_numbers(task: nn.Module) -> dict[str, Any]:
    """Return the numbers and truth values that are attributes of the classes of a task's modules, by name."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for module in task.modules() for kind in type(module).__mro__):
        for key, value in vars(kind).items():
            if isinstance(value, (bool, int, float)):
                found.setdefault(f"{kind.__qualname__}.{key}", value)
    return found


def pickled(value: Any, task: nn.Module) -> bytes | None:
    """Return an attribute as bytes, with the task's modules by name; `None` if it cannot be sent, such as a lock."""
    file = io.BytesIO()
    try:
        _AttributePickler(file, task).dump(value)
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        return None
    return file.getvalue()


def unpickled(content: bytes, task: nn.Module) -> Any:
    """Return an attribute that another stage has pickled."""
    return _AttributeUnpickler(io.BytesIO(content), task).load()


class _AttributePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, task: nn.Module) -> None:
        super().__init__(file)
        self._names = {id(module): name for name, module in task.named_modules()}

    def persistent_id(self, value: Any) -> str | None:
        return self._names.get(id(value))


class _AttributeUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, task: nn.Module) -> None:
        super().__init__(file)
        self._task = task

    def persistent_load(self, name: str) -> nn.Module:
        return self._task.get_submodule(name)


# ---- Values of each stage


class StageAttributes:
    """The values that the attributes which a step changes have in each stage of this rank.

    Every stage runs the step from its beginning, so two stages of one rank would change the same attribute twice.
    `stages` are those of this rank, and `owners` has the stage whose value counts, by name.
    """

    def __init__(self, task: nn.Module, owners: Mapping[str, int], stages: Sequence[int]) -> None:
        self._places = {name: place_of(task, name) for name in owners}
        self._owners = owners
        self._stages = stages
        self._task_modules = {id(module): module for module in task.modules()}  # not copied
        self._values: dict[int, dict[str, Any]] = {}

    @contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Give the attributes the values of one stage in the block, and at the end those of their owners."""
        if stage not in self._stages:
            yield
            return
        if not self._values:
            self._values = {each: self._copy() for each in self._stages}
        self._set(self._values[stage])
        try:
            yield
        finally:
            self._values[stage] = self._present()
            last = self._stages[-1]
            owners = {name: owner if owner in self._values else last for name, owner in self._owners.items()}
            self._set({name: self._values[owners[name]][name] for name in owners if name in self._values[owners[name]]})

    def _present(self) -> dict[str, Any]:
        return {name: table[key] for name, (table, key) in self._places.items() if key in table}

    def _copy(self) -> dict[str, Any]:
        present = self._present()
        tensors = _copied(present, {}, set(self._task_modules)).tensors()
        memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}
        try:
            return copy.deepcopy(present, memo | self._task_modules)
        except (TypeError, RuntimeError) as error:
            raise UserError(
                f"the step changes {', '.join(map(repr, present))}, of which each stage needs a copy where a rank has "
                f"several: {error}. Type strategy.schedule=1f1b."
            ) from None

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, (table, key) in self._places.items():
            if name in values:
                table[key] = values[name]
            else:
                table.pop(key, None)


# ---- The first step


class FirstStepCheck:
    """Comparison of what the first real step changes with what the traced one changed.

    `expected` are the names of state that the traced step changed, and `held` is the state of this rank by name.
    """

    def __init__(
        self, task: nn.Module, expected: Collection[str], held: Mapping[str, Tensor], ignored: Iterable[nn.Module]
    ) -> None:
        self._expected = expected
        self._snapshot = AttributeSnapshot(task, ignored)
        self._held = {name: tensor for name, tensor in held.items() if name not in expected}
        self._contents = {name: _fingerprint(tensor) for name, tensor in self._held.items()}

    def finish(self) -> None:
        """Raise UserError if the step changed other state than expected."""
        written = [name for name, tensor in self._held.items() if _fingerprint(tensor) != self._contents[name]]
        names = [*written, *(name for name in self._snapshot.changed() if name not in self._expected)]
        names += self._snapshot.replaced()
        if names:
            raise UserError(
                f"the first step changed '{names[0]}', which the traced step did not, so other stages and checkpoints "
                "would miss it. Change it in every step, by torch operations or by assigning it to an attribute of a "
                "module, or type strategy=ddp."
            )


def _fingerprint(tensor: Tensor) -> int:
    """Return a checksum of the contents."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


# ---- Where a step reads and writes


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
        self._outlines: dict[str, tuple[Any, Any]] = {}  # of containers, where the present leaf module first reads them
        self._where = where
        self._modules = [module for module in task.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._names = {id(module): name for name, module in task.named_modules()}
        self._keys = {id(module): {"training", *(key for key, _ in _attributes(module))} for module in self._modules}
        self._classes: dict[type, type] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record in the block."""
        originals = [(module, type(module)) for module in self._modules]
        try:
            for module, original in originals:
                object.__setattr__(module, "__class__", self._watching(original))
            yield
        finally:
            for module, original in originals:
                object.__setattr__(module, "__class__", original)

    def changed_containers(self) -> list[str]:
        """Return the attributes whose containers have changed since the leaf module read them that ends now."""
        found = [name for name, (value, before) in self._outlines.items() if outline(value) != before]
        self._outlines.clear()
        return found

    def _note_value(self, module: nn.Module, key: str, value: Any) -> None:
        name = full_name(self._names[id(module)], key)
        if hasattr(type(value), "__next__"):
            self.iterators[name] = None
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
        if original in self._classes:
            return self._classes[original]
        keys, record, note = self._keys, self._record, self._note_value

        get_, set_, delete_ = (getattr(original, f"__{name}__") for name in ("getattribute", "setattr", "delattr"))

        def get(module: Any, key: str) -> Any:
            if key in keys.get(id(module), ()):
                record(module, key, writes=False)
                value = get_(module, key)
                note(module, key, value)
                return value
            return get_(module, key)

        def assign(module: Any, key: str, value: Any) -> None:
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
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
        }
        self._classes[original] = type(original)(original.__name__, (original,), namespace)
        return self._classes[original]


_NOT_WATCHED = _OF_TORCH - {"training"}
