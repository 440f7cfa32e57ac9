"""All keys of a run's settings: those that are set, and those that constructors would take as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.command_line.descriptions import description_of
from trainkit.command_line.signatures import Parameter, signature_of
from trainkit.command_line.source import TargetError
from trainkit.command_line.strict import OWN_PLACES, TRAINER


@dataclass(frozen=True)
class KnownKey:
    """An argument of what a part of the settings describes."""

    path: str
    parameter: Parameter
    meaning: str
    """From the docstring; empty where that says nothing."""


def known_keys(tree: Mapping[str, Any]) -> Iterator[KnownKey]:
    """Yield every key that constructors take, in the order of their signatures."""
    yield from keys_of(TRAINER, "trainer")
    for section in ("task", "data", "strategy"):
        yield from _below(section, tree.get(section))
    for group in ("callbacks", "logger"):
        for name, node in (tree.get(group) or {}).items():
            yield from _below(f"{group}.{name}", node)


def keys_of(target: str, path: str) -> list[KnownKey]:
    """Return the keys at `path` of the class or function `target`; none where it cannot be read."""
    try:
        parameters = signature_of(target).parameters
    except TargetError:
        return []
    meanings = description_of(target).arguments
    return [
        KnownKey(f"{path}.{name}", parameter, meanings.get(name, ""))
        for name, parameter in parameters.items()
        if target != TRAINER or name not in OWN_PLACES
    ]


def _below(path: str, node: Any) -> Iterator[KnownKey]:
    if not isinstance(node, Mapping):
        return
    if isinstance(node.get("_target_"), str):
        yield from keys_of(node["_target_"], path)
    for name, value in node.items():
        yield from _below(f"{path}.{name}", value)
