"""`trainkit schema`: what a run's settings may hold as JSON Schema, for editors; from signatures and docstrings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.command_line.cli import Arguments
from trainkit.command_line.composition import Composer, composing
from trainkit.command_line.descriptions import description_of
from trainkit.command_line.explain import default_value
from trainkit.command_line.known_keys import keys_of
from trainkit.command_line.overrides import LISTS
from trainkit.command_line.signatures import Parameter
from trainkit.command_line.strict import TRAINER
from trainkit.errors import UserError

_TYPES = {
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


def schema(arguments: Arguments) -> int:
    """Print the schema of the files in the groups of the package and the given config folders."""
    if arguments.overrides:
        raise UserError(f"schema takes no {arguments.overrides[0]!r}. Type trainkit schema > trainkit.schema.json")
    with composing(arguments.config_dirs) as composer:
        print(json.dumps(settings_schema(composer), indent=1))
    return 0


def settings_schema(composer: Composer) -> dict[str, Any]:
    """Return the schema of a run's settings: those of recipes, and whatever a `_target_` of your own takes."""
    properties: dict[str, Any] = {
        "defaults": {"type": "array"},
        "trainer": _of_target(TRAINER, "trainer"),
        "run_dir": {"type": ["string", "null"]},
        "vars": {"type": "object"},
        "strategy": _any_of(composer, "strategy", "strategy"),
        "task": _any_of(composer, "recipe", "task"),
        "data": _any_of(composer, "recipe", "data"),
    }
    for group in LISTS:
        nodes = [
            (part, node) for name in composer.options(group) for part, node in composer.content(group, name).items()
        ]
        known = {part: _of_node(node, f"{group}.{part}") for part, node in nodes if _target(node)}
        properties[group] = {"type": "object", "properties": known}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of a trainkit run",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _any_of(composer: Composer, group: str, section: str) -> dict[str, Any]:
    choices = list(_nodes(composer, group, section))
    targets = [_target(node) for node in choices]
    rules = [
        {
            "if": {"properties": {"_target_": {"const": target}}, "required": ["_target_"]},
            "then": _of_target(target, section),
        }
        for target in dict.fromkeys(targets)
    ]
    return {"type": "object", "properties": {"_target_": {"type": "string"}}, "allOf": rules}


def _nodes(composer: Composer, group: str, section: str) -> Iterator[Any]:
    for name in composer.options(group):
        content = composer.content(group, name)
        node = content.get(section) if group == "recipe" else content
        if _target(node):
            yield node


def _of_node(node: Any, place: str) -> dict[str, Any]:
    return {"anyOf": [_of_target(_target(node), place, partial=True), {"type": "null"}]}


def _of_target(target: str, place: str, *, partial: bool = False) -> dict[str, Any]:
    """Return the schema of a constructor's arguments; a `partial` one has the `_target_` from another file."""
    keys = keys_of(target, place)
    properties = {known.path.rpartition(".")[2]: _of_parameter(known.parameter, known.meaning) for known in keys}
    for name in ("_target_", "_partial_", "_recursive_", "_convert_"):
        properties[name] = {}
    described: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    required = [known.path.rpartition(".")[2] for known in keys if known.parameter.required]
    if required and not partial:
        described["required"] = required
    return {**described, "description": description_of(target).summary}


def _of_parameter(parameter: Parameter, meaning: str) -> dict[str, Any]:
    described: dict[str, Any] = {"description": meaning}
    if not parameter.required:
        described["default"] = default_value(parameter)
    kinds, choices = parameter.accepted.kinds, list(parameter.accepted.choices)
    if kinds is None:
        return described
    types = sorted({_TYPES[kind] for kind in kinds})
    options: list[dict[str, Any]] = [{"type": types}] if types else []
    options += [{"enum": choices}] if choices else []
    # An object may stand for any value, and so may what another key says.
    options += [_INTERPOLATION, {"type": "object", "required": ["_target_"]}]
    return {**described, "anyOf": options}


def _target(node: Any) -> str:
    return str(node.get("_target_", "")) if isinstance(node, Mapping) else ""
