from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from trainkit.callbacks.gradient_norms import GradientNorms
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.tasks import Recorder, Regression, regression_data
from trainkit import Data


class Two(Regression):
    """Two sub-modules whose gradients differ a lot, and a direct parameter."""

    def __init__(self) -> None:
        super().__init__(hidden=3)
        self.head = nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Any) -> Any:
        return self.head(super().forward(inputs)) * self.scale


def logged(make_trainer: Any, *, every: int, log_every: str, **settings: Any) -> list[dict[str, float]]:
    recorder = Recorder()
    trainer = make_trainer(callbacks=[GradientNorms(every=every), recorder], log_every=log_every, **settings)
    torch.manual_seed(1)
    trainer.fit(Two(), Data(train=regression_data(40), batch_size=8))
    return [{k: v for k, v in row.items() if k.startswith("grad_norm/")} for row in recorder.logged]


def test_norms_are_those_of_the_step_of_the_log_point(make_trainer: Any) -> None:
    torch.manual_seed(1)
    task = Two()
    inputs, targets = regression_data(40).tensors
    from trainkit.data.order import GlobalOrder

    chosen = GlobalOrder(40, seed=0).slice(0, 0, 8)
    task.training_step([inputs[chosen], targets[chosen]]).backward()

    first = logged(make_trainer, every=1, log_every="1step", max_grad_norm=1e-3)[0]

    def norm(*parameters: nn.Parameter) -> float:
        return float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())

    assert first == pytest.approx(
        {
            "grad_norm/network": norm(*task.network.parameters()),
            "grad_norm/head": norm(*task.head.parameters()),
            "grad_norm/(its own)": norm(task.scale),
            "grad_norm/total": norm(*task.parameters()),
        },
        rel=1e-5,
    )


def test_norms_are_measured_at_multiples_only_without_a_device_sync(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    original = torch._foreach_norm

    def counting(*args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_norm", counting)

    rows = logged(make_trainer, every=5, log_every="5step", max_duration="10step")

    assert len(taken) == 2
    assert [len(row) for row in rows] == [4, 4]
    assert rows[0] != rows[1]


@pytest.mark.slow
def test_norms_of_pipeline_stages_are_combined(make_trainer: Any) -> None:
    def norms(strategy: Any) -> dict[str, float]:
        task, data = Regression(hidden=6), Data(train=regression_data(16), batch_size=8)
        trainer = make_trainer(strategy, callbacks=[GradientNorms(every=2, depth=2)], log_every="2step")
        metrics = trainer.fit(task, data).metrics
        return {name: value for name, value in metrics.items() if name.startswith("grad_norm/")}

    expected = norms(None)

    assert len(expected) == 3
    assert norms(PipelineStrategy(stages=2, device="cpu")) == pytest.approx(expected, rel=1e-5)
