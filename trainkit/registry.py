"""Strategies, callbacks and loggers by their short names.

A name is a YAML file of a config group, or an installed package's entry point in the group `trainkit.strategies`,
`trainkit.callbacks` or `trainkit.loggers`. A strategy's file holds `_target_` and its arguments;
a callback's or logger's file holds them below its name, so that several can stand side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module, resources
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from trainkit.errors import UserError, nearest

_PLUGIN_GROUPS = {"strategy": "strategies", "callbacks": "callbacks", "logger": "loggers"}


def names(group: str) -> list[str]:
    """Return the names of a config group, without those that select several others."""
    files = [name for name in _files(group) if "defaults" not in _content(group, name)]
    return sorted({*files, *(point.name for point in _points(group))})


def make(group: str, name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Return a new object of the given name, with `settings` in place of its defaults.

    Raises UserError for an unknown name.
    """
    arguments = settings or {}
    if name not in _files(group):  # searching installed packages takes milliseconds
        for point in _points(group):
            if point.name == name:
                return point.load()(**arguments)
    arguments = {**_settings(group, name), **arguments}
    module, _, attribute = arguments.pop("_target_").rpartition(".")
    return getattr(import_module(module), attribute)(**arguments)


def name_of(group: str, item: object) -> str:
    """Return the name by which the class of `item` is chosen, or the name of the class if it has none."""
    path = f"{type(item).__module__}.{type(item).__qualname__}"
    named = [name for name in names(group) if name in _files(group) and _settings(group, name)["_target_"] == path]
    return named[0] if named else type(item).__name__


def plugin_settings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (group, name, settings) for each entry point of an installed package."""
    for group in _PLUGIN_GROUPS:
        for point in _points(group):
            settings: dict[str, Any] = {"_target_": point.value.replace(":", ".")}
            yield group, point.name, settings if group == "strategy" else {point.name: settings}


@cache
def _settings(group: str, name: str) -> Mapping[str, Any]:
    content = _content(group, name) if name in _files(group) else None
    if content is None or "defaults" in content:
        raise UserError(f"unknown {group} {name!r}.{nearest(name, names(group))} There are: {', '.join(names(group))}.")
    settings: dict[str, Any] = content if "_target_" in content else content[name]
    return settings


@cache
def _content(group: str, name: str) -> dict[str, Any]:
    import yaml

    content: dict[str, Any] = yaml.safe_load(_files(group)[name].read_text(encoding="utf-8"))
    return content


@cache
def _files(group: str) -> dict[str, Any]:
    folder = resources.files("trainkit.conf") / group
    return {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name.endswith(".yaml")}


def _points(group: str) -> EntryPoints:
    points: EntryPoints = _all_points().select(group=f"trainkit.{_PLUGIN_GROUPS.get(group)}")
    return points


@cache
def _all_points() -> Any:  # has `select`, but another class in each Python
    return entry_points()
