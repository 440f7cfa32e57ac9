"""Likeness of a saved state to that of the run which gets it: a state that was altered is refused by its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from numbers import Real
from typing import Any

from torch import Tensor

from trainkit.checkpoint.sharded_state import StoredTensor

MOST = 2**53
"""Bound of whole numbers: up to here each is a float too."""
REQUIRED = frozenset({"last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "_schedulers", "seen"})
"""Keys whose values change in training; others may be missing in the state of another version of torch."""
_COUNTS = frozenset({"step", "epoch", "position", "samples", "last_epoch", "_step_count"})
"""Keys whose values are whole numbers; a T_max may be 8 or 8.0."""
_RATES = frozenset({"lr", "initial_lr", "max_lr", "base_lrs", "_last_lr"})
"""Keys whose values may be tensors in the one run and numbers in the other."""
_NOT_NEGATIVE = _RATES | {"weight_decay", "eps", "betas", "momentum"}


def unlike(expected: Any, saved: Any, path: str, *, required: Set[str] = REQUIRED) -> Iterator[str]:
    """Yield what in a saved state cannot take the place of a run's own state."""
    if isinstance(expected, Mapping):
        if not isinstance(saved, Mapping):
            yield f"{path} is not a mapping"
            return
        for key, value in expected.items():
            # Keys of `saved` alone are allowed: another version of torch may save more.
            if key in saved:
                yield from unlike(value, saved[key], f"{path}.{key}", required=required)
            elif key in required:
                yield f"{path}.{key} is missing"
    elif isinstance(expected, (list, tuple)):
        # Any length fits an empty list, which may have been filled since the run began.
        if not isinstance(saved, (list, tuple)) or (expected and len(saved) != len(expected)):
            yield f"{path} is not a list of {len(expected)} values"
            return
        for index, value in enumerate(expected):
            yield from unlike(value, saved[index], f"{path}[{index}]", required=required)
    # The last key decides: of `optimizer.param_groups[0].betas[1]` it is `betas`.
    elif not _fits(expected, saved, path.rpartition(".")[2].partition("[")[0]):
        yield f"{path} is {_shown(saved)}, and {_shown(expected)} in this run"


def _fits(expected: Any, saved: Any, key: str) -> bool:
    # A rate is a tensor with a compiled or capturable optimizer; its number decides.
    if key in _RATES:
        expected, saved = (
            value.item() if isinstance(value, Tensor) and not value.dim() else value for value in (expected, saved)
        )
    # It may have been set since the run began, such as the best value of a callback.
    if expected is None:
        return saved is None or isinstance(saved, (str, bool)) or _is_number(saved)
    if isinstance(expected, Tensor):
        is_tensor = isinstance(saved, (Tensor, StoredTensor))
        return is_tensor and saved.dtype == expected.dtype and saved.shape == expected.shape
    if isinstance(expected, (bool, str)) or (key in _COUNTS and type(saved) is not type(expected)):
        return type(saved) is type(expected)
    # An object of another type is checked by what loads it.
    if not isinstance(expected, (int, float)):
        return True
    # A number that is not negative in a new run may be a count, and must not become negative.
    least = 0 if key in _NOT_NEGATIVE or (isinstance(expected, int) and expected >= 0) else -math.inf
    # An infinite value of a new run, such as the best loss so far, allows any number in its place, NaN too.
    return _is_number(saved) and (not math.isfinite(expected) or least <= saved < math.inf)


def _is_number(value: Any) -> bool:
    # Integers of a file can have any length, and above MOST are rounded where they become floats.
    is_small = not isinstance(value, int) or abs(value) < MOST
    return isinstance(value, Real) and not isinstance(value, bool) and is_small


def _shown(value: Any) -> str:
    if isinstance(value, (float, str)) or value is None:
        return f"{value!r:.40}"
    return f"a value of the type {type(value).__name__}"
