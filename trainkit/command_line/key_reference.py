"""The page of all keys, made from the constructors' signatures and docstrings and from the files of the groups."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import yaml

from trainkit.command_line.descriptions import description_of
from trainkit.command_line.explain import default_value, type_words
from trainkit.command_line.known_keys import keys_of
from trainkit.command_line.strict import TRAINER

_GROUPS = {
    "strategy": ("Strategies", "Choose one with `strategy=NAME`."),
    "callbacks": ("Callbacks", "Add one with `+callbacks=NAME`, take one away with `~callbacks.NAME`."),
    "logger": ("Loggers", "Add one with `+logger=NAME`, take one away with `~logger.NAME`."),
    "recipe": ("Recipes", "Choose one with `recipe=NAME`."),
}


def key_reference() -> str:
    """Return the page as Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from ("## `trainer`", "", *_table(TRAINER, "trainer", _content("config.yaml").get("trainer", {})))
    for group, (title, how) in _GROUPS.items():
        yield from ("", f"## {title}", "", how)
        for file in sorted(resources.files("trainkit.conf").joinpath(group).iterdir(), key=lambda file: file.name):
            if file.name.endswith(".yaml"):
                yield from _of_choice(group, file.name.removesuffix(".yaml"))


def _of_choice(group: str, name: str) -> Iterator[str]:
    content = _content(f"{group}/{name}.yaml")
    places: dict[str, Any] = {group: content}
    if group == "recipe":
        places = {section: content.get(section) for section in ("task", "data")}
    elif group != "strategy":
        places = {f"{group}.{part}": node for part, node in content.items()}
    parts = [
        (place, node)
        for place, node in places.items()
        if isinstance(node, Mapping) and isinstance(node.get("_target_"), str)
    ]
    if not parts:
        return  # only a list of others
    yield from ("", f"### `{group}={name}`")
    for place, node in parts:
        yield from ("", description_of(node["_target_"]).summary, "", *_table(node["_target_"], place, node))


def _table(target: str, place: str, settings: Mapping[str, Any]) -> Iterator[str]:
    keys = keys_of(target, place)
    if not keys:
        return
    yield "| key | takes | default | meaning |"
    yield "|---|---|---|---|"
    for known in keys:
        name = known.path.rpartition(".")[2]
        default = settings[name] if name in settings else default_value(known.parameter)
        shown = default if isinstance(default, str) else json.dumps(default, default=str)
        cells = (f"`{known.path}`", type_words(known.parameter), f"`{shown}`", known.meaning)
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _content(path: str) -> dict[str, Any]:
    text = resources.files("trainkit.conf").joinpath(path).read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text) or {}
    return content
