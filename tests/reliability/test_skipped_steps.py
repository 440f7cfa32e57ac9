"""A skipped step changes nothing of the model, batch-norm statistics included, and is reported."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import assert_same_bits
from trainkit import Data, Phase, TaskModule, Trainer, UserError, session
from trainkit.errors import NonFiniteLoss
from trainkit.optim import optimizer as phase_optimizer
from trainkit.optim.optimizer import WARM_UP_STEPS
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
        optimizers = [torch.optim.SGD(part, lr=0.01, momentum=0.9) for part in parts]
        return [Phase("one", optimizers[0]), Phase("two", optimizers[1])]


class ByHand(InPhases):
    manual = True

    def manual_step(self, control: Any) -> None:
        control.backward("two")
        control.backward("one")
        control.step("one")
        control.step("two")


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
        strategy or SingleStrategy(device="cpu"),
        loggers=[],
        **{"log_every": "5step", "run_dir": "run", "callbacks": [], **settings},
    ).fit(task, data)
    return task


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: Any) -> None:
        self.text += f"{record.getMessage()}\n"


def on_two_ranks(broadcast_buffers: bool) -> Any:
    said = Said()
    logging.getLogger("trainkit").addHandler(said)
    strategy = DDPStrategy(device="cpu", broadcast_buffers=broadcast_buffers)
    return fit(data(6, bad=3), strategy=strategy, on_nonfinite="skip").state_dict(), said.text


def on_two_stages() -> Any:
    strategy = PipelineStrategy(stages=2, accumulate=2, device="cpu")
    return fit(data(6, bad=3), strategy=strategy, on_nonfinite="skip").state_dict()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_step_with_nan_changes_nothing_of_the_model(caplog):
    with caplog.at_level(logging.WARNING):
        skipped = fit(data(6, bad=3), on_nonfinite="skip")
    assert_same_bits(skipped, fit(data(6, bad=3, without=True), on_nonfinite="skip"))
    assert (
        "skipped since the last log: step 3, since its loss was NaN or infinite (samples 8, 9, 10, 11). "
        "Set trainer.detect_anomaly=true to find the operation."
    ) in caplog.text


def test_where_the_host_does_not_know_at_once_a_step_is_skipped_with_its_statistics_too(monkeypatch, caplog):
    expected = fit(data(6, bad=3), on_nonfinite="skip")
    monkeypatch.setattr(phase_optimizer, "_if_on_host", lambda flag: None)  # as on a GPU
    with caplog.at_level(logging.WARNING):
        assert_same_bits(fit(data(6, bad=3), on_nonfinite="skip"), expected)
    assert "step 3, since its loss was NaN or infinite (samples 8, 9, 10, 11)" in caplog.text


@pytest.mark.parametrize("kind", [InPhases, ByHand])
def test_a_skipped_phase_is_reported_once(caplog, kind):
    with caplog.at_level(logging.WARNING):
        task = fit(data(6, bad=3), kind(), on_nonfinite="skip")
    assert caplog.text.count("step 3, since its") == 1
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())


@pytest.mark.parametrize("kind", [InPhases, ByHand])
def test_a_rollback_skips_all_phases_of_the_step(caplog, kind):
    settings = {"run_dir": kind.__name__, "log_every": "1step", "callbacks": [Checkpoint(every="2step")]}
    with caplog.at_level(logging.WARNING):
        rolled = fit(data(6, bad=3), kind(), on_nonfinite="rollback", **settings)
    assert "step 3 is skipped." in caplog.text
    assert_same_bits(rolled, fit(data(6, bad=3, without=True), kind(), run_dir="without"))
    with pytest.raises(NonFiniteLoss, match=r"by now \S+ is not finite\."):
        fit(data(6, bad=3), kind(), on_nonfinite="raise", **settings)


def test_a_session_skips_the_step_with_its_statistics_and_reports_it(caplog):
    task = Normed()
    with (
        caplog.at_level(logging.WARNING),
        session("single", task, data(6, bad=3), on_nonfinite="skip") as s,
    ):
        for batch in s.step_batches():
            s.mean(s.step(batch))
    assert_same_bits(task, fit(data(6, bad=3, without=True), on_nonfinite="skip"))
    assert caplog.text.count("skipped since the last log") == 1
    assert "step 3, since its loss was NaN or infinite (samples 8, 9, 10, 11)." in caplog.text
    wrong: Any = "stop"
    with (
        pytest.raises(UserError, match="choose 'raise'"),
        session("single", task, data(1, bad=None), on_nonfinite=wrong),
    ):
        pass


def test_a_spike_changes_nothing_of_the_model(caplog):
    steps, bad = WARM_UP_STEPS + 4, WARM_UP_STEPS + 2
    with caplog.at_level(logging.WARNING):
        skipped = fit(data(steps, bad=bad, value=1e4), skip_grad_norm_factor=50)
    assert_same_bits(skipped, fit(data(steps, bad=bad, without=True), skip_grad_norm_factor=50))
    assert f"step {bad}, since its gradient was not finite, or a spike (samples {BATCH * (bad - 1)}, " in caplog.text


def test_a_skipped_phase_leaves_the_buffers_to_the_others():
    task = fit(data(6, bad=3), InPhases(), on_nonfinite="skip")
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())
    assert task.first[1].num_batches_tracked == 11  # twelve forwards, of which one did not count


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_ranks_skip_the_same_step_with_its_statistics(broadcast_buffers):
    (_, said), _ = told = run_ranks(on_two_ranks, 2, broadcast_buffers)
    assert "step 3, since its loss was NaN or infinite on rank 1 (samples 9, 11)." in said
    for state, _ in told:
        assert all(torch.isfinite(value).all() for value in state.values())
        assert state["first.1.num_batches_tracked"] == 5


def test_stages_skip_the_same_step_with_its_statistics():
    for state in run_ranks(on_two_stages, 2):
        assert all(torch.isfinite(value).all() for value in state.values())
