"""Metrics count in the last stage: an update that an earlier stage makes a part of is refused, not lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from trainkit.errors import UserError


@contextmanager
def updates_watched(
    metrics: Sequence[nn.Module], *, position: Callable[[], int], executes: Sequence[bool]
) -> Iterator[None]:
    """Raise UserError in this context if a metric is updated by calls that this stage does not execute.

    `position` tells the next call of the step, and `executes` which of them this stage makes. What others make are
    placeholders here, and would be counted.
    """
    before = [(metric, vars(metric).get("update")) for metric in metrics]
    for metric in metrics:
        vars(metric)["update"] = _watched(metric, position, executes)
    try:
        yield
    finally:
        for metric, update in before:
            if update is None:
                del vars(metric)["update"]
            else:
                vars(metric)["update"] = update


def _watched(metric: nn.Module, position: Callable[[], int], executes: Sequence[bool]) -> Callable[..., Any]:
    update: Callable[..., Any] = metric.update  # type: ignore[assignment]

    def watched(*args: Any, **kwargs: Any) -> Any:
        first = position()
        result = update(*args, **kwargs)
        if not all(executes[first : position()]):
            raise UserError(
                f"the metric {type(metric).__name__} is updated by calls of which an earlier stage than the last makes "
                "some. Update metrics at the end of the step, after the loss, and begin the last stage before that: "
                "strategy.cuts=[name_of_a_module]."
            )
        return result

    return watched
