"""`trainkit explain`: description, type, default and value of a key; without a key, the config with its origins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainkit.cli.compose import ConfigComposer, Settings, compose_config, config_file
from trainkit.cli.main import Arguments
from trainkit.cli.overrides import GROUPS, LISTS, KeyOrigins
from trainkit.cli.schema import ConfigKey, keys_of, known_keys, objects_in, summary_of
from trainkit.cli.signatures import Parameter
from trainkit.cli.validate import RENAMED, SECTIONS, TRAINER, closest, did_you_mean, unknown_key
from trainkit.errors import UserError

_MOST_ALIGNED = 56  # columns
_ABSENT = object()
_SECTIONS = {
    "recipe": "A task with its data and settings; trainkit recipes lists them.",
    "size": "Size of the recipe; size=tiny trains in seconds, to try things out.",
    "task": "The task to train: a class and its arguments.",
    "data": "The data to train on: a class and its arguments.",
    "trainer": "Duration and other settings of training.",
    "strategy": "Devices and processes to train on.",
    "callbacks": "Additions to the training loop; +callbacks=NAME adds one, ~callbacks.NAME removes one.",
    "logger": "Destinations of metrics; +logger=NAME adds one, ~logger.NAME removes one.",
    "run_dir": "The run's folder; null: a new one, runs/<recipe>/<date_time>.",
    "vars": "Your own values, for ${vars.name} elsewhere.",
}


def explain(arguments: Arguments) -> int:
    """Print the description of each key under the given overrides; without a key, every value with its origin.

    `config=PATH` explains the config of a run.
    """
    saved = arguments.take("config")
    keys = [text for text in arguments.overrides if "=" not in text and text[:1] not in "~+"]
    overrides = [text for text in arguments.overrides if text not in keys]
    with compose_config(arguments.config_dirs, saved=None if saved is None else config_file(Path(saved))) as composer:
        settings = composer.settings(overrides, needs_task=False)
        explained = _Explanations(composer, settings)
        pages = [explained.of(key) for key in keys] or ["\n".join(annotated(settings))]
    print("\n\n".join(pages))
    return 0


class _Explanations:
    def __init__(self, composer: ConfigComposer, settings: Settings) -> None:
        self._composer = composer
        self._tree = settings.tree
        self._origins: KeyOrigins = settings.find_origins()
        self._known = {key.path: key for key in known_keys(settings.tree)}

    def of(self, path: str) -> str:
        """Return the description of the key at `path`, or of the only key that ends in it."""
        known = self._known.get(path)
        if known is not None:
            return "\n".join(self._argument(known))
        if path in _SECTIONS or isinstance(_value(self._tree, path), Mapping):
            return "\n".join(self._part(path))
        if _value(self._tree, path) is not _ABSENT:
            return "\n".join([path, *self._present(path)])
        ending = [key for key in self._known if key.endswith(f".{path}")]
        if len(ending) == 1:
            return self.of(ending[0])
        if ending:
            raise UserError(f"several keys end in '{path}'. {did_you_mean(ending)}")
        return self._of_another_choice(path)

    def _argument(self, known: ConfigKey) -> Iterator[str]:
        yield known.path
        yield f"  {known.parameter.doc or self._origins.comment(known.path) or '(no description)'}"
        yield from _about(known.parameter)
        yield from self._present(known.path)

    def _present(self, path: str) -> Iterator[str]:
        value = _value(self._tree, path)
        if value is not _ABSENT:
            origin = self._origins.of(path)
            yield f"  value    {_shown(value)}{f', from {origin}' if origin else ''}"

    def _part(self, path: str) -> Iterator[str]:
        """Yield the description of a section or an object of the config, and its keys."""
        node = _value(self._tree, path)
        target = TRAINER if path == "trainer" else node.get("_target_") if isinstance(node, Mapping) else None
        yield path
        if path in _SECTIONS:
            yield f"  {_SECTIONS[path]}"
        elif isinstance(target, str):
            yield f"  {summary_of(target)}"
        if path in GROUPS:
            yield from self._choices(path)
        if isinstance(node, str) or node is None:
            yield from self._present(path)
        if isinstance(target, str):
            yield f"  keys of {target}:"
            keys = keys_of(target, path)
        else:
            keys = [known for key, known in self._known.items() if key.startswith(f"{path}.")]
        width = max((len(known.path) for known in keys), default=0)
        for known in keys:
            yield f"    {known.path:<{width}}  {_first_sentence(known.parameter.doc)}".rstrip()

    def _choices(self, group: str) -> Iterator[str]:
        yield f"  choices ({group}=NAME):"
        options = self._composer.options(group)
        width = max(map(len, options), default=0)
        for name in options:
            objects = list(objects_in(self._composer, group, name).values())
            summary = summary_of(objects[0]["_target_"]) if len(objects) == 1 else ""
            yield f"    {name:<{width}}  {summary}".rstrip()

    def _of_another_choice(self, path: str) -> str:
        """Return the description of a key that exists with another choice of its group."""
        found: dict[str, list[str]] = {}
        pages: dict[str, ConfigKey] = {}
        for key, (choice, known) in self._all_known():
            if key == path or key.endswith(f".{path}"):
                pages.setdefault(key, known)
                found.setdefault(key, []).append(choice)
        if not found:
            raise UserError(str(self._unknown(path)))
        full, choices = next(iter(found.items()))
        known = pages[full]
        lines = [full, f"  {known.parameter.doc}".rstrip(), *_about(known.parameter)]
        return "\n".join([*lines, f"  available with {' or '.join(choices)}"])

    def _all_known(self) -> Iterator[tuple[str, tuple[str, ConfigKey]]]:
        """Yield the keys of every choice of every group, each with the override that chooses it."""
        for group in GROUPS:
            sign = "+" if group in LISTS else ""
            for name in self._composer.options(group):
                for place, node in objects_in(self._composer, group, name).items():
                    for known in keys_of(node["_target_"], place):
                        yield known.path, (f"{sign}{group}={name}", known)

    def _unknown(self, path: str) -> str:
        parent = path.rpartition(".")[0]
        valid = [key.rpartition(".")[2] for key in self._known if key.rpartition(".")[0] == parent]
        if valid or path in RENAMED:
            return str(unknown_key(path, valid, all_keys=self._known))
        near = closest(path, [*SECTIONS, *self._known])
        near += closest(path, sorted({key.rpartition(".")[2] for key, _ in self._all_known()}))
        return f"unknown key '{path}'. {did_you_mean(near) if near else 'Type trainkit explain for all keys.'}"


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.;])\s", text)[0].rstrip(";") if text else ""


def _about(parameter: Parameter) -> list[str]:
    default = "none (required)" if parameter.required else _shown(parameter.default)
    return [f"  type     {parameter.type_text}", f"  default  {default}"]


def _value(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for part in path.split("."):
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, Sequence) and not isinstance(node, str) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return _ABSENT
    return node


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# ---- The whole config


def annotated(settings: Settings) -> Iterator[str]:
    """Yield lines of YAML, each value with its origin."""
    origins = settings.find_origins()
    written = yaml.safe_load(settings.unresolved) or {}
    rows = list(_rows(settings.tree, written, "", 0, origins))
    width = min(_MOST_ALIGNED, max((len(text) for text, origin in rows if origin), default=0))
    for text, origin in rows:
        yield f"{text:<{width}}  # {origin}" if origin else text


def _rows(node: dict[str, Any], written: Any, path: str, depth: int, origins: KeyOrigins) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        place = f"{path}.{key}" if path else key
        source = written.get(key) if isinstance(written, dict) else None
        if isinstance(value, dict) and value:
            yield f"{'  ' * depth}{key}:", ""
            yield from _rows(value, source, place, depth + 1, origins)
        else:
            origin = origins.of(place)
            if isinstance(source, str) and "${" in source:
                origin = f"{source} in {origin}"
            yield f"{'  ' * depth}{key}: {_inline(value)}", origin


def _inline(value: Any) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
