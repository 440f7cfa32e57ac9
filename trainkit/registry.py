"""Finding strategies, callbacks and loggers by their short names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module, resources
from importlib.metadata import entry_points
from typing import Any

from trainkit.errors import UserError, nearest

_GROUPS = {"strategy": "strategies", "callbacks": "callbacks", "logger": "loggers", "recipe": "recipes"}


def names(group: str) -> list[str]:
    """Return the names that can be written for a config group: its YAML files and installed packages' entry points."""
    return sorted({*_files(group), *(point.name for point in _points(group))})


def make(group: str, name: str) -> Any:
    """Return a new object of the given name with its default settings; raises UserError for an unknown name."""
    for point in _points(group):
        if point.name == name:
            return point.load()()
    settings = dict(_settings(group, name))
    module, _, attribute = settings.pop("_target_").rpartition(".")
    return getattr(import_module(module), attribute)(**settings)


@cache
def _settings(group: str, name: str) -> Mapping[str, Any]:
    files = _files(group)
    if name not in files:
        raise UserError(
            f"unknown {group} {name!r}.{nearest(name, files)} There are: {', '.join(names(group))}."
        )
    import yaml

    settings: dict[str, Any] = yaml.safe_load(files[name].read_text())
    # In a group of several entries (callbacks) the file holds one entry under its name.
    return settings if "_target_" in settings else settings[name]


@cache
def _files(group: str) -> dict[str, Any]:
    folder = resources.files("trainkit.conf") / group
    return {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name.endswith(".yaml")}


def _points(group: str) -> Any:
    return entry_points(group=f"trainkit.{_GROUPS[group]}")
