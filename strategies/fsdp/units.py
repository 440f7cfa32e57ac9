"""Units: the modules of a task that are gathered one at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from trainkit.errors import UserError, nearest

Units = Literal["auto"] | Sequence[str]
MIB = 2**20
ROOT = "(task)"
"""Name of the unit of all parameters that are in no other."""
_SHOWN = 20  # names in a message


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered together."""

    name: str
    module: nn.Module
    num_bytes: int
    """Of its own parameters, without those of units inside it."""


def choose_units(task: nn.Module, units: Units, *, min_bytes: float) -> list[Unit]:
    """Return the units of a task, inner ones before outer ones; the parameters that are left are the task's own unit.

    `auto` chooses modules that have a sibling of the same class and at least `min_bytes` of parameters: the blocks of a
    transformer, or the stages of a network if its blocks are smaller.

        task.blocks.0   Block  unit            task.stages.0    Sequential  unit
        task.blocks.1   Block  unit            task.stages.1    Sequential  unit
        task.head       Linear                 task.head        Linear

    Raises UserError for a name that matches nothing, and for parameters that several units share.
    """
    shared = _SharedParameters(task)
    if units == "auto":
        chosen = dict(_repeated_blocks(task, "", shared, min_bytes))
    else:
        chosen = _named(task, units)
        for name, module in chosen.items():
            shared.check(name, module)
    once: dict[int, tuple[str, nn.Module]] = {}
    for name, module in chosen.items():
        once.setdefault(id(module), (name, module))  # a shared module is one unit
    inner_first = sorted(once.values(), key=lambda item: -item[0].count("."))
    found: list[Unit] = []
    taken: set[int] = set()
    for name, module in [*inner_first, (ROOT, task)]:
        own = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        taken |= {id(parameter) for parameter in own}
        found.append(Unit(name, module, sum(parameter.nbytes for parameter in own)))
    return found


def describe_units(units: Sequence[Unit], *, world_size: int, reshard_after_forward: bool | int) -> str:
    """Return the table of the units, and the memory of parameters on a rank."""
    total, root = sum(unit.num_bytes for unit in units), units[-1].num_bytes
    width = max(len(unit.name) for unit in units)
    lines = [f"{'unit':<{width}}  {'MiB':>8}  {'MiB a rank':>10}  class"]
    for unit in [units[-1], *units[:-1]]:
        whole, part = unit.num_bytes / MIB, unit.num_bytes / MIB / world_size
        lines.append(f"{unit.name:<{width}}  {whole:8.2f}  {part:10.2f}  {type(unit.module).__name__}")
    largest = sorted((unit.num_bytes for unit in units[:-1]), reverse=True)
    # The next unit is gathered while one is used; the parameters outside of units stay until the end of backward.
    gathered = root + (sum(largest[:2]) if reshard_after_forward is True else sum(largest))
    lines.append(
        f"parameters: {total / MIB:.2f} MiB, {total / MIB / world_size:.2f} MiB on each of {world_size} ranks; "
        f"gathered at once, at most: {gathered / MIB:.2f} MiB"
    )
    return "\n".join(lines)


def _repeated_blocks(
    module: nn.Module, prefix: str, shared: _SharedParameters, min_bytes: float
) -> Iterable[tuple[str, nn.Module]]:
    """Yield the outermost modules that can be units; a container yields those inside it, if there are any."""
    kinds = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_container = isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        inside = list(_repeated_blocks(child, f"{path}.", shared, min_bytes)) if is_container else []
        if inside:
            yield from inside
        elif kinds[type(child)] > 1 and _size(child) >= min_bytes and _is_block(child) and not shared.outside_of(child):
            yield path, child
        elif not is_container:
            yield from _repeated_blocks(child, f"{path}.", shared, min_bytes)


def _named(task: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that the patterns of names, or the names of classes, match."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UserError(f"units={patterns!r} is not auto or a list; write units=[{str(patterns)!r}].")
    named = {name: module for name, module in task.named_modules() if name}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {n: m for n, m in named.items() if fnmatchcase(n, pattern) or type(m).__name__ == pattern}
        matching = {name: module for name, module in matching.items() if any(True for _ in module.parameters())}
        if not matching:
            known = [*named, *{type(module).__name__ for module in named.values()}]
            shown = ", ".join(list(named)[:_SHOWN]) + ", ..." * (len(named) > _SHOWN)
            raise UserError(
                f"units: {pattern!r} matches no module with parameters.{nearest(pattern, known)} There are: {shown}."
            )
        for name, module in matching.items():
            if not _runs(module):
                raise UserError(
                    f"units: {name} is a {type(module).__name__}, which has no forward; name the modules in it: "
                    f"strategy.units=[{name}.*]."
                )
        chosen |= matching
    return chosen


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _is_block(module: nn.Module) -> bool:
    return _runs(module) and not isinstance(module, nn.Embedding)  # whose weights output layers often use, too


def _size(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


class _SharedParameters:
    """The places of every parameter and module of a task, to find parameters that are used in and outside of a unit."""

    def __init__(self, task: nn.Module) -> None:
        self._places: dict[int, list[str]] = defaultdict(list)  # of a parameter: names of modules that hold it
        self._names: dict[int, list[str]] = defaultdict(list)  # of a module
        for name, module in task.named_modules(remove_duplicate=False):
            self._names[id(module)].append(name)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._places[id(parameter)].append(name)

    def outside_of(self, unit: nn.Module) -> str | None:
        """Return the name of a module outside of the unit that holds one of its parameters, or `None`."""
        names = self._names[id(unit)]
        for parameter in unit.parameters():
            for place in self._places[id(parameter)]:
                if not any(place == name or place.startswith(f"{name}.") for name in names):
                    return place
        return None

    def check(self, name: str, unit: nn.Module) -> None:
        """Raise UserError if the unit shares a parameter with a module outside of it."""
        outside = self.outside_of(unit)
        if outside is not None:
            raise UserError(
                f"units: {name} and {outside or 'the task itself'} share a parameter, which can be in one unit only. "
                f"Take {name} out of strategy.units: shared parameters are then in the task's own unit."
            )
