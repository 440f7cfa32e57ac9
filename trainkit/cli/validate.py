"""Validation of a config before any object is made: keys, types, choices and combinations."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from typing import Any, TypeGuard

from trainkit.cli.signatures import MISSING, Signature, TargetError, ValueType, signature_of
from trainkit.data.batch import split_error
from trainkit.errors import UserError
from trainkit.settings import FAMILIAR

TRAINER = "trainkit.trainer.Trainer"
SECTIONS = ("recipe", "task", "data", "strategy", "trainer", "callbacks", "logger", "run_dir", "vars")
# Arguments of the Trainer that are not keys below `trainer`.
_TRAINER_OBJECTS = ("strategy", "run_dir", "callbacks", "loggers", "config")
_MOST_LISTED = 12


@dataclass(frozen=True)
class Problem:
    """An error at one key."""

    key: str
    """The key's full path (`trainer.max_duration`); empty for an error of the config as a whole."""
    message: str
    origin: str | None = None
    """Source of the value, an override or a file and line; empty if there is none, `None` if not determined yet."""

    def __str__(self) -> str:
        text = f"{self.key}: {self.message}" if self.key else self.message
        return f"{text}\n    from {self.origin}" if self.origin else text


class ConfigError(UserError):
    """The config is invalid; the message lists every problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        # The jobs of a sweep share most of their problems.
        self.problems = list({(problem.key, problem.message): problem for problem in problems}.values())
        count = len(self.problems)
        title = "" if count == 1 else f"{count} problems in the settings; nothing was started.\n\n"
        super().__init__(title + "\n".join(str(problem) for problem in self.problems))


def unknown_key(path: str, valid: Iterable[str], *, all_keys: Iterable[str]) -> Problem:
    """Return the problem of a key that is not among the `valid` names at its place.

    `all_keys` are the full paths of all keys: the name may belong to another section.
    """
    parent, _, name = path.rpartition(".")
    paths = [f"{parent}.{key}" if parent else key for key in valid]
    all_paths = {*paths, *all_keys}
    all_paths |= {key.rpartition(".")[0] for key in all_paths}  # sections are meant too
    near = [FAMILIAR[name]] if FAMILIAR.get(name) in all_paths else []
    # The same name in another section is nearer than another name in this one.
    near = near or [key for key in sorted(all_paths) if key.rpartition(".")[2] == name] or closest(path, paths)
    if not near:
        # Stricter than for names of the same place, since it compares with all of them.
        similar = get_close_matches(name, [key.rpartition(".")[2] for key in sorted(all_paths)], n=1, cutoff=0.85)
        near = [key for key in sorted(all_paths) if key.rpartition(".")[2] in similar]
    return Problem(path, f"unknown key. {did_you_mean(near) if near else list_choices(paths)}")


def unknown_choice(group: str, name: str, options: Sequence[str]) -> str:
    """Return the message that a group does not have a choice, with the nearest one and a list of all."""
    near = closest(name, options)
    hint = f"{did_you_mean(near)} " if near else ""
    return f"unknown {group.removesuffix('s')} '{name}'. {hint}{list_choices(options)}"


def did_you_mean(near: Sequence[str]) -> str:
    """Return a question that suggests the first one or two of the names."""
    return f"Did you mean {' or '.join(repr(name) for name in list(dict.fromkeys(near))[:2])}?"


def list_choices(names: Sequence[str]) -> str:
    """Return a sentence that lists the names, at most 12 of them."""
    if not names:
        return "There are none."
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"There are: {', '.join(names[:_MOST_LISTED])}{more}."


def closest(name: str, valid: Sequence[str]) -> list[str]:
    """Return the valid name most similar to `name`, by letters or a common word; empty if none is similar."""
    parent, _, last = name.lower().rpartition(".")

    def likeness(candidate: str) -> float:
        other = candidate.lower().removeprefix(f"{parent}.")
        ratio = SequenceMatcher(None, last, other).ratio()
        # A common word brings names near whose letters differ, such as clip_norm and max_grad_norm.
        return ratio + (0.2 if set(last.split("_")) & set(other.split("_")) else 0.0)

    best = max(valid, key=likeness, default=None)
    # 0.6 is what difflib itself takes for similar.
    return [best] if best is not None and likeness(best) >= 0.6 else []


def check(
    settings: Mapping[str, Any],
    *,
    options: Callable[[str], Sequence[str]],
    needs_task: bool = True,
    check_devices: bool = True,
    trusted: Collection[str] | None = None,
) -> list[Problem]:
    """Return all problems of a config; nothing is instantiated.

    `options` returns the choices of a config group. With `needs_task` a missing task is a problem, with `check_devices`
    a device that this machine does not have. With `trusted`, any other `_target_` must be a class of trainkit that
    belongs at its place.
    """
    problems = list(_Check(settings, options, trusted).all(needs_task=needs_task))
    reported_keys = {problem.key for problem in problems}
    combinations = invalid_combinations(settings, check_devices=check_devices)
    return problems + [problem for problem in combinations if problem.key not in reported_keys]


class _Check:
    def __init__(
        self, settings: Mapping[str, Any], options: Callable[[str], Sequence[str]], trusted: Collection[str] | None
    ) -> None:
        self._settings = settings
        self._options = options
        self._trusted = trusted
        self._kinds = _kinds()
        self._all_keys = list(SECTIONS)
        nodes = {section: settings.get(section) for section in ("task", "data", "strategy")}
        nodes |= {f"callbacks.{name}": node for name, node in _mapping(settings.get("callbacks")).items()}
        targets = {path: str(_mapping(node).get("_target_", "")) for path, node in nodes.items()}
        for path, target in {"trainer": TRAINER, **targets}.items():
            # `_walk` reports a target that cannot be imported.
            with suppress(TargetError):
                self._all_keys += [f"{path}.{name}" for name in config_signature(target).parameters]

    def all(self, *, needs_task: bool) -> Iterator[Problem]:
        for key in self._settings:
            if key not in SECTIONS:
                yield unknown_key(key, SECTIONS, all_keys=self._all_keys)
        if isinstance(self._settings.get("recipe"), Mapping):
            mistake = "the recipe's keys are below 'recipe', not at the top"
            yield Problem("recipe", f"{mistake}; make this the first line of its file: # @package _global_")
        yield from self._object("task", required=needs_task)
        # Without a task the data are not looked at: the task is the first thing to choose.
        if (self._settings.get("task") or {}) != {}:
            yield from self._object("data", required=needs_task)
        yield from self._strategy(self._settings.get("strategy"))
        trainer = self._settings.get("trainer")
        if isinstance(trainer, Mapping):
            yield from self._arguments("trainer", trainer, config_signature(TRAINER), of="Trainer")
        else:
            yield Problem("trainer", f"{trainer!r} is not a mapping; type trainer.max_duration=3epoch")
        for group in ("callbacks", "logger"):
            yield from self._named_objects(group, self._settings.get(group))
        message = ValueType(frozenset({"str", "none"})).error(self._settings.get("run_dir"))
        if not str(self._settings.get("run_dir")).strip():
            message = "is empty; type run_dir=PATH, or omit it for a new folder below runs"
        if message:
            yield Problem("run_dir", message)

    def _object(self, section: str, *, required: bool) -> Iterator[Problem]:
        node = self._settings.get(section)
        if isinstance(node, Mapping) and "_target_" in node:
            yield from self._walk(section, node, self._kinds[section])
        elif node is not None and not isinstance(node, Mapping):
            remedy = f"type {section}._target_=my_package.MyClass"
            yield Problem(section, f"{node!r} is not a mapping with a _target_; {remedy}")
        elif required:
            class_name = "MyTask" if section == "task" else "MyData"
            recipes = ", ".join(self._options("recipe"))
            message = (
                f"is missing. Type recipe=NAME ({recipes}), or your own: {section}._target_=my_package.{class_name}"
            )
            yield Problem(section, message, origin="")

    def _strategy(self, node: Any) -> Iterator[Problem]:
        if isinstance(node, Mapping) and "_target_" in node:
            yield from self._walk("strategy", node, self._kinds["strategy"])
            return
        options = self._options("strategy")
        if isinstance(node, str) and node not in options:
            yield Problem("strategy", unknown_choice("strategy", node, options))
        elif isinstance(node, str):
            remedy = f"write '- override /strategy: {node}' in the file's defaults"
            yield Problem("strategy", f"is a choice, not a value; {remedy}")
        else:
            yield Problem("strategy", f"no strategy is chosen; type strategy=single. {list_choices(options)}")

    def _named_objects(self, group: str, node: Any) -> Iterator[Problem]:
        """Check callbacks or loggers: a mapping of names to objects, or to `null` for those that are off."""
        if node is None:
            return
        if not isinstance(node, Mapping):
            yield Problem(group, f"{node!r} is not a mapping of names to objects; type +{group}=NAME")
            return
        for name, settings in node.items():
            if isinstance(settings, Mapping) and "_target_" in settings:
                yield from self._walk(f"{group}.{name}", settings, self._kinds[group])
            elif settings is not None:
                yield self._without_target(group, name)

    def _without_target(self, group: str, name: str) -> Problem:
        path, options = f"{group}.{name}", self._options(group)
        if name in options:
            return Problem(path, f"is not enabled; type +{group}={name}")
        near = closest(name, options)
        hint = did_you_mean([f"{group}.{near[0]}"]) if near else list_choices(options)
        return Problem(path, f"unknown key. {hint} Your own class needs {path}._target_=my_package.MyClass")

    def _walk(self, path: str, node: Any, kinds: tuple[type, ...] | None = None) -> Iterator[Problem]:
        """Check every `_target_` in a tree, and that every value is given; classes must be among the `kinds`."""
        if isinstance(node, Mapping) and "_target_" in node:
            target = str(node["_target_"])
            try:
                signature = signature_of(target)
            except TargetError as error:
                yield Problem(f"{path}._target_", str(error))
            else:
                misplaced = self._misplaced(target, signature.target, kinds, is_partial=bool(node.get("_partial_")))
                if misplaced:
                    yield Problem(f"{path}._target_", misplaced)
                yield from self._arguments(path, node, signature, of=target.rpartition(".")[2])
        elif isinstance(node, Mapping):
            for key, value in node.items():
                yield from self._walk(f"{path}.{key}", value, kinds)
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from self._walk(f"{path}.{index}", value, kinds)
        elif node == MISSING:
            yield Problem(path, f"has no value; type {path}=VALUE")

    def _misplaced(
        self, target: str, component: Any, kinds: tuple[type, ...] | None, *, is_partial: bool
    ) -> str | None:
        # With _partial_ the node makes a function and no object of the class.
        if isinstance(component, type) and kinds is not None and not is_partial and not issubclass(component, kinds):
            names = [kind.__name__ for kind in kinds if kind is not type(None)]
            return f"{target} is not a subclass of {' or '.join(names)}."
        if self._trusted is None or target in self._trusted:
            return None
        # A class alone: a function of trainkit would be called with arguments from a config that is not trusted.
        is_own = isinstance(component, type) and component.__module__.startswith("trainkit.") and not is_partial
        return None if is_own and kinds is not None else f"{target} is not trusted here. Type --trust to trust it."

    def _arguments(self, path: str, node: Mapping[str, Any], signature: Signature, *, of: str) -> Iterator[Problem]:
        unknown, missing, invalid = signature.compare(node)
        for name in unknown:
            yield unknown_key(f"{path}.{name}", signature.parameters, all_keys=self._all_keys)
        for name, value in node.items():
            if name not in unknown:
                parameter = signature.parameters.get(name)
                yield from self._walk(f"{path}.{name}", value, parameter.classes if parameter else None)
        for name, message in invalid.items():
            yield Problem(f"{path}.{name}", message)
        for name in missing:
            yield Problem(f"{path}.{name}", f"is missing; {of} needs it. Type {path}.{name}=VALUE")
        positional = node.get("_args_")
        if positional and not (isinstance(positional, list) and signature.takes_by_position(len(positional))):
            yield Problem(f"{path}._args_", f"{of} does not take these by position; type {path}.NAME=VALUE")


def _kinds() -> dict[str, tuple[type, ...]]:
    """Return the classes that belong in each section of a config."""
    from torch.utils.data import DataLoader  # here, as shells that complete a word do not wait for torch

    from trainkit import Callback, Data, Logger, Strategy, TaskModule

    kinds: dict[str, tuple[type, ...]] = {"task": (TaskModule,), "data": (Data, DataLoader), "strategy": (Strategy,)}
    return {**kinds, "callbacks": (Callback,), "logger": (Logger,)}


def config_signature(target: str) -> Signature:
    """Return the signature of a `_target_`, of the Trainer only the parameters that are keys below `trainer`."""
    signature = signature_of(target)
    if target != TRAINER:
        return signature
    parameters = {name: parameter for name, parameter in signature.parameters.items() if name not in _TRAINER_OBJECTS}
    return replace(signature, parameters=parameters)


# ---- Combinations


def invalid_combinations(settings: Mapping[str, Any], *, check_devices: bool = True) -> Iterator[Problem]:
    """Yield values that exclude each other and, with `check_devices`, devices that this machine does not have."""
    strategy, data, trainer = (_mapping(settings.get(key)) for key in ("strategy", "data", "trainer"))
    yield from _batch(strategy, data)
    yield from _stages(strategy)
    yield from _processes(strategy)
    if check_devices and strategy.get("launcher") in (None, "local"):  # else the ranks run on other machines
        yield from _devices(strategy)
    yield from _evaluation(trainer, _mapping(settings.get("callbacks")))
    if trainer.get("max_grad_norm") is not None and trainer.get("max_grad_value") is not None:
        yield Problem("trainer.max_grad_value", "excludes trainer.max_grad_norm; set one of them to null")


def _batch(strategy: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Problem]:
    accumulate, size = strategy.get("accumulate"), strategy.get("micro_batch_size")
    if accumulate is not None and size is not None:
        excludes = f"excludes strategy.accumulate={accumulate}; set one of them to null"
        yield Problem("strategy.micro_batch_size", excludes)
        return
    batch_size = data.get("batch_size")
    if _is_count(batch_size) and _is_count(accumulate):
        message = split_error(batch_size, accumulate=accumulate, world_size=_ranks(strategy))
        if message is not None:
            yield Problem("strategy.accumulate", message)


def _stages(strategy: Mapping[str, Any]) -> Iterator[Problem]:
    stages, points = strategy.get("stages"), strategy.get("split_points")
    if not _is_count(stages) or not isinstance(points, list):
        return
    per_rank = strategy.get("stages_per_rank")
    if strategy.get("schedule") == "interleaved_1f1b" and _is_count(per_rank):
        stages *= per_rank
    num_parts = len(points) + 1
    if num_parts != stages:
        message = f"{len(points)} split points make {num_parts} stages, not {stages}; name {stages - 1} modules, or set"
        yield Problem("strategy.split_points", f"{message} strategy.stages={num_parts}")


def _processes(strategy: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that torchrun started as many processes as the stages and replicas need."""
    processes, stages, replicas = _torchrun_processes(), strategy.get("stages"), strategy.get("replicas", 1)
    if processes and _is_count(stages) and _is_count(replicas) and stages * replicas != processes:
        need = f"{stages} stages x {replicas} replicas need {stages * replicas} processes"
        fitting = f"; set strategy.replicas={processes // stages}" if processes % stages == 0 else ""
        yield Problem("strategy.stages", f"{need}, but there are {processes}{fitting}")


def missing_device(device: str) -> str | None:
    """Return the message that this machine does not have `device`, with the remedy; `None` if it may have it."""
    kind, _, index = device.partition(":")
    if kind == "mps" and sys.platform != "darwin":
        return "device 'mps' exists on macOS only; set strategy.device=cpu"
    if kind != "cuda" or (index and not index.isdigit()):
        return None
    # Imported here: only CUDA needs it.
    import torch

    if not torch.backends.cuda.is_built():
        remedy = "set strategy.device=cpu, or install a torch build for your GPU"
        return f"device '{device}' does not exist: this torch is built without CUDA; {remedy}"
    count = torch.cuda.device_count()
    if int(index or 0) < count:
        return None
    remedy = f"cuda:{count - 1}" if count else "cpu"
    return f"device '{device}' does not exist: this machine has {count} CUDA device(s); set strategy.device={remedy}"


def _devices(strategy: Mapping[str, Any]) -> Iterator[Problem]:
    device, devices = strategy.get("device"), strategy.get("devices")
    named = devices if isinstance(devices, list) else []
    for key, name in [("device", device), *(("devices", name) for name in named)]:
        message = missing_device(name) if isinstance(name, str) else None
        if message is not None:
            yield Problem(f"strategy.{key}", message.replace("strategy.device=", f"strategy.{key}="))
            return
    import torch

    backend, num_gpus = strategy.get("backend"), torch.cuda.device_count()
    if backend == "nccl" and device == "cpu":
        yield Problem("strategy.backend", "'nccl' needs CUDA devices; set strategy.backend=gloo for device=cpu")
    elif backend == "nccl" and num_gpus == 0:
        yield Problem("strategy.backend", "'nccl' needs CUDA devices, but there are none; set strategy.backend=auto")
    # gloo lets several ranks share a GPU; torchrun's processes are counted elsewhere.
    needs_gpus = device == "cuda" and backend != "gloo" and not _torchrun_processes()
    if needs_gpus and _is_count(devices) and devices > num_gpus:
        yield Problem("strategy.devices", f"{devices} ranks, but there are {num_gpus} CUDA device(s)")


def _evaluation(trainer: Mapping[str, Any], callbacks: Mapping[str, Any]) -> Iterator[Problem]:
    if trainer.get("evaluate_every", "1epoch") is not None:
        return
    for name, node in callbacks.items():
        metric = _mapping(node).get("monitor")
        # Without the metric `checkpoint` still saves, only without a best one; other callbacks would do nothing.
        if name != "checkpoint" and isinstance(metric, str) and metric.startswith("validation/"):
            never = f"null means that callbacks.{name}.monitor={metric} is never measured"
            remedy = f"set a duration such as 1epoch, or type ~callbacks.{name}"
            yield Problem("trainer.evaluate_every", f"{never}; {remedy}")


def _ranks(strategy: Mapping[str, Any]) -> int:
    """Return the number of ranks that share a batch, 1 if it is not known."""
    processes, stages = _torchrun_processes(), strategy.get("stages")
    if stages is not None:
        replicas = strategy.get("replicas", 1)
        return replicas if _is_count(replicas) else 1
    if "devices" not in strategy or "device" not in strategy:  # strategies of one process lack one of them
        return 1
    return processes or (strategy["devices"] if _is_count(strategy["devices"]) else 1)


def _torchrun_processes() -> int:
    """Return the number of processes that torchrun started, 0 without it."""
    # torchrun sets both; WORLD_SIZE alone may have another meaning.
    count = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    return int(count) if count.isdigit() else 0


def _mapping(node: Any) -> Mapping[str, Any]:
    return node if isinstance(node, Mapping) else {}


def _is_count(value: Any) -> TypeGuard[int]:
    # A bool is an int in Python.
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
