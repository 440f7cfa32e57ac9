"""Differences between configs: of a run from its recipe, and of several runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainkit.checkpoints.file import write_text

_FILE = "config_changes.json"
_NOT_COMPARED = ("recipe", "run_dir")


@dataclass(frozen=True)
class Change:
    """A key with two values as texts; empty where there is none."""

    key: str
    before: str
    after: str


def changes_from_recipe(
    config: Mapping[str, Any], own: Mapping[str, Any], with_strategy: Mapping[str, Any]
) -> list[Change]:
    """Return how a config differs from its recipe: `own` is the recipe's config, the other has the run's strategy."""
    found = differences(with_strategy, config)
    if own != with_strategy:
        names = [str((tree.get("strategy") or {}).get("_target_", "")).rpartition(".")[2] for tree in (own, config)]
        found.insert(0, Change("strategy", names[0], names[1]))
    return found


def write_changes(folder: Path, changes: Sequence[Change]) -> None:
    """Write the changes into a run folder."""
    write_text(folder / _FILE, json.dumps([asdict(change) for change in changes], indent=2) + "\n")


def read_changes(folder: Path) -> list[Change] | None:
    """Return the changes that a run folder holds, `None` if it holds none that can be read."""
    try:
        return [Change(**change) for change in json.loads((folder / _FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the keys whose values differ, in the order of their names; whole objects that are new in one line."""
    ours = {key: value for key, value in before.items() if key not in _NOT_COMPARED}
    theirs = {key: value for key, value in after.items() if key not in _NOT_COMPARED}
    return sorted(_differences(ours, theirs, ""), key=lambda change: change.key)


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return each key that is not the same in all settings, with its value in each of them."""
    flat = [dict(_flat({key: value for key, value in tree.items() if key != "run_dir"}, "")) for tree in configs]
    keys = dict.fromkeys(key for tree in flat for key in tree)
    rows = [(key, [tree.get(key, "") for tree in flat]) for key in keys]
    return sorted((key, values) for key, values in rows if len(set(values)) > 1)


def as_text(value: Any) -> str:
    """Return a value as it would be typed."""
    if isinstance(value, Mapping):
        target = str(value.get("_target_", "")).rpartition(".")[2]
        inner = ", ".join(f"{key}={as_text(part)}" for key, part in value.items() if key != "_target_")
        return f"{target}({inner})" if target else f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_text(part) for part in value)}]"
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _is_word(value) else str(value)


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], above: str) -> Iterator[Change]:
    for key in dict.fromkeys([*before, *after]):
        name = f"{above}{key}"
        if key not in after:
            yield Change(name, as_text(before[key]), "")
        elif key not in before:
            yield Change(name, "", as_text(after[key]))
        elif isinstance(before[key], Mapping) and isinstance(after[key], Mapping):
            yield from _differences(before[key], after[key], f"{name}.")
        elif before[key] != after[key]:
            yield Change(name, as_text(before[key]), as_text(after[key]))


def _flat(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", as_text(value)
