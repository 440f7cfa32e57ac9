"""The check of a run's settings, before anything of it is made: every key, every argument, every choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.command_line.accepted import ANYTHING, Accepted
from trainkit.command_line.combinations import impossible
from trainkit.command_line.problem import Problem, likely, there_are, unknown_choice, unknown_key
from trainkit.command_line.signatures import Signature, signature_of
from trainkit.command_line.source import TargetError

TRAINER = "trainkit.trainer.Trainer"
# Arguments of the Trainer that have a place of their own at the top of the settings.
OWN_PLACES = {
    "strategy": "strategy",
    "run_dir": "run_dir",
    "callbacks": "callbacks",
    "loggers": "logger",
    "config": "config",
}
SECTIONS = ("recipe", "task", "data", "strategy", "trainer", "callbacks", "logger", "run_dir", "vars")
_OF_HYDRA = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
_MISSING = "???"


def check(
    settings: Mapping[str, Any],
    *,
    options: Mapping[str, Sequence[str]],
    needs_task: bool = True,
    here: bool = True,
) -> list[Problem]:
    """Return all that is wrong with the settings of a run; nothing is instantiated.

    `options` are the names there are for each config group. `needs_task` says whether a missing task is wrong, `here`
    whether the run needs devices of this machine.
    """
    problems = list(_Check(settings, options).all(needs_task=needs_task))
    known = {problem.key for problem in problems}
    return problems + [problem for problem in impossible(settings, here=here) if problem.key not in known]


class _Check:
    def __init__(self, settings: Mapping[str, Any], options: Mapping[str, Sequence[str]]) -> None:
        self._settings = settings
        self._options = options
        self._trainer = _trainer_signature()
        self._everywhere = [*SECTIONS, *(f"trainer.{name}" for name in self._trainer.parameters)]
        for section in ("task", "data", "strategy"):
            self._everywhere += [f"{section}.{name}" for name in self._known_arguments(settings.get(section))]
        callbacks = settings.get("callbacks")
        for callback, node in callbacks.items() if isinstance(callbacks, Mapping) else ():
            self._everywhere += [f"callbacks.{callback}.{name}" for name in self._known_arguments(node)]

    def all(self, *, needs_task: bool) -> Iterator[Problem]:
        for key in self._settings:
            if key not in SECTIONS:
                yield unknown_key(key, SECTIONS, everywhere=self._everywhere)
        yield from self._recipe(self._settings.get("recipe"))
        yield from self._object("task", required=needs_task)
        if (self._settings.get("task") or {}) != {}:
            yield from self._object("data", required=needs_task)
        yield from self._strategy(self._settings.get("strategy"))
        yield from self._trainer_section(self._settings.get("trainer"))
        for group in ("callbacks", "logger"):
            yield from self._named_objects(group, self._settings.get(group))
        complaint = Accepted(frozenset({"str", "none"})).complaint(self._settings.get("run_dir"))
        if complaint:
            yield Problem("run_dir", complaint)

    def _recipe(self, recipe: Any) -> Iterator[Problem]:
        if isinstance(recipe, Mapping):
            yield Problem(
                "recipe",
                "the recipe's keys are below 'recipe', not at the top; make this the first line of its file: "
                "# @package _global_",
            )

    def _object(self, section: str, *, required: bool) -> Iterator[Problem]:
        node = self._settings.get(section)
        if isinstance(node, Mapping) and "_target_" in node:
            yield from self._walk(section, node)
        elif node is not None and not isinstance(node, Mapping):
            yield Problem(
                section, f"{node!r} is no mapping with a _target_; write {section}._target_=my_package.MyClass"
            )
        elif required:
            own = "MyTask" if section == "task" else "MyData"
            recipes = " or ".join(f"recipe={name}" for name in self._options.get("recipe", ()))
            yield Problem(
                section, f"there is none. Type {recipes}, or your own: {section}._target_=my_package.{own}", origin=""
            )

    def _strategy(self, node: Any) -> Iterator[Problem]:
        options = self._options.get("strategy", ())
        if isinstance(node, str) and node not in options:
            yield Problem("strategy", unknown_choice("strategy", node, options))
        elif isinstance(node, str):
            yield Problem(
                "strategy", f"a choice, no value: write '- override /strategy: {node}' in the file's defaults"
            )
        elif not isinstance(node, Mapping) or "_target_" not in node:
            yield Problem("strategy", f"none is chosen; type strategy=single. {there_are(options)}")
        else:
            yield from self._walk("strategy", node)

    def _trainer_section(self, node: Any) -> Iterator[Problem]:
        if isinstance(node, Mapping):
            yield from self._arguments("trainer", node, self._trainer, of="Trainer")
        else:
            yield Problem("trainer", f"{node!r} is no mapping; write trainer.max_duration=3epoch")

    def _named_objects(self, group: str, node: Any) -> Iterator[Problem]:
        """Check callbacks or loggers: a mapping of names to objects, of which `null` ones are off."""
        if node is None:
            return
        if not isinstance(node, Mapping):
            yield Problem(group, f"{node!r} is no mapping of names to settings; choose by name: +{group}=NAME")
            return
        options = self._options.get(group, ())
        for name, settings in node.items():
            path = f"{group}.{name}"
            if isinstance(settings, Mapping) and "_target_" in settings:
                yield from self._walk(path, settings)
            elif settings is not None and name in options:
                yield Problem(path, f"is not switched on; type +{group}={name}")
            elif settings is not None:
                near = likely(name, [*options])
                hint = f"Did you mean '{group}.{near[0]}'?" if near else f"There are: {', '.join(options)}."
                yield Problem(path, f"unknown key. {hint} One of your own needs {path}._target_=my_package.MyClass")

    def _walk(self, path: str, node: Any) -> Iterator[Problem]:
        """Check every `_target_` in a tree, and that no value is left to be given."""
        if isinstance(node, Mapping) and "_target_" in node:
            yield from self._call(path, node)
        elif isinstance(node, Mapping):
            for key, value in node.items():
                yield from self._walk(f"{path}.{key}", value)
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from self._walk(f"{path}.{index}", value)
        elif node == _MISSING:
            yield Problem(path, f"has no value yet; type {path}=VALUE")

    def _call(self, path: str, node: Mapping[str, Any]) -> Iterator[Problem]:
        target = node["_target_"]
        try:
            signature = signature_of(str(target))
        except TargetError as error:
            yield Problem(f"{path}._target_", str(error))
            return
        yield from self._arguments(path, node, signature, of=str(target).rpartition(".")[2])

    def _arguments(self, path: str, node: Mapping[str, Any], signature: Signature, *, of: str) -> Iterator[Problem]:
        for key, value in node.items():
            if key in _OF_HYDRA:
                continue
            if key not in signature.parameters and not signature.open:
                yield unknown_key(f"{path}.{key}", signature.parameters, everywhere=self._everywhere)
                continue
            yield from self._walk(f"{path}.{key}", value)
            parameter = signature.parameters.get(key)
            complaint = _complaint(parameter.accepted if parameter else ANYTHING, value)
            if complaint:
                yield Problem(f"{path}.{key}", complaint)
        if node.get("_partial_") or node.get("_args_"):
            return
        for key, parameter in signature.parameters.items():
            if parameter.required and key not in node:
                yield Problem(f"{path}.{key}", f"is missing; {of} needs it. Type {path}.{key}=VALUE")

    def _known_arguments(self, node: Any) -> list[str]:
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            return []
        try:
            return list(signature_of(node["_target_"]).parameters)
        except TargetError:
            return []


def _trainer_signature() -> Signature:
    """Return what can be set below `trainer`."""
    whole = signature_of(TRAINER)
    return Signature({name: p for name, p in whole.parameters.items() if name not in OWN_PLACES})


def _complaint(accepted: Accepted, value: Any) -> str | None:
    is_object = isinstance(value, Mapping) and "_target_" in value
    is_unresolved = isinstance(value, str) and ("${" in value or value == _MISSING)
    return None if is_object or is_unresolved else accepted.complaint(value)
