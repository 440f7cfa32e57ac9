"""`trainkit explain`: description, type, default and value of a key; without a key, the config with its origins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from trainkit.cli.compose import ConfigComposer, Settings, compose_config, read_saved
from trainkit.cli.main import Arguments
from trainkit.cli.overrides import GROUPS, LISTS, KeyOrigins
from trainkit.cli.signatures import Parameter, TargetError, signature_of
from trainkit.cli.validate import SECTIONS, TRAINER, closest, config_signature, did_you_mean, unknown_key
from trainkit.errors import UserError

_MOST_ALIGNED = 56  # columns
_ABSENT = object()  # `None` is the value of many keys
_SECTIONS = {
    "recipe": "A task with its data and settings; trainkit recipes lists them.",
    "size": "Size of the recipe; size=tiny trains in seconds, to try things out.",
    "task": "The task to train: a class and its arguments.",
    "data": "The data to train on: a class and its arguments.",
    "trainer": "Duration and other settings of training.",
    "strategy": "Devices and processes to train on.",
    "callbacks": "Additions to the training loop; +callbacks=NAME adds one, ~callbacks.NAME removes one.",
    "logger": "Destinations of metrics; +logger=NAME adds one, ~logger.NAME removes one.",
    "run_dir": "The run's folder, or a URL, s3://bucket/run7, to copy it to; null: a new runs/<recipe>/<date_time>.",
    "vars": "Your own values, for ${vars.name} elsewhere.",
}
_CHAPTERS = {
    "strategy": ("Strategies", "Choose one with `strategy=NAME`."),
    "callbacks": ("Callbacks", "Add one with `+callbacks=NAME`, remove one with `~callbacks.NAME`."),
    "logger": ("Loggers", "Add one with `+logger=NAME`, remove one with `~logger.NAME`."),
    "recipe": ("Recipes", "Choose one with `recipe=NAME`."),
}
"""Title and introduction of each group in the reference of all keys."""


def explain(arguments: Arguments) -> int:
    """Print the description of each key under the given overrides; without a key, every value with its origin.

    `config=PATH` explains the config of a run.
    """
    config = arguments.take("config")
    saved = None if config is None else read_saved(config, trusted=arguments.trust)
    # A removal or an addition is an override even without `=`.
    keys = [text for text in arguments.overrides if "=" not in text and text[:1] not in "~+"]
    overrides = [text for text in arguments.overrides if text not in keys]
    with compose_config(arguments.config_dirs, saved=saved) as composer:
        settings = composer.settings(overrides, needs_task=False)
        explained = _Explanations(composer, settings)
        pages = [explained.of(key) for key in keys] or [_annotated(settings)]
        print("\n\n".join("\n".join(page) for page in pages))
    return 0


def known_keys(tree: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of all constructors in a config by their keys, in the order of the signatures."""
    keys = _keys_of(TRAINER, "trainer")
    for section in ("task", "data", "strategy", *LISTS):
        keys |= _keys_below(section, tree.get(section))
    return keys


def key_reference() -> str:
    """Return the reference of all keys as Markdown."""
    with compose_config() as composer:
        return "\n".join(_reference(composer))


def _keys_below(path: str, node: Any) -> dict[str, Parameter]:
    if not isinstance(node, Mapping):
        return {}
    keys = _keys_of(node["_target_"], path) if "_target_" in node else {}
    for name, value in node.items():
        keys |= _keys_below(f"{path}.{name}", value)
    return keys


def _keys_of(target: str, path: str) -> dict[str, Parameter]:
    """Return the keys at `path` of the class or function `target`; empty if it cannot be imported."""
    try:
        return {f"{path}.{name}": parameter for name, parameter in config_signature(target).parameters.items()}
    # An optional package may be missing: the other keys are explained without it.
    except TargetError:
        return {}


def _summary_of(target: str) -> str:
    """Return the first paragraph of a target's docstring; empty if it cannot be imported."""
    try:
        return signature_of(target).summary
    except TargetError:
        return ""


def _objects_in(composer: ConfigComposer, group: str, name: str) -> dict[str, Mapping[str, Any]]:
    """Return the nodes with a `_target_` in a choice, by their paths in the config."""
    content = composer.content(group, name)
    nodes: dict[str, Any] = {f"{group}.{part}": node for part, node in content.items()}
    if group == "strategy":
        nodes = {group: content}
    elif group == "recipe":
        nodes = {section: content.get(section) for section in ("task", "data")}
    return {path: node for path, node in nodes.items() if isinstance(node, Mapping) and "_target_" in node}


class _Explanations:
    def __init__(self, composer: ConfigComposer, settings: Settings) -> None:
        self._composer = composer
        self._tree = settings.tree
        # Composes again and reads all files, so only once.
        self._origins: KeyOrigins = settings.find_origins()
        self._known = known_keys(settings.tree)

    def of(self, path: str) -> Iterator[str]:
        """Yield the description of the key at `path`, or of the only key that ends in it."""
        node = _value(self._tree, path)
        if path in self._known:
            yield path
            yield f"  {self._known[path].doc or self._origins.comment(path) or '(no description)'}"
            yield from _about(self._known[path])
            yield from self._present(path)
        elif path in _SECTIONS or isinstance(node, Mapping):
            yield from self._section(path, node)
        elif node is not _ABSENT:
            yield path
            yield from self._present(path)
        else:
            ending = [key for key in self._known if key.endswith(f".{path}")]
            if len(ending) > 1:
                raise UserError(f"several keys end in '{path}'. {did_you_mean(ending)}")
            yield from self.of(ending[0]) if ending else self._of_another_choice(path)

    def _present(self, path: str) -> Iterator[str]:
        value = _value(self._tree, path)
        if value is not _ABSENT:
            origin = self._origins.of(path)
            yield f"  value    {_shown(value)}{f', from {origin}' if origin else ''}"

    def _section(self, path: str, node: Any) -> Iterator[str]:
        """Yield the description of a section or an object of the config, and its keys."""
        target = TRAINER if path == "trainer" else node.get("_target_") if isinstance(node, Mapping) else None
        yield path
        if path in _SECTIONS:
            yield f"  {_SECTIONS[path]}"
        elif isinstance(target, str):
            yield f"  {_summary_of(target)}"
        if path in GROUPS:
            yield f"  choices ({path}=NAME):"
            summaries = {}
            for name in self._composer.options(path):
                objects = list(_objects_in(self._composer, path, name).values())
                summaries[name] = _summary_of(objects[0]["_target_"]) if len(objects) == 1 else ""
            yield from _columns(summaries)
        if isinstance(node, str) or node is None:
            yield from self._present(path)
        keys = {key: parameter for key, parameter in self._known.items() if key.startswith(f"{path}.")}
        if isinstance(target, str):
            yield f"  keys of {target}:"
            keys = _keys_of(target, path)
        yield from _columns({key: _first_sentence(parameter.doc) for key, parameter in keys.items()})

    def _of_another_choice(self, path: str) -> Iterator[str]:
        """Yield the description of a key that exists with another choice of its group."""
        choices_by_key: dict[str, list[str]] = {}
        pages: dict[str, Parameter] = {}
        for choice, key, parameter in self._all_known():
            if key == path or key.endswith(f".{path}"):
                # A key that several choices have is described by the first of them.
                pages.setdefault(key, parameter)
                choices_by_key.setdefault(key, []).append(choice)
        if not choices_by_key:
            yield from self._choice(path)
            return
        full, choices = next(iter(choices_by_key.items()))
        yield full
        yield f"  {pages[full].doc}".rstrip()
        yield from _about(pages[full])
        yield f"  available with {' or '.join(choices)}"

    def _choice(self, path: str) -> Iterator[str]:
        """Yield the descriptions of the objects at a path, or of the choice with a name."""
        objects = [item for item in self._objects() if path in (item[1], item[0].partition("=")[2])]
        if not objects:
            raise UserError(self._unknown(path))
        for choice, key_path, target in objects:
            node = _value(self._tree, key_path)
            if isinstance(node, Mapping) and node.get("_target_") == target:
                yield from self._section(key_path, node)
                continue
            keys = _keys_of(target, key_path)
            yield from (key_path, f"  {_summary_of(target)}", f"  available with {choice}", f"  keys of {target}:")
            yield from _columns({key: _first_sentence(keys[key].doc) for key in keys})

    def _all_known(self) -> Iterator[tuple[str, str, Parameter]]:
        """Yield the keys of every choice of every group, each after the override that chooses it."""
        for choice, key_path, target in self._objects():
            for key, parameter in _keys_of(target, key_path).items():
                yield choice, key, parameter

    def _objects(self) -> Iterator[tuple[str, str, str]]:
        """Yield the override, the path and the target of each object of every choice of every group."""
        for group in GROUPS:
            sign = "+" if group in LISTS else ""
            for name in self._composer.options(group):
                for key_path, node in _objects_in(self._composer, group, name).items():
                    yield f"{sign}{group}={name}", key_path, node["_target_"]

    def _unknown(self, path: str) -> str:
        parent = path.rpartition(".")[0]
        valid = [key.rpartition(".")[2] for key in self._known if key.rpartition(".")[0] == parent]
        if valid:
            return str(unknown_key(path, valid, all_keys=self._known))
        near = closest(path, [*SECTIONS, *self._known])
        names = {choice.partition("=")[2] for choice, _, _ in self._objects()}
        near += closest(path, sorted(names | {key.rpartition(".")[2] for _, key, _ in self._all_known()}))
        return f"unknown key '{path}'. {did_you_mean(near) if near else 'Type trainkit explain for all keys.'}"


def _columns(rows: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, rows), default=0)
    for name, text in rows.items():
        yield f"    {name:<{width}}  {text}".rstrip()


def _first_sentence(text: str) -> str:
    # Not at a semicolon in brackets.
    return re.split(r"(?<=[.;])\s(?![^(]*\))", text)[0].rstrip(";")


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


def _annotated(settings: Settings) -> Iterator[str]:
    """Yield lines of YAML, each value with its origin."""
    # Before interpolation, to show what a value was computed from.
    written = yaml.safe_load(settings.unresolved) or {}
    rows = list(_rows(settings.tree, written, "", 0, settings.find_origins()))
    width = min(_MOST_ALIGNED, max((len(text) for text, origin in rows if origin), default=0))
    for text, origin in rows:
        yield f"{text:<{width}}  # {origin}" if origin else text


def _rows(node: dict[str, Any], written: Any, path: str, depth: int, origins: KeyOrigins) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        key_path = f"{path}.{key}" if path else key
        label = f"{'  ' * depth}{key}:"
        source = written.get(key) if isinstance(written, dict) else None
        if isinstance(value, dict) and value:
            yield label, ""
            yield from _rows(value, source, key_path, depth + 1, origins)
        else:
            origin = origins.of(key_path)
            if isinstance(source, str) and "${" in source:
                origin = f"{source} in {origin}"
            yield f"{label} {_inline(value)}", origin


def _inline(value: Any) -> str:
    # On one line: YAML breaks long values, and ends a single value with three dots.
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")


# ---- The reference of all keys


def _reference(composer: ConfigComposer) -> Iterator[str]:
    yield from ("## `trainer`", "", *_key_table(TRAINER, "trainer", {}))
    for group, (title, introduction) in _CHAPTERS.items():
        yield from ("", f"## {title}", "", introduction)
        for name in composer.options(group):
            objects = _objects_in(composer, group, name)
            if objects:  # else it only lists other choices
                yield from ("", f"### `{group}={name}`")
            for path, node in objects.items():
                target = node["_target_"]
                yield from ("", _summary_of(target), "", *_key_table(target, path, node))


def _key_table(target: str, path: str, chosen: Mapping[str, Any]) -> Iterator[str]:
    keys = _keys_of(target, path)
    if keys:
        yield "| key | type | default | description |"
        yield "|---|---|---|---|"
    for key, parameter in keys.items():
        default = chosen.get(key.rpartition(".")[2], parameter.default)
        cells = (f"`{key}`", parameter.type_text, f"`{_shown(default)}`", parameter.doc)
        # A bar would end the cell.
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
