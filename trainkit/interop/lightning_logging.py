"""What a LightningModule logs, by the names and in the form that steps of a task return it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.metric_states import (
    Part,
    have_together,
    is_metric,
    metrics_in,
    put_back,
    reset,
    reset_all,
    states_of,
    states_on_host,
    talking_to_nobody,
)
from trainkit.strategy import metric_modules

if TYPE_CHECKING:
    from trainkit.strategy import Strategy
    from trainkit.task import TaskModule

_STAGE_PREFIXES = tuple(f"{stage}{mark}" for stage in ("train", "validation", "valid", "val", "test") for mark in "_/")

_logged: ContextVar[dict[str, Any] | None] = ContextVar("_logged", default=None)
"""What the step that is running has logged; a variable of the context, as replicas run in threads side by side."""


def record_one(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Keep one value that the running step, or hook at the end of an epoch, logs."""
    logged = _logged.get()
    if logged is None:
        warnings.warn(
            f"self.log({name!r}) is left out: values are logged in steps, on_train_epoch_end, on_validation_epoch_end "
            "and on_test_epoch_end.",
            stacklevel=2,
        )
    else:
        logged[name] = value


def record_all(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    """Keep several values that the running step logs."""
    for name, value in dictionary.items():
        record_one(name, value)


@contextmanager
def recording() -> Iterator[dict[str, Any]]:
    """Keep in a dict what is logged in this context."""
    logged: dict[str, Any] = {}
    token = _logged.set(logged)
    try:
        yield logged
    finally:
        _logged.reset(token)


def without_stage(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logged values under names without the stage, unless two would then have the same."""
    metrics: dict[str, Any] = {}
    for name, value in logged.items():
        prefix = next((prefix for prefix in _STAGE_PREFIXES if name.startswith(prefix)), "")
        short = name.removeprefix(prefix) or name
        metrics[name if short in metrics else short] = value
    return metrics


def numbers_of(logged: Mapping[str, Any]) -> dict[str, float]:
    """Return what was logged at the end of an epoch as numbers; metric objects are computed, and begin anew."""
    numbers: dict[str, float] = {}
    for name, value in without_stage(logged).items():
        computed = value.compute() if is_metric(value) else value
        named = computed if isinstance(computed, Mapping) else {name: computed}
        for key, number in named.items():
            if isinstance(number, Tensor) and number.numel() != 1:
                raise UserError(f"self.log({key!r}) was given a tensor of shape {tuple(number.shape)}; log scalars.")
            numbers[key] = float(number)
    for value in logged.values():
        if is_metric(value):
            reset(value)
    return numbers


@contextmanager
def counted_on_all_ranks(task: TaskModule, strategy: Strategy, *, keep_resets: bool) -> Iterator[None]:
    """Let a task's metric objects hold, in this context, what was counted on all ranks; collective.

    Afterwards they hold what this rank has counted, or nothing if they were reset meanwhile and `keep_resets`.
    """
    own = metrics_in(task)
    if not own:
        yield
        return
    holders = metric_modules(strategy, task)  # of the task, then those of each replica of it
    replicas = [holders[start : start + len(own)] for start in range(0, len(holders), len(own))]
    mine = [(sum(map(_updates, replica)), states_on_host(replica)) for replica in replicas]
    of_ranks: dict[int, Any] = {}
    for rank, counted in strategy.comm.all_gather_object((strategy.comm.rank, mine)):
        # Of several processes that share a rank's samples, it may be one alone that counts.
        of_ranks[rank] = max(of_ranks.get(rank, counted), counted, key=lambda parts: sum(count for count, _ in parts))
    before = states_of(own)
    have_together(own, [Part(states, 1) for counted in of_ranks.values() for _, states in counted])
    counting: list[Any] = [holder for holder in own if hasattr(holder, "_update_count")]
    for holder in counting:
        holder._update_count = max(1, holder._update_count)  # or computing warns where this rank had no sample
    brought = [
        {name: getattr(holder, name) for name in states} for holder, (_, states) in zip(own, before, strict=True)
    ]
    try:
        with talking_to_nobody(own):
            yield
    finally:
        for holder, states, saved, *copies in zip(own, brought, before, *replicas[1:], strict=True):
            if keep_resets and _was_reset(holder, states):
                reset_all(copies)
            else:
                put_back([saved])


def _updates(holder: nn.Module) -> int:
    return int(getattr(holder, "_update_count", 1))


def _was_reset(holder: nn.Module, states: Mapping[str, Any]) -> bool:
    """Return whether a module has been reset since it held these very states."""
    if hasattr(holder, "_update_count"):
        return _updates(holder) == 0
    return any(getattr(holder, name) is not state for name, state in states.items())
