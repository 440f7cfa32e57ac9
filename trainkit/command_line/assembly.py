"""A run put together from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from trainkit.callback import Callback
from trainkit.command_line.composition import Settings
from trainkit.command_line.extras import remedy
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

    Without `loggers` nothing is written but what callbacks write. Raises UserError for what a constructor refuses.
    """
    tree = settings.tree
    # The order is fixed, and the task comes first: its weights must follow from the seed alone.
    seed_everything(tree["trainer"].get("seed", 0))
    task = _made("task", tree["task"], TaskModule)
    data = _made("data", tree["data"], object)
    trainer = Trainer(
        _made("strategy", tree["strategy"], Strategy),
        run_dir=run_dir,
        callbacks=_all_made("callbacks", tree.get("callbacks"), Callback),
        loggers=_all_made("logger", tree.get("logger"), Logger) if loggers else [],
        config=settings.as_yaml(),
        **tree["trainer"],
    )
    return Assembly(trainer, task, data)


def _all_made(group: str, nodes: Mapping[str, Any] | None, kind: type[T]) -> list[T]:
    """Return the objects of a group; those set to `null` are off."""
    return [_made(f"{group}.{name}", node, kind) for name, node in (nodes or {}).items() if node is not None]


def _made(path: str, node: Mapping[str, Any], kind: type[T]) -> T:
    """Return the object that `node` describes; raises UserError if it is not of the `kind` that is needed there."""
    target = node["_target_"]
    try:
        made = instantiate(node, _convert_="all")
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
