"""What linear scaling makes of a learning rate that was chosen for another global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UsualBatch:
    """The global batch for which a learning rate was chosen."""

    batch_size: int
    origin: str
    """Whose it is, in words: `recipe digits`, `the resumed run`."""
    learning_rate: float | None = None
    """The rate that was chosen for it; `None`: the one that is set."""


def linear_scaling(batch_size: int, learning_rates: Sequence[float], usual: UsualBatch | None) -> str | None:
    """Return in words the rates beside those that linear scaling gives; `None` if the global batch is the usual one.

    Linear scaling lets the learning rate grow as the batch does. It is a rule of thumb, so nothing is changed.
    """
    if usual is None or usual.batch_size == batch_size:
        return None
    rates = list(dict.fromkeys(learning_rates))
    chosen = rates if usual.learning_rate is None else [usual.learning_rate]
    scaled = [rate * batch_size / usual.batch_size for rate in chosen]
    return (
        f"{_listed(rates)} as set; linear scaling from {usual.origin}'s global batch of {usual.batch_size} to "
        f"{batch_size} makes {_listed(scaled)}"
    )


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in rates)
