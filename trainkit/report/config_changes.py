"""How a run's settings differ from what its recipe says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_NOT_COMPARED = ("recipe", "run_dir")


@dataclass(frozen=True)
class Change:
    """A key with two values as texts; empty where there is none."""

    key: str
    before: str
    after: str


def changes_from_recipe(config: Mapping[str, Any]) -> list[Change] | None:
    """Return what differs from the recipe with the same strategy; `None` where no recipe can be composed."""
    recipe = config.get("recipe")
    if not isinstance(recipe, str):
        return None
    try:
        own, defaults = _defaults(recipe, config)
    except Exception as error:  # whatever a recipe of the user's raises, a report can do without
        logger.debug("the recipe %s cannot be composed: %s", recipe, error)
        return None
    found = differences(defaults, config)
    if own != defaults:
        names = [str((tree.get("strategy") or {}).get("_target_", "")).rpartition(".")[2] for tree in (own, config)]
        found.insert(0, Change("strategy", names[0], names[1]))
    return found


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


def _defaults(recipe: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe's own settings, and those with the strategy of the run."""
    from hydra.core.singleton import Singleton

    from trainkit.command_line.composition import composing

    state = Singleton.get_state()  # a sweep's own Hydra may be running
    try:
        with composing() as composer:
            own = composer.settings([f"recipe={recipe}"]).tree
            wanted = _target(config)
            if wanted in ("", _target(own)):
                return own, own
            # Each composition takes a tenth of a second; most often the name is part of the class's path.
            for name in sorted(composer.options("strategy"), key=lambda name: name not in wanted.split(".")):
                tree = composer.settings([f"recipe={recipe}", f"strategy={name}"]).tree
                if _target(tree) == wanted:
                    return own, tree
            return own, own
    finally:
        Singleton.set_state(state)


def _target(tree: Mapping[str, Any]) -> str:
    strategy = tree.get("strategy")
    return str(strategy.get("_target_", "")) if isinstance(strategy, Mapping) else ""


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
