"""`trainkit explain KEY`: what a key means, what it takes, and where its present value comes from."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.command_line.accepted import Accepted
from trainkit.command_line.cli import Arguments
from trainkit.command_line.composition import Composer, Settings, composing
from trainkit.command_line.descriptions import description_of
from trainkit.command_line.known_keys import KnownKey, keys_of, known_keys
from trainkit.command_line.origins import Origins
from trainkit.command_line.overrides import GROUPS, LISTS
from trainkit.command_line.problem import did_you_mean, likely, unknown_key
from trainkit.command_line.signatures import Parameter
from trainkit.command_line.strict import SECTIONS, TRAINER
from trainkit.errors import UserError

_ABSENT = object()
_SECTIONS = {
    "recipe": "A ready-made task with its data and settings; trainkit recipes lists them.",
    "size": "How large the recipe is made; size=tiny takes seconds, to try things out.",
    "task": "What is trained: a class and its arguments.",
    "data": "What is read: a class and its arguments.",
    "trainer": "How long and how to train.",
    "strategy": "Where the work is done.",
    "callbacks": "What happens beside training; +callbacks=NAME adds one, ~callbacks.NAME takes one away.",
    "logger": "Where metrics are written; +logger=NAME adds one, ~logger.NAME takes one away.",
    "run_dir": "The run's folder; null: a new one, runs/<recipe>/<date_time>.",
    "vars": "Values of your own, for ${vars.name} elsewhere.",
}


def explain(arguments: Arguments) -> int:
    """Print what each key that was typed means, given the overrides that were typed with it."""
    keys = [text for text in arguments.overrides if "=" not in text and text[:1] not in "~+"]
    overrides = [text for text in arguments.overrides if text not in keys]
    if not keys:
        raise UserError("explain needs a key. Type trainkit explain trainer.max_duration [recipe=digits ...]")
    with composing(arguments.config_dirs) as composer:
        settings = composer.settings(overrides, needs_task=False)
        explained = _Explanations(composer, settings)
        pages = [explained.of(key) for key in keys]
    print("\n\n".join(pages))
    return 0


class _Explanations:
    def __init__(self, composer: Composer, settings: Settings) -> None:
        self._composer = composer
        self._tree = settings.tree
        self._origins: Origins = settings.find_origins()
        self._known = {key.path: key for key in known_keys(settings.tree)}

    def of(self, path: str) -> str:
        """Return the page about the key at `path`, or the one key that ends in it."""
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
            raise UserError(f"'{path}' is several keys. {did_you_mean(ending)}")
        return self._of_another_choice(path)

    def _argument(self, known: KnownKey) -> Iterator[str]:
        yield known.path
        yield f"  {known.meaning or self._origins.comment(known.path) or '(its docstring says nothing about it)'}"
        yield from _about(known.parameter)
        yield from self._present(known.path)

    def _present(self, path: str) -> Iterator[str]:
        value = _value(self._tree, path)
        if value is not _ABSENT:
            origin = self._origins.of(path)
            yield f"  now      {_shown(value)}{f', from {origin}' if origin else ''}"

    def _part(self, path: str) -> Iterator[str]:
        """Yield what a section or an object of the settings is, and its keys."""
        node = _value(self._tree, path)
        target = TRAINER if path == "trainer" else node.get("_target_") if isinstance(node, Mapping) else None
        yield path
        if path in _SECTIONS:
            yield f"  {_SECTIONS[path]}"
        elif isinstance(target, str):
            yield f"  {description_of(target).summary}"
        if path in GROUPS:
            yield from self._choices(path)
        if isinstance(node, str) or node is None:
            yield from self._present(path)
        if isinstance(target, str):
            yield f"  now {target}, with the keys" if path != "trainer" else "  keys:"
            keys = keys_of(target, path)
        else:
            keys = [known for key, known in self._known.items() if key.startswith(f"{path}.")]
        width = max((len(known.path) for known in keys), default=0)
        for known in keys:
            yield f"    {known.path:<{width}}  {first_sentence(known.meaning)}".rstrip()

    def _choices(self, group: str) -> Iterator[str]:
        yield f"  choose with {group}=NAME:"
        options = self._composer.options(group)
        width = max(map(len, options), default=0)
        for name in options:
            targets = [target for _, target in self._targets(group, name)]
            yield f"    {name:<{width}}  {description_of(targets[0]).summary if len(targets) == 1 else ''}".rstrip()

    def _of_another_choice(self, path: str) -> str:
        """Return the page about a key that is there with another choice of its group."""
        found: dict[str, list[str]] = {}
        pages: dict[str, KnownKey] = {}
        for key, (choice, known) in self._all_known():
            if key == path or key.endswith(f".{path}"):
                pages.setdefault(key, known)
                found.setdefault(key, []).append(choice)
        if not found:
            raise UserError(str(self._unknown(path)))
        full, choices = next(iter(found.items()))
        known = pages[full]
        lines = [full, f"  {known.meaning}".rstrip(), *_about(known.parameter)]
        return "\n".join([*lines, f"  there with {' or '.join(choices)}"])

    def _all_known(self) -> Iterator[tuple[str, tuple[str, KnownKey]]]:
        """Yield the keys of every choice of every group, with what is typed to choose it."""
        for group in GROUPS:
            sign = "+" if group in LISTS else ""
            for name in self._composer.options(group):
                for place, target in self._targets(group, name):
                    for known in keys_of(target, place):
                        yield known.path, (f"{sign}{group}={name}", known)

    def _targets(self, group: str, name: str) -> list[tuple[str, str]]:
        """Return the classes that a choice brings, with the place of each in the settings."""
        loaded = self._composer.content(group, name)
        if group == "strategy":
            places: dict[str, Any] = {"strategy": loaded}
        elif group == "recipe":
            places = {section: loaded.get(section) for section in ("task", "data")}
        else:
            places = {f"{group}.{part}": node for part, node in loaded.items()}
        return [
            (place, node["_target_"])
            for place, node in places.items()
            if isinstance(node, Mapping) and isinstance(node.get("_target_"), str)
        ]

    def _unknown(self, path: str) -> str:
        parent = path.rpartition(".")[0]
        valid = [key.rpartition(".")[2] for key in self._known if key.rpartition(".")[0] == parent]
        if valid:
            return str(unknown_key(path, valid, everywhere=self._known))
        near = likely(path, [*SECTIONS, *self._known])
        near += likely(path, sorted({key.rpartition(".")[2] for key, _ in self._all_known()}))
        return f"unknown key '{path}'. {did_you_mean(near) if near else 'trainkit explain trainer lists some.'}"


def type_words(parameter: Parameter) -> str:
    """Return in words what an argument takes."""
    kinds = parameter.accepted.kinds
    if kinds is None:
        return parameter.annotation or "anything"
    if "duration" in kinds:
        kinds -= {"str"}
    return str(Accepted(kinds, parameter.accepted.choices))


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop."""
    return re.split(r"(?<=[.;])\s", text)[0].rstrip(";") if text else ""


def default_value(parameter: Parameter) -> Any:
    """Return the default as a plain value; as it is written where it is none."""
    try:
        return ast.literal_eval(parameter.default)
    except (ValueError, SyntaxError):
        return parameter.default


def _about(parameter: Parameter) -> list[str]:
    default = "none: it has to be given" if parameter.required else _shown(default_value(parameter))
    return [f"  type     {type_words(parameter)}", f"  default  {default}"]


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
