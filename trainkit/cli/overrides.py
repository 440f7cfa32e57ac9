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
from hydra.errors import HydraException
from hydra.types import RunMode

from trainkit.cli.validate import Problem, unknown_choice

# Groups with several choices at once, each under its name.
LISTS = ("callbacks", "logger")
GROUPS = ("recipe", "size", "strategy", *LISTS)
SIZES = "recipe_size"  # the group of files <recipe>_<size>
FULL = "full"  # the size of a recipe's own file
_TYPED = "the command line: "


@dataclass(frozen=True)
class _Item:
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
    def names(self) -> list[str]:
        """The choices of a group."""
        values: list[Any] = [self.override.value()]
        if self.is_sweep:
            values = [getattr(value, "text", value) for value in self.override.sweep_iterator()]  # quoted strings too
        chosen = [name for value in values for name in (value if isinstance(value, list) else [value])]
        return [str(name) for name in chosen if name is not None]

    @property
    def is_addition(self) -> bool:
        return self.is_group and self.key in LISTS and self.text.startswith("+")

    @property
    def is_deletion(self) -> bool:
        return self.override.is_delete() and not self.is_group


class Overrides:
    """Parsed overrides; invalid ones are in `problems` instead.

    `callbacks=[a,b]` and `logger=...` replace the choices of the group; `+callbacks=c` adds one.
    """

    def __init__(self, texts: Sequence[str], *, options: Callable[[str], list[str]], sweep: bool = False) -> None:
        self.problems: list[Problem] = []
        self._options = options
        self._sweep = sweep
        self._items = [item for text in texts for item in self._read(text)]
        self.typed = [(item.key, item.text) for item in self._items]
        """Each key with its override."""
        self.values = [(item.key, item.override.value()) for item in self._items if not item.override.is_delete()]
        """Each key with the value that is typed."""
        self.choices = [item.key for item in self._items if item.is_group]
        """The groups with an override that chooses."""
        self.deletions = [(item.key, item.text) for item in self._items if item.is_deletion]
        """The keys to delete, with their overrides."""
        self.replaced_groups = [item.key for item in self._items if item.is_group and not item.is_addition]
        """The groups whose choices are replaced."""
        self.additions: dict[str, list[str]] = {}
        """The choices that are added to groups."""
        for item in self._items:
            if item.is_addition:
                self.additions.setdefault(item.key, []).extend(item.names)

    def jobs(self) -> list[list[str]]:
        """Return the overrides of each combination of values; ranges that only a sweeper can sample are skipped."""
        alternatives = []
        for item in self._items:
            if not item.is_sweep:
                alternatives.append([item.text])
            elif item.override.is_discrete_sweep():
                key = item.override.get_key_element()
                alternatives.append([f"{key}={value}" for value in item.override.sweep_string_iterator()])
        return [list(texts) for texts in product(*alternatives)]

    def rendered(self, chosen: Mapping[str, Sequence[str]], *, deletions: Collection[str] = ()) -> list[str]:
        """Return the overrides for Hydra; of deletions only those of the keys in `deletions`.

        `chosen` are the choices of groups to which others are added.
        """
        lines = []
        for item in self._items:
            replaced = item.key in chosen and item.is_group and not item.is_sweep
            if not (replaced or item.is_addition or (item.is_deletion and item.key not in deletions)):
                lines.append(_line(item))
        for group, names in self.additions.items():
            if group in chosen:
                lines.append(f"{group}=[{','.join(dict.fromkeys([*chosen[group], *names]))}]")
        if "~recipe" in lines:  # the default is none, and Hydra cannot delete that
            lines = [line for line in lines if line != "~recipe" and not line.startswith("recipe=")]
        return lines

    def _read(self, text: str) -> list[_Item]:
        try:
            override = OverridesParser.create().parse_override(text)
            if not override.key_or_group:
                raise HydraException("no key")
        except HydraException as error:
            self.problems.append(_unreadable(text, error))
            return []
        options = self._options(override.key_or_group)
        # A key that no group has is a value; so is a mapping, which sets keys below the group.
        is_value = not options or (not override.is_delete() and isinstance(override.value(), dict))
        item = _Item(text, override, is_group=not is_value)
        problem = self._wrong(item, options)
        if problem is not None:
            self.problems.append(Problem(item.key, problem, f"the command line: {text}"))
            return []
        return [item]

    def _wrong(self, item: _Item, options: list[str]) -> str | None:
        if item.is_sweep and not self._sweep:
            values = item.text.partition("=")[2]
            return f"has several values; add -m to run once for each, or write [{values}] for a list"
        if item.is_group and item.key == "size" and not item.names:
            return f"cannot be removed; type size={FULL} for the recipe's own size"
        if not item.is_group or item.override.is_delete():
            return None
        if item.key in GROUPS and item.key not in LISTS and isinstance(item.override.value(), list):
            return "takes one choice, not a list"
        for name in item.names:
            if name not in options:
                return unknown_choice(item.key, name, options)
        return None


def _line(item: _Item) -> str:
    """Return one override for Hydra."""
    text = item.text.lstrip("+")
    # Hydra reads these as they are; a key with `@` places a group elsewhere.
    if item.override.is_hydra_override() or item.override.is_delete() or "@" in text.partition("=")[0]:
        return item.text
    if item.is_group and item.override.value() is None:
        return f"{item.key}=[]" if item.key in LISTS else f"~{item.key}"
    if item.is_group:
        return text if item.key in GROUPS else item.text
    return f"++{text}"  # without ++ Hydra rejects an unknown key and advises to append it


def _unreadable(text: str, error: Exception) -> Problem:
    key, _, value = text.partition("=")
    if ("=" not in text and not text.startswith("~")) or not key.strip("+~") or key.endswith(" "):
        return Problem("", f"'{text}' is not an override; write key=value, without spaces.")
    reason = str(error).splitlines()[0]
    return Problem("", f"'{text}' cannot be read: {reason}. Special characters need quotes: {key}='\"{value}\"'")


class KeyOrigins:
    """Origin of each key of a config: the override, or the file and line, that set it last."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def of(self, key: str) -> str:
        """Return the origin of `key`: what was typed of it and of keys below it, or else its file and line.

        Without one it is that of a key below or above it; empty if none is known.
        """
        origins = [origin for other, origin in self._places.items() if other == key or other.startswith(f"{key}.")]
        typed = [origin.removeprefix(_TYPED) for origin in origins if origin.startswith(_TYPED)]
        if typed:
            return _TYPED + " ".join(typed)
        if key in self._places:
            return self._places[key]
        # The last one recorded is of the file that counts: files are recorded in the order in which Hydra merges them.
        for other in reversed(self._places):
            if other.startswith(f"{key}."):
                return self._places[other]
        parent = key.rpartition(".")[0]
        if f"{parent}._target_" in self._places:
            return self._places[f"{parent}._target_"]
        return self.of(parent) if parent else ""

    def comment(self, key: str) -> str:
        """Return the comment after `key` in the file that set it; empty without one."""
        file, _, line = self._places.get(key, "").rpartition(":")
        if not line.isdigit() or not Path(file).is_file():
            return ""
        return Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1].partition(" # ")[2].strip()

    def add_typed(self, key: str, text: str, *, is_choice: bool = False) -> None:
        """Record an override of `key` and, unless it is the choice of a group, of all keys below it."""
        # The override replaces what was below the key; a choice of a group does not, as its files follow.
        for below in [other for other in self._places if other.startswith(f"{key}.") and not is_choice]:
            del self._places[below]
        self._places[key] = _TYPED + text

    def add_file(self, path: Path, *, package: str = "") -> None:
        """Record the keys of a YAML file whose content goes below `package`."""
        self.add_yaml(path.read_text(encoding="utf-8"), path, package=package)

    def add_yaml(self, text: str, path: Path, *, package: str = "") -> None:
        """Record the keys of the YAML text in `path`."""
        # The C parser is several times faster, but not in every build of PyYAML.
        document = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for key, line in _lines(document, package):
            self._places[key] = f"{_short(path)}:{line}"

    def add_composed(self, loader: ConfigLoader, config_name: str, overrides: list[str]) -> None:
        """Record the keys of every file that Hydra composes, in its order."""
        composed = loader.compute_defaults_list(config_name, overrides, RunMode.MULTIRUN)
        for default in composed.defaults:
            if default.config_path is None or default.config_path.startswith("hydra/"):
                continue
            # The origin is for messages only: a config that is in no file, such as a plugin's, has none.
            path = _find(loader, default.config_path)
            if path is not None:
                package = "" if default.package in (None, "_global_") else str(default.package)
                self.add_file(path, package=package)


def _find(loader: ConfigLoader, config_path: str) -> Path | None:
    for source in loader.get_sources():
        folder: Any = None
        if source.scheme() == "file":
            folder = Path(source.path)
        elif source.scheme() == "pkg" and source.path and source.provider != "hydra":
            folder = resources.files(source.path)
        if isinstance(folder, Path) and (folder / f"{config_path}.yaml").is_file():
            return folder / f"{config_path}.yaml"
    return None


def _lines(node: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the full path of each key in a YAML node, with its line."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = f"{path}.{key.value}" if path else str(key.value)
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield f"{path}.{index}", value.start_mark.line + 1
            yield from _lines(value, f"{path}.{index}")


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
