"""Checks of what a user asks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from trainkit.errors import UserError, nearest

Name = TypeVar("Name", bound=str)

BALANCES = {"speed": 0.0, "memory": 1.0}


def checked_count(name: str, value: Any) -> int:
    """Return a number of things; raises UserError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} must be a whole number, at least 1, got {value!r}.")
    return value


def checked_name(key: str, value: Name, names: Sequence[str]) -> Name:
    """Return one of `names`; raises UserError for any other."""
    if value not in names:
        raise UserError(f"unknown {key} {value!r}.{nearest(str(value), names)} Choose one of {', '.join(names)}.")
    return value


def checked_balance(balance: str | float) -> float:
    """Return the share of memory against time; raises UserError for what is no share."""
    share = BALANCES.get(balance) if isinstance(balance, str) else balance
    if share is None or isinstance(share, bool) or not 0.0 <= share <= 1.0:
        raise UserError(f"balance must be speed, memory or a number from 0 to 1, got {balance!r}.")
    return float(share)


def refuse_compiled(task: nn.Module) -> None:
    """Raise UserError for a task that `torch.compile` has made one piece."""
    if task._compiled_call_impl is not None:
        raise UserError(
            f"{type(task).__name__}'s forward is compiled as one piece, which cannot be cut into stages. Set "
            "trainer.compile=false, or compile modules in the task's constructor: self.block.compile()."
        )
