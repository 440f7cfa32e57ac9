from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from trainkit.callbacks.learning_rate_monitor import LearningRateMonitor

from trainkit.trainer import FitResult

Fit = Callable[..., FitResult]


def test_the_logged_rate_is_that_of_the_next_step(fit: Fit, scripted: Any) -> None:
    task = scripted()
    optimizer = torch.optim.SGD(task.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    task.configure_optimizers = lambda: (optimizer, schedule)

    result = fit(task, LearningRateMonitor())

    assert result.metrics["train/learning_rate"] == 0.25


def test_every_group_is_logged_by_its_name_or_number(fit: Fit, scripted: Any) -> None:
    task = scripted()
    groups = [{"params": [task.net.weight], "lr": 0.1}, {"params": [task.net.bias], "lr": 0.2, "name": "biases"}]
    task.configure_optimizers = lambda: torch.optim.SGD(groups)

    result = fit(task, LearningRateMonitor())

    rates = {name: value for name, value in result.metrics.items() if "learning_rate" in name}
    assert rates == {"train/learning_rate.0": 0.1, "train/learning_rate.biases": 0.2}
