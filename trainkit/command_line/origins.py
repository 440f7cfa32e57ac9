"""Where each key of the settings comes from: what was typed, or a file and line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.types import RunMode


class Origins:
    """Knows for each key the last place that set it."""

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
