"""Learning rates at each log point."""

from __future__ import annotations

from trainkit.callback import Callback
from trainkit.optim.optimizer import SPLIT_FROM
from trainkit.run import Run


class LearningRateMonitor(Callback):
    """Adds `train/learning_rate`; with several parameter groups `train/learning_rate.0` and so on.

    The rates of a phase are `train/<phase>/learning_rate`. A group with a `"name"` is logged under that name. The value
    logged at step n is the rate of step n + 1, because schedules have stepped.
    """

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        for phase_optimizer in run.phase_optimizers:
            prefix = f"train/{phase_optimizer.phase}/" if phase_optimizer.phase else "train/"
            groups = [
                group for group in phase_optimizer.optimizer.param_groups if "lr" in group and SPLIT_FROM not in group
            ]
            for index, group in enumerate(groups):
                suffix = f".{group.get('name', index)}" if len(groups) > 1 else ""
                metrics[f"{prefix}learning_rate{suffix}"] = float(group["lr"])
