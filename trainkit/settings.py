"""Settings of a run, each checked as soon as it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from trainkit import registry
from trainkit.callback import Callback
from trainkit.data import Data
from trainkit.duration import Duration
from trainkit.errors import UserError, nearest
from trainkit.logger import Logger
from trainkit.loops.rollback import Policy

DEFAULT_CALLBACKS = ("model_summary", "learning_rate", "throughput", "step_times", "checkpoint", "progress_bar")
DEFAULT_LOGGERS = ("tensorboard", "jsonl")
_POLICIES: dict[str, Policy] = {"raise": "raise", "skip": "skip", "stop": "stop", "rollback": "rollback"}


def as_data(data: Any, stage: str) -> Data:
    """Return `data` as Data: a DataLoader or ready-made Data is taken as it is; anything else needs a batch size."""
    if isinstance(data, Data):
        return data
    if isinstance(data, DataLoader):
        return Data(**{stage: data})  # type: ignore[arg-type] # one of its four stages
    raise UserError(
        f"the data is a {type(data).__name__}; pass Data({stage}=dataset, batch_size=32), or a torch DataLoader."
    )


def checked_duration(text: str | Duration | None, where: str) -> Duration | None:
    """Return the duration that a text says, `None` for none."""
    return None if text is None else Duration.parse(text, where=where)


def checked_limit(name: str, value: int | None, *, least: int = 1) -> int | None:
    """Return a number of batches, `None` for no limit."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise UserError(f"{name} must be a whole number of batches, at least {least}, got {value!r}.")
    return value


def checked_seed(seed: int) -> int:
    """Return a seed that every generator takes."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}.")
    return seed


def checked_policy(name: str) -> Policy:
    """Return what happens to a loss that is not finite."""
    if name not in _POLICIES:
        raise UserError(
            f"on_nonfinite={name!r} is unknown.{nearest(name, _POLICIES)} Choose raise, skip, stop or rollback."
        )
    return _POLICIES[name]


def made_callbacks(items: Sequence[str | Callback] | None) -> list[Callback]:
    """Return the callbacks that a list names or holds, the default ones for `None`."""
    return _made_all("callbacks", DEFAULT_CALLBACKS if items is None else items)


def made_loggers(items: Sequence[str | Logger] | None) -> list[Logger]:
    """Return the loggers that a list names or holds, the default ones for `None`."""
    return _made_all("logger", DEFAULT_LOGGERS if items is None else items)


def _made_all(group: str, items: Any) -> list[Any]:
    """Return the callbacks or loggers that a list names or holds; raises UserError for anything else."""
    kind, name = (Callback, "callbacks") if group == "callbacks" else (Logger, "loggers")
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise UserError(f"{name}={items!r} is not a list; write {name}=[{items!r}].")
    made = []
    for item in items:
        if isinstance(item, type):
            raise UserError(f"{item.__name__} is a class, and an object is wanted; write {item.__name__}().")
        made.append(registry.make(group, item) if isinstance(item, str) else item)
        if not isinstance(made[-1], kind):
            raise UserError(f"{item!r} in {name} is neither a name nor a trainkit.{kind.__name__}.")
    return made
