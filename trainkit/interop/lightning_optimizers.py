"""What a LightningModule's configure_optimizers returns, as trainkit takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.errors import UserError
from trainkit.interop.lightning_logging import without_stage
from trainkit.optim.phase import OptimizerSpec, Schedule


def read_optimizers(returned: Any, *, of: str) -> OptimizerSpec:
    """Return the optimizer and schedules of what a module's configure_optimizers returned; `of` names the module."""
    optimizers, schedulers = _parts(returned)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise UserError(
            f"{of}.configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization has one; "
            "train several with TaskModule.configure_phases."
        )
    return optimizers[0], [_schedule(item, of) for item in schedulers]


def _parts(returned: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedulers in one of the forms that Lightning knows."""
    if isinstance(returned, Mapping):
        scheduler = returned.get("lr_scheduler")
        return [returned["optimizer"]], [] if scheduler is None else [scheduler]
    if isinstance(returned, tuple | list):
        if len(returned) == 2 and all(isinstance(item, list | tuple) for item in returned):
            return list(returned[0]), list(returned[1])
        if len(returned) == 1:
            return _parts(returned[0])
        return list(returned), []
    return [returned], []


def _schedule(item: Any, of: str) -> Schedule:
    """Return one of Lightning's schedules: a scheduler, stepped each epoch, or a mapping that says when."""
    config = item if isinstance(item, Mapping) else {"scheduler": item}
    scheduler: LRScheduler = config["scheduler"]
    if config.get("frequency", 1) != 1:
        raise UserError(
            f"{of}.configure_optimizers asks for a scheduler with frequency={config['frequency']}; schedules step "
            "after every step or every epoch. Scale the scheduler's own step size instead."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        monitor = config.get("monitor")
        if monitor is None:
            raise UserError(f"{of}.configure_optimizers: ReduceLROnPlateau needs a monitor, such as 'val_loss'.")
        (name,) = without_stage({monitor: None})
        return Schedule(scheduler, every="metric", metric=f"validation/{name}")
    return Schedule(scheduler, every="step" if config.get("interval") == "step" else "epoch")
