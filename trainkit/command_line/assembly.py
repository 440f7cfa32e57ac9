"""A run put together from its settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from trainkit.callback import Callback
from trainkit.command_line.composition import Settings, with_origins
from trainkit.command_line.extras import remedy
from trainkit.command_line.problem import Problem, SettingsError
from trainkit.errors import UserError
from trainkit.logger import Logger
from trainkit.rng import seed_everything
from trainkit.strategy import Strategy
from trainkit.task import TaskModule
from trainkit.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Assembly:
    """What the settings of a run describe."""

    trainer: Trainer
    task: Any
    data: Any


def assemble(settings: Settings, *, run_dir: Path | None, loggers: bool = True) -> Assembly:
    """Return new objects for all that the settings name, the task drawn from `trainer.seed`.

    Without `loggers` nothing is written but what callbacks write. Raises SettingsError with all that constructors
    refuse.
    """
    tree = settings.tree
    parts = _Parts()
    # The order is fixed, and the task comes first: its weights must follow from the seed alone.
    seed_everything(tree["trainer"].get("seed", 0))
    task = parts.made("task", tree["task"], TaskModule)
    data = parts.made("data", tree["data"], object)
    strategy = parts.made("strategy", tree["strategy"], Strategy)
    callbacks = parts.all_made("callbacks", tree.get("callbacks"), Callback)
    all_loggers = parts.all_made("logger", tree.get("logger"), Logger) if loggers else []

    def make_trainer(arguments: Mapping[str, Any]) -> Trainer:
        return Trainer(
            strategy or Strategy(device="cpu"),
            run_dir=run_dir,
            callbacks=callbacks,
            loggers=all_loggers,
            config=settings.as_yaml(),
            **arguments,
        )

    trainer = parts.tried("trainer", make_trainer, tree["trainer"])
    if isinstance(task, nn.Module):
        parts.problems += _too_many_stages(task, tree["strategy"])
    if parts.problems:
        raise SettingsError(with_origins(parts.problems, settings.find_origins()))
    assert trainer is not None
    return Assembly(trainer, task, data)


class _Parts:
    """Makes the parts of a run, and collects what their constructors refuse."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def all_made(self, group: str, nodes: Mapping[str, Any] | None, kind: type) -> list[Any]:
        """Return the objects of a group; those set to `null` are off."""
        made = [self.made(f"{group}.{name}", node, kind) for name, node in (nodes or {}).items() if node is not None]
        return [part for part in made if part is not None]

    def made(self, path: str, node: Mapping[str, Any], kind: type) -> Any:
        """Return the object that `node` describes; `None` if it is refused, or not of the `kind` that is needed."""
        arguments = {key: value for key, value in node.items() if key != "_target_"}
        return self.tried(path, partial(_made, path, node["_target_"], kind), arguments)

    def tried(self, path: str, make: Callable[[Mapping[str, Any]], T], arguments: Mapping[str, Any]) -> T | None:
        """Return what `make` returns; what it refuses is left out to find all that it would refuse."""
        refused: set[str] = set()
        while True:
            left = {name: value for name, value in arguments.items() if name not in refused}
            try:
                made = make(left)
                return None if refused else made
            except UserError as error:
                named = _names_in(str(error), arguments)
                # What is left out has its default now: no complaint about that one is the user's.
                if refused and (not named or refused & set(named)):
                    return None
                self.problems.append(_problem(path, named, str(error)))
                if not named:
                    return None
                refused.add(named[0])
            except Exception:
                if not refused:
                    raise
                return None  # it cannot do without what was left out


def _made(path: str, target: str, kind: type, arguments: Mapping[str, Any]) -> Any:
    """Return the object; raises UserError if it is not of the `kind` that is needed there."""
    try:
        made = instantiate({"_target_": target, **arguments}, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or UserError(f"{path}: {error}")
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            raise UserError(
                f"{path}: {target} needs the package '{cause.name}', which is not installed. {remedy(cause.name)}"
            ) from None
        if isinstance(cause, TypeError) and "unexpected keyword argument" in str(cause):
            raise UserError(f"{path}: {target} does not take it: {cause}") from None
        raise cause from None  # the constructor's own error, with the user's code in its traceback
    if not isinstance(made, kind):
        raise UserError(
            f"{path}._target_: {target} makes a {type(made).__name__}; it must be a trainkit.{kind.__name__}."
        )
    return made


def _names_in(message: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments that a message names, in its order; of text in quotes nothing is taken for a name."""
    words = re.findall(r"\w+", re.sub(r"'[^']*'", "", message))
    return [word for word in dict.fromkeys(words) if word in arguments]


def _problem(path: str, named: list[str], message: str) -> Problem:
    if message.startswith(f"{path}:") or message.startswith(f"{path}._target_:"):
        key, _, rest = message.partition(": ")
        return Problem(key, rest)
    if not named:
        return Problem(path, message)
    key = f"{path}.{named[0]}"
    for start in (key, named[0], f"{path.rpartition('.')[2]}.{named[0]}"):
        if message.startswith(f"{start} "):
            return Problem(key, message.removeprefix(f"{start} "))
    return Problem(key, message)


def _too_many_stages(task: nn.Module, strategy: Mapping[str, Any]) -> list[Problem]:
    """Return the problem of a pipeline with more stages than a task has parts to begin one with."""
    stages = strategy.get("stages")
    if not isinstance(stages, int):
        return []
    if strategy.get("schedule") == "interleaved_1f1b":
        stages *= strategy.get("stages_per_rank", 1)
    leaves = sum(not any(module.children()) for module in task.modules())
    own = sum(len(list(module.parameters(recurse=False))) for module in task.modules() if any(module.children()))
    parts = leaves + own
    if stages <= parts:
        return []
    message = f"{stages} stages, but {type(task).__name__} has only {parts} modules to begin one with; set "
    return [Problem("strategy.stages", f"{message}strategy.stages={parts} or less.")]
