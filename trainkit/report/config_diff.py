"""Differences between configs; `config_diff.json` contains those of a run to its recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainkit.files import write_text

FILENAME = "config_diff.json"
_NOT_COMPARED = ("recipe", "run_dir")


@dataclass(frozen=True)
class ConfigChange:
    """A key with its two values as text; empty if a config does not have the key."""

    key: str
    before: str
    after: str


def write_config_diff(folder: Path, changes: Sequence[ConfigChange]) -> None:
    """Write `config_diff.json` into a run's folder."""
    write_text(folder / FILENAME, json.dumps([asdict(change) for change in changes], indent=1))


def read_config_diff(folder: Path) -> list[ConfigChange] | None:
    """Return the changes in a run's folder; `None` if they cannot be read."""
    try:
        return [ConfigChange(**change) for change in json.loads((folder / FILENAME).read_text(encoding="utf-8"))]
    # A file of another version or one that was damaged: the report does without.
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ConfigChange]:
    """Return the keys whose values differ, sorted by name; a new object is one change."""
    ours = {key: value for key, value in before.items() if key not in _NOT_COMPARED}
    theirs = {key: value for key, value in after.items() if key not in _NOT_COMPARED}
    return sorted(_differences(ours, theirs, ""), key=lambda change: change.key)


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return each key that is not the same in all configs, with its value in each."""
    flat = [dict(_flat({key: value for key, value in tree.items() if key != "run_dir"}, "")) for tree in configs]
    keys = dict.fromkeys(key for tree in flat for key in tree)
    rows = [(key, [tree.get(key, "") for tree in flat]) for key in keys]
    # As text: values of different types are compared as they would be typed.
    return sorted((key, values) for key, values in rows if len(set(values)) > 1)


def as_text(value: Any) -> str:
    """Return a value as it would be typed."""
    if isinstance(value, Mapping):
        target = str(value.get("_target_", "")).rpartition(".")[2]
        inner = ", ".join(f"{key}={as_text(part)}" for key, part in value.items() if key != "_target_")
        return f"{target}({inner})" if target else f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_text(part) for part in value)}]"
    # By type, as 1 equals True and would be found in the table.
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else str(value)


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], above: str) -> Iterator[ConfigChange]:
    for key in dict.fromkeys([*ours, *theirs]):
        name = f"{above}{key}"
        if key not in theirs:
            yield ConfigChange(name, as_text(ours[key]), "")
        elif key not in ours:
            yield ConfigChange(name, "", as_text(theirs[key]))
        elif isinstance(ours[key], Mapping) and isinstance(theirs[key], Mapping):
            yield from _differences(ours[key], theirs[key], f"{name}.")
        elif ours[key] != theirs[key]:
            yield ConfigChange(name, as_text(ours[key]), as_text(theirs[key]))


def _flat(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", as_text(value)
