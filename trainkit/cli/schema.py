"""Keys of a config with their types, defaults and docs, as JSON Schema for editors and as a Markdown page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.cli.compose import ConfigComposer, compose_config
from trainkit.cli.main import Arguments
from trainkit.cli.overrides import LISTS
from trainkit.cli.signatures import Parameter, TargetError, signature_of
from trainkit.cli.validate import TRAINER, config_signature
from trainkit.errors import UserError

_JSON_TYPES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "str": "string",
    "none": "null",
    "list": "array",
    "dict": "object",
    "duration": "string",
}
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.*\}"}
_GROUPS = {
    "strategy": ("Strategies", "Choose one with `strategy=NAME`."),
    "callbacks": ("Callbacks", "Add one with `+callbacks=NAME`, remove one with `~callbacks.NAME`."),
    "logger": ("Loggers", "Add one with `+logger=NAME`, remove one with `~logger.NAME`."),
    "recipe": ("Recipes", "Choose one with `recipe=NAME`."),
}


@dataclass(frozen=True)
class ConfigKey:
    """A parameter of a class in the config, and its path."""

    path: str
    parameter: Parameter

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def known_keys(tree: Mapping[str, Any]) -> Iterator[ConfigKey]:
    """Yield all keys of the constructors in a config, in the order of their signatures."""
    yield from keys_of(TRAINER, "trainer")
    for section in ("task", "data", "strategy"):
        yield from _keys_below(section, tree.get(section))
    for group in LISTS:
        for name, node in (tree.get(group) or {}).items():
            yield from _keys_below(f"{group}.{name}", node)


def keys_of(target: str, path: str) -> list[ConfigKey]:
    """Return the keys at `path` of the class or function `target`; empty if it cannot be imported."""
    try:
        parameters = config_signature(target).parameters
    except TargetError:
        return []
    return [ConfigKey(f"{path}.{name}", parameter) for name, parameter in parameters.items()]


def summary_of(target: str) -> str:
    """Return the first paragraph of a target's docstring; empty if it cannot be imported."""
    try:
        return signature_of(target).summary
    except TargetError:
        return ""


def objects_in(composer: ConfigComposer, group: str, name: str) -> dict[str, Mapping[str, Any]]:
    """Return the nodes with a `_target_` in a choice, by their paths in the config."""
    content = composer.content(group, name)
    places: dict[str, Any] = {f"{group}.{part}": node for part, node in content.items()}
    if group == "strategy":
        places = {group: content}
    elif group == "recipe":
        places = {section: content.get(section) for section in ("task", "data")}
    return {place: node for place, node in places.items() if isinstance(node, Mapping) and _target(node)}


# ---- JSON Schema


def config_schema(arguments: Arguments) -> int:
    """Print the JSON Schema of a config, with the choices of the package and of the given folders."""
    if arguments.overrides:
        raise UserError(
            f"config-schema does not take {arguments.overrides[0]!r}. "
            "Type trainkit config-schema > trainkit.schema.json"
        )
    with compose_config(arguments.config_dirs) as composer:
        print(json.dumps(json_schema(composer), indent=1))
    return 0


def json_schema(composer: ConfigComposer) -> dict[str, Any]:
    """Return the JSON Schema of a config; classes that are no choice of a group may have any keys."""
    properties: dict[str, Any] = {
        "defaults": {"type": "array"},
        "trainer": _object_schema(TRAINER, "trainer"),
        "run_dir": {"type": ["string", "null"]},
        "vars": {"type": "object"},
        "strategy": _choice_schema(composer, "strategy", "strategy"),
        "task": _choice_schema(composer, "recipe", "task"),
        "data": _choice_schema(composer, "recipe", "data"),
    }
    for group in LISTS:
        nodes: dict[str, Mapping[str, Any]] = {}
        for name in composer.options(group):
            nodes |= objects_in(composer, group, name)
        known = {
            place.rpartition(".")[2]: {"anyOf": [_object_schema(_target(node), place, partial=True), {"type": "null"}]}
            for place, node in nodes.items()
        }
        properties[group] = {"type": "object", "properties": known}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Config of a trainkit run",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _choice_schema(composer: ConfigComposer, group: str, section: str) -> dict[str, Any]:
    nodes = [objects_in(composer, group, name).get(section) for name in composer.options(group)]
    rules = [
        {
            "if": {"properties": {"_target_": {"const": target}}, "required": ["_target_"]},
            "then": _object_schema(target, section),
        }
        for target in dict.fromkeys(_target(node) for node in nodes if node)
    ]
    return {"type": "object", "properties": {"_target_": {"type": "string"}}, "allOf": rules}


def _object_schema(target: str, place: str, *, partial: bool = False) -> dict[str, Any]:
    """Return the schema of a constructor's arguments; with `partial` none of them is required."""
    keys = keys_of(target, place)
    properties = {key.name: _parameter_schema(key.parameter) for key in keys}
    for name in ("_target_", "_partial_", "_recursive_", "_convert_"):
        properties[name] = {}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    required = [key.name for key in keys if key.parameter.required]
    if required and not partial:
        schema["required"] = required
    return {**schema, "description": summary_of(target)}


def _parameter_schema(parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": parameter.doc}
    if not parameter.required:
        schema["default"] = parameter.default
    kinds, choices = parameter.type.kinds, list(parameter.type.choices)
    if kinds is None:
        return schema
    options: list[dict[str, Any]] = [{"type": sorted({_JSON_TYPES[kind] for kind in kinds})}] if kinds else []
    options += [{"enum": choices}] if choices else []
    # An object may stand for any value, and so may an interpolation.
    return {**schema, "anyOf": [*options, _INTERPOLATION, {"type": "object", "required": ["_target_"]}]}


# ---- Markdown


def key_reference() -> str:
    """Return the reference of all keys as Markdown."""
    with compose_config() as composer:
        return "\n".join(_page(composer))


def _page(composer: ConfigComposer) -> Iterator[str]:
    yield from ("## `trainer`", "", *_key_table(TRAINER, "trainer", {}))
    for group, (title, how) in _GROUPS.items():
        yield from ("", f"## {title}", "", how)
        for name in composer.options(group):
            objects = objects_in(composer, group, name)
            if objects:  # else it only lists other choices
                yield from ("", f"### `{group}={name}`")
            for place, node in objects.items():
                yield from ("", summary_of(_target(node)), "", *_key_table(_target(node), place, node))


def _key_table(target: str, place: str, chosen: Mapping[str, Any]) -> Iterator[str]:
    keys = keys_of(target, place)
    if keys:
        yield "| key | type | default | description |"
        yield "|---|---|---|---|"
    for key in keys:
        default = chosen.get(key.name, key.parameter.default)
        shown = default if isinstance(default, str) else json.dumps(default, default=str)
        cells = (f"`{key.path}`", key.parameter.type_text, f"`{shown}`", key.parameter.doc)
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _keys_below(path: str, node: Any) -> Iterator[ConfigKey]:
    if not isinstance(node, Mapping):
        return
    if _target(node):
        yield from keys_of(_target(node), path)
    for name, value in node.items():
        yield from _keys_below(f"{path}.{name}", value)


def _target(node: Mapping[str, Any]) -> str:
    return str(node.get("_target_", ""))
