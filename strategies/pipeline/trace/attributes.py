"""Attributes of a task's modules, and their values on each stage.

Attributes are what a module has beside parameters, buffers, sub-modules and torch's own fields.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from trainkit.errors import UserError
from trainkit.model.attribute_snapshot import tensors_in

# Read from a module: torch has no public list of its tables of hooks.
_HOOKS = {key for key, value in vars(nn.Module()).items() if "_hooks" in key and isinstance(value, dict)}

Table = MutableMapping[str, Any]


def place_of(task: nn.Module, name: str) -> tuple[Table, str]:
    """Return the dictionary and the key of an attribute, parameter or buffer of the task."""
    prefix, _, key = name.rpartition(".")
    return table_of(task.get_submodule(prefix), key), key


def table_of(module: nn.Module, key: str) -> Table:
    """Return the dictionary of a module that has its attribute, parameter or buffer `key`."""
    # Private tables, as a tensor is assigned, removed and put back there without the checks of `__setattr__`.
    return next((table for table in (module._parameters, module._buffers) if key in table), module.__dict__)


# ---- Values sent to other stages


def class_numbers(task: nn.Module) -> dict[str, Any]:
    """Return the numbers and truth values that are attributes of the classes of a task's modules, by name."""
    numbers: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for module in task.modules() for kind in type(module).__mro__):
        for key, value in vars(kind).items():
            if isinstance(value, (bool, int, float)):
                # The first in the order of inheritance: a swapped class has the name of the class under it.
                numbers.setdefault(f"{kind.__qualname__}.{key}", value)
    return numbers


def pickled(value: Any, task: nn.Module) -> bytes | None:
    """Return an attribute as bytes, with the task's modules by name; `None` if it cannot be sent, such as a lock."""
    file = io.BytesIO()
    try:
        _AttributePickler(file, task).dump(value)
    # What has no bytes raises errors of many types: a lock TypeError, a local function AttributeError.
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        return None
    return file.getvalue()


def unpickled(content: bytes, task: nn.Module) -> Any:
    """Return an attribute that another stage has pickled."""
    return _AttributeUnpickler(io.BytesIO(content), task).load()


class _AttributePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, task: nn.Module) -> None:
        super().__init__(file)
        # By identity, as modules may define equality; the task keeps them alive.
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
    """The values that the attributes which a step changes have in each stage of this rank, and hooks of modules.

    Every stage runs the step from its beginning, so two stages of one rank would change the same attribute twice, or
    register the same hook. `stages` are those of this rank, and `owners` has the stage whose value counts, by name.
    """

    def __init__(self, task: nn.Module, owners: Mapping[str, int], stages: Sequence[int]) -> None:
        self._places = {name: place_of(task, name) for name in owners}
        self._owners = owners
        self._stages = stages
        self._task_modules = {id(module): module for module in task.modules()}  # not copied
        self._values: dict[int, dict[str, Any]] = {}
        self._hooks: dict[int, list[dict[Any, Any]]] = {}  # of each stage that has run, by table
        tables = [table for module in task.modules() for key, table in vars(module).items() if key in _HOOKS]
        self._tables = [(table, dict(table)) for table in tables]  # with the hooks before the first step

    @contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Give the attributes the values of one stage in the block, and at the end those of their owners."""
        if stage not in self._stages:
            yield
            return
        if not self._values:
            # At the first step: every stage begins with the values that the task has then.
            self._values = {local_stage: self._copy() for local_stage in self._stages}
        self._set(self._values[stage])
        self._set_hooks(stage)
        try:
            yield
        finally:
            self._values[stage] = self._present()
            # The owner of a value may be on another rank. The last stage has run most of the step.
            last = self._stages[-1]
            self._keep_hooks(stage)
            self._set_hooks(last if last in self._hooks else stage)
            owners = {name: owner if owner in self._values else last for name, owner in self._owners.items()}
            self._set({name: self._values[owners[name]][name] for name in owners if name in self._values[owners[name]]})

    def _present(self) -> dict[str, Any]:
        return {name: table[key] for name, (table, key) in self._places.items() if key in table}

    def _copy(self) -> dict[str, Any]:
        present = self._present()
        tensors = tensors_in(present, set(self._task_modules))
        # `deepcopy` refuses tensors inside of a graph. The memo has the modules too, which all stages share.
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

    def _keep_hooks(self, stage: int) -> None:
        self._hooks[stage] = [dict(table) for table, _ in self._tables]
        # Once all stages have run only the tables that one has changed, or each step would copy those of all modules.
        if len(self._hooks) == len(self._stages):
            changed_tables = [
                index
                for index, (_, hooks_before) in enumerate(self._tables)
                if any(stage_hooks[index] != hooks_before for stage_hooks in self._hooks.values())
            ]
            self._tables = [self._tables[index] for index in changed_tables]
            self._hooks = {
                local_stage: [stage_hooks[index] for index in changed_tables]
                for local_stage, stage_hooks in self._hooks.items()
            }

    def _set_hooks(self, stage: int) -> None:
        stage_hooks = self._hooks.get(stage, [hooks_before for _, hooks_before in self._tables])
        for (table, _), items in zip(self._tables, stage_hooks, strict=True):
            if table != items:
                # In place, as the handles of hooks refer to the table.
                table.clear()
                table.update(items)
