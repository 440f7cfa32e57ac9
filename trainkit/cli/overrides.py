"""Overrides typed on the command line, in Hydra's grammar, and the origin of each key of a config."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode

from trainkit.cli.validate import Problem, unknown_choice

# Groups of which several choices stand side by side, each under its name.
LISTS = ("callbacks", "logger")
GROUPS = ("recipe", "size", "strategy", *LISTS)
SIZES = "recipe_size"  # the group of what sizes mean: <recipe>_<size>
FULL = "full"  # the size of a recipe's own file


@dataclass(frozen=True)
class _Part:
    text: str
    override: Override
    is_group: bool

    @property
    def key(self) -> str:
        return self.override.key_or_group

    @property
    def is_sweep(self) -> bool:
        return self.override.is_sweep_override()

    @property
    def values(self) -> list[str]:
        """The override, or one for each value of a sweep."""
        if not self.is_sweep:
            return [self.text]
        return [f"{self.override.get_key_element()}={value}" for value in self.override.sweep_string_iterator()]

    @property
    def names(self) -> list[str]:
        """What is chosen in a group."""
        if self.is_sweep:
            values: list[Any] = [_plain(value) for value in self.override.sweep_iterator()]
        else:
            values = [self.override.value()]
        chosen = [name for value in values for name in (value if isinstance(value, list) else [value])]
        return [str(name) for name in chosen if name is not None]


class Overrides:
    """Parsed overrides; those that cannot be read or chosen are in `problems` instead.

    `callbacks=[a,b]` and `logger=...` replace what is chosen; `+callbacks=c` adds to it.
    """

    def __init__(self, texts: Sequence[str], *, options: Callable[[str], list[str]], sweep: bool = False) -> None:
        self.problems: list[Problem] = []
        self._options = options
        self._sweep = sweep
        self._parts = [part for text in texts for part in self._read(text)]

    @property
    def typed(self) -> list[tuple[str, str]]:
        """Each key with the text that changes it."""
        return [(part.key, part.text) for part in self._parts]

    @property
    def choices(self) -> list[str]:
        """The groups in which something is chosen."""
        return [part.key for part in self._parts if part.is_group]

    @property
    def deletions(self) -> list[tuple[str, str]]:
        """The keys to take away, with what was typed."""
        return [(part.key, part.text) for part in self._parts if _is_deletion(part)]

    @property
    def replaced_groups(self) -> list[str]:
        """The groups in which a new choice takes the place of the old one."""
        return [part.key for part in self._parts if part.is_group and not _is_addition(part)]

    @property
    def additions(self) -> dict[str, list[str]]:
        """What is added to groups of several choices."""
        added: dict[str, list[str]] = {}
        for part in self._parts:
            if _is_addition(part):
                added.setdefault(part.key, []).extend(part.names)
        return added

    def jobs(self) -> list[list[str]]:
        """Return the overrides of each combination of values; ranges that only a sweeper can sample are left out."""
        values = [part.values for part in self._parts if part.override.is_discrete_sweep() or not part.is_sweep]
        return [list(texts) for texts in product(*values)]

    def rendered(self, chosen: Mapping[str, Sequence[str]], *, deletions: Collection[str] = ()) -> list[str]:
        """Return what Hydra is given, of deletions only those of the keys in `deletions`.

        `chosen` is what additions to groups are added to.
        """
        lines = []
        for part in self._parts:
            replaced = part.key in chosen and part.is_group and not part.is_sweep
            if replaced or _is_addition(part) or (_is_deletion(part) and part.key not in deletions):
                continue
            lines.append(_line(part))
        for group, names in self.additions.items():
            if group in chosen:
                lines.append(f"{group}=[{','.join(dict.fromkeys([*chosen[group], *names]))}]")
        if "~recipe" in lines:  # there is none by default, and sizes are looked up by its name
            lines = [line for line in lines if line != "~recipe" and not line.startswith("recipe=")]
        return lines

    def _read(self, text: str) -> list[_Part]:
        try:
            override = OverridesParser.create().parse_override(text)
        except (OverrideParseException, HydraException) as error:
            self.problems.append(_unreadable(text, error))
            return []
        options = self._options(override.key_or_group)
        is_value = not options or (not override.is_delete() and isinstance(override.value(), dict))
        part = _Part(text, override, is_group=not is_value)
        problem = self._wrong(part, options)
        if problem is not None:
            self.problems.append(Problem(part.key, problem, f"the command line: {text}"))
            return []
        return [part]

    def _wrong(self, part: _Part, options: list[str]) -> str | None:
        if part.is_sweep and not self._sweep:
            values = part.text.partition("=")[2]
            return f"several values; add -m to try one after the other, or write [{values}] for a list"
        if part.is_group and part.key == "size" and not part.names:
            return f"cannot be removed; size={FULL} takes a recipe as its own file says"
        if not part.is_group or part.override.is_delete():
            return None
        if part.key in GROUPS and part.key not in LISTS and isinstance(part.override.value(), list):
            return "takes one choice, not a list"
        for name in part.names:
            if name not in options:
                return unknown_choice(part.key, name, options)
        return None


def _line(part: _Part) -> str:
    """Return what Hydra is given for one override."""
    text = part.text.lstrip("+")
    if part.override.is_hydra_override() or part.override.is_delete() or "@" in text.partition("=")[0]:
        return part.text
    if part.is_group and part.override.value() is None:
        return f"{part.key}=[]" if part.key in LISTS else f"~{part.key}"
    if part.is_group:
        return text if part.key in GROUPS else part.text
    return f"++{text}"  # Without ++ Hydra itself refuses an unknown key, and advises to add it.


def _is_addition(part: _Part) -> bool:
    return part.is_group and part.key in LISTS and part.text.startswith("+")


def _is_deletion(part: _Part) -> bool:
    return part.override.is_delete() and not part.is_group


def _plain(value: Any) -> Any:
    return getattr(value, "text", value)  # a quoted string


def _unreadable(text: str, error: Exception) -> Problem:
    if "=" not in text and not text.startswith("~"):
        return Problem("", f"'{text}' is not a setting; write key=value.")
    reason = str(error).splitlines()[0]
    key, _, value = text.partition("=")
    return Problem("", f"'{text}' cannot be read: {reason}. Special characters need quotes: {key}='\"{value}\"'")


class KeyOrigins:
    """The last place that set each key of a config: what was typed, or a file and line."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def of(self, key: str) -> str:
        """Return where `key` was set, or one below or the nearest around it; empty where nothing is known."""
        if key in self._places:
            return self._places[key]
        for known in reversed(self._places):
            if known.startswith(f"{key}."):
                return self._places[known]
        parent = key.rpartition(".")[0]
        if f"{parent}._target_" in self._places:
            return self._places[f"{parent}._target_"]
        return self.of(parent) if parent else ""

    def comment(self, key: str) -> str:
        """Return what the file that set `key` says behind it; empty where it says nothing."""
        file, _, line = self._places.get(key, "").rpartition(":")
        if not line.isdigit() or not Path(file).is_file():
            return ""
        return Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1].partition(" # ")[2].strip()

    def add_typed(self, key: str, text: str, *, is_choice: bool = False) -> None:
        """Note that `key` was typed on the command line, and all below it, unless it is the choice of a file."""
        for below in [known for known in self._places if known.startswith(f"{key}.") and not is_choice]:
            del self._places[below]
        self._places[key] = f"the command line: {text}"

    def add_file(self, path: Path, *, package: str = "") -> None:
        """Note the keys of a YAML file, whose content goes below `package`."""
        for key, line in _lines(path, package):
            self._places[key] = f"{_short(path)}:{line}"

    def add_composed(self, loader: ConfigLoader, config_name: str, overrides: list[str]) -> None:
        """Note the keys of every file that Hydra composes, in its order."""
        composed = loader.compute_defaults_list(config_name, overrides, RunMode.MULTIRUN)
        for default in composed.defaults:
            if default.config_path is None or default.config_path.startswith("hydra/"):
                continue
            path = _find(loader, default.config_path)
            if path is not None:
                package = "" if default.package in (None, "_global_") else str(default.package)
                self.add_file(path, package=package)


def _find(loader: ConfigLoader, config_path: str) -> Path | None:
    for source in loader.get_sources():
        name = f"{config_path}.yaml"
        if source.scheme() == "file" and (Path(source.path) / name).is_file():
            return Path(source.path) / name
        if source.scheme() == "pkg" and source.path and source.provider != "hydra":
            found = resources.files(source.path) / name
            if isinstance(found, Path) and found.is_file():
                return found
    return None


def _lines(path: Path, package: str) -> Iterator[tuple[str, int]]:
    """Yield each key's full path, with the line it stands on."""
    document = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    yield from _lines_of(document, package)


def _lines_of(node: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = f"{path}.{key.value}" if path else str(key.value)
            yield below, key.start_mark.line + 1
            yield from _lines_of(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield f"{path}.{index}", value.start_mark.line + 1
            yield from _lines_of(value, f"{path}.{index}")


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
