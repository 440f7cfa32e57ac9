"""Learning-rate schedules: when a scheduler steps, and the linear scaling rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.errors import UserError


@dataclass(frozen=True)
class LRSchedule:
    """A learning-rate scheduler and when it steps.

    `every="step"`: after each optimizer step; `"epoch"`: after each epoch; `"metric"`: after each validation,
    with the value of `metric` (`"validation/loss"`), as `ReduceLROnPlateau` wants it; `"manual"`: never, the task calls
    `scheduler.step()` itself.
    """

    scheduler: LRScheduler
    every: Literal["step", "epoch", "metric", "manual"] = "step"
    metric: str | None = None

    def __post_init__(self) -> None:
        if self.every not in ("step", "epoch", "metric", "manual"):
            raise UserError(f"LRSchedule(every={self.every!r}): choose 'step', 'epoch', 'metric' or 'manual'.")
        if (self.every == "metric") != (self.metric is not None):
            raise UserError(
                "LRSchedule(every='metric') goes with metric='validation/loss' or another name, others with none."
            )
        if isinstance(self.scheduler, ReduceLROnPlateau) and self.every in ("step", "epoch"):
            raise UserError(
                "ReduceLROnPlateau needs a metric: LRSchedule(scheduler, every='metric', metric='validation/loss')."
            )


@dataclass(frozen=True)
class ReferenceBatchSize:
    """The global batch for which a learning rate was chosen."""

    batch_size: int
    origin: str
    """Its source: `recipe digits`, `the resumed run`."""
    learning_rate: float | None = None
    """The rate chosen for it; `None` for the present one."""


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
