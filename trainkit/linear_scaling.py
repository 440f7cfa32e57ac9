"""The linear scaling rule for a learning rate that was chosen for another global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReferenceBatchSize:
    """The global batch for which a learning rate was chosen."""

    batch_size: int
    origin: str
    """Where it comes from: `recipe digits`, `the resumed run`."""
    learning_rate: float | None = None
    """The rate chosen for it; `None`: the present one."""


def linear_scaling(
    batch_size: int, learning_rates: Sequence[float], reference: ReferenceBatchSize | None
) -> str | None:
    """Return a sentence that compares the rates with the linearly scaled ones; `None` for the reference batch size.

    Linear scaling multiplies the learning rate by the ratio of batch sizes. It is a rule of thumb, so nothing changes.
    """
    if reference is None or reference.batch_size == batch_size:
        return None
    rates = list(dict.fromkeys(learning_rates))
    chosen = rates if reference.learning_rate is None else [reference.learning_rate]
    scaled = [rate * batch_size / reference.batch_size for rate in chosen]
    return (
        f"{_listed(rates)} as set; linear scaling from {reference.origin}'s global batch of {reference.batch_size} to "
        f"{batch_size} makes {_listed(scaled)}"
    )


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in rates)
