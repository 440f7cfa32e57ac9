"""A step that is left out changes nothing of the model, batch-norm statistics included, and is told of."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.pipeline.strategy import Pipeline
from trainkit.strategies.single import SingleDevice

from tests.tasks import assert_same_bits
from trainkit import Data, Phase, TaskModule, Trainer
from trainkit.spikes import WARM_UP_STEPS
from trainkit.testing import run_ranks

BATCH = 4


class Normed(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8))
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def training_step(self, batch: Any) -> Any:
        return (self.last(self.first(batch[0])) - batch[0].sum(dim=1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class InPhases(Normed):
    def one_step(self, batch: Any) -> Any:
        return self.training_step(batch)

    def two_step(self, batch: Any) -> Any:
        return self.training_step(batch[0].nan_to_num()[None])

    def configure_phases(self) -> Any:
        parts = (self.first.parameters(), self.last.parameters())
        return [Phase(name, torch.optim.SGD(p, lr=0.01)) for name, p in zip(("one", "two"), parts, strict=True)]


def data(steps: int, *, bad: int | None, value: float = float("nan"), without: bool = False) -> Data:
    """Return `steps` batches of which one has a bad sample, or is not there."""
    inputs = torch.randn(steps * BATCH, 2, generator=torch.Generator().manual_seed(1))
    if bad is not None and without:
        inputs = torch.cat([inputs[: (bad - 1) * BATCH], inputs[bad * BATCH :]])
    elif bad is not None:
        inputs[(bad - 1) * BATCH + 1] = value
    return Data(train=TensorDataset(inputs), batch_size=BATCH, shuffle=False)


def fit(data: Data, task: Any = None, strategy: Any = None, **settings: Any) -> Any:
    task = task or Normed()
    Trainer(
        strategy or SingleDevice(device="cpu"),
        callbacks=[],
        loggers=[],
        run_dir="run",
        **{"log_every": "5step", **settings},
    ).fit(task, data)
    return task


def on_two_ranks(broadcast_buffers: bool) -> Any:
    strategy = DDPStrategy(device="cpu", broadcast_buffers=broadcast_buffers)
    return fit(data(6, bad=3), strategy=strategy, on_nonfinite="skip").state_dict()


def on_two_stages() -> Any:
    strategy = Pipeline(stages=2, accumulate=2, device="cpu")
    return fit(data(6, bad=3), strategy=strategy, on_nonfinite="skip").state_dict()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_step_with_nan_leaves_the_whole_model_as_if_it_had_not_been(caplog):
    with caplog.at_level(logging.WARNING):
        skipped = fit(data(6, bad=3), on_nonfinite="skip")
    assert_same_bits(skipped, fit(data(6, bad=3, without=True), on_nonfinite="skip"))
    assert (
        "left out since the last log: step 3, since its loss was NaN or infinite (samples 8, 9, 10, 11)." in caplog.text
    )


def test_a_spike_leaves_the_whole_model_as_if_it_had_not_been(caplog):
    steps, bad = WARM_UP_STEPS + 4, WARM_UP_STEPS + 2
    with caplog.at_level(logging.WARNING):
        skipped = fit(data(steps, bad=bad, value=1e4), spike_factor=50)
    assert_same_bits(skipped, fit(data(steps, bad=bad, without=True), spike_factor=50))
    assert f"step {bad}, since its gradient was not finite, or a spike (samples {BATCH * (bad - 1)}, " in caplog.text


def test_a_phase_that_is_left_out_leaves_the_buffers_to_the_others():
    task = fit(data(6, bad=3), InPhases(), on_nonfinite="skip")
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())
    assert task.first[1].num_batches_tracked == 11  # twelve forwards, of which one did not count


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_ranks_leave_out_the_same_step_with_its_statistics(broadcast_buffers):
    states = run_ranks(on_two_ranks, 2, broadcast_buffers)
    for state in states:
        assert all(torch.isfinite(value).all() for value in state.values())
        assert state["first.1.num_batches_tracked"] == 5


def test_stages_leave_out_the_same_step_with_its_statistics():
    for state in run_ranks(on_two_stages, 2):
        assert all(torch.isfinite(value).all() for value in state.values())
