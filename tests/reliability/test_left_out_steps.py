"""A step that is left out changes nothing of the model, batch-norm statistics included, and is told of."""

import logging
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.pipeline.strategy import Pipeline
from trainkit.strategies.single import SingleStrategy

from tests.tasks import assert_same_bits
from trainkit import Data, Phase, TaskModule, Trainer, UserError, optimization, session
from trainkit.errors import NonFiniteLoss
from trainkit.spikes import WARM_UP_STEPS
from trainkit.step_replay import Finding, StepReplay
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


class Noting(nn.Module):
    """Notes the weights that it is called with, and what dropout leaves, for inputs that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout(0.5)
        self.seen: list[Any] = []

    def forward(self, inputs: Any) -> Any:
        kept = self.dropout(torch.ones_like(inputs))
        if not inputs.isfinite().all():
            self.seen.append((self.weight.tolist(), kept.tolist()))
        return inputs * self.weight * kept * (1 + random.random())


class Noted(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.noting = Noting()

    def training_step(self, batch: Any) -> Any:
        return super().training_step([self.noting(batch[0])])


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
        "left out since the last log: step 3, since its loss was NaN or infinite (samples 8, 9, 10, 11). In step 3 the "
        "first output that is not finite is that of first.0 (Linear), from inputs that were not finite already."
    ) in caplog.text


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_is_looked_at_with_the_weights_and_random_numbers_that_it_had(monkeypatch, fused):
    looked = fit(data(6, bad=3), Noted(), on_nonfinite="skip", fused_optimizer=fused)
    first, again = looked.noting.seen
    assert first == again and first[0] != looked.noting.weight.tolist()
    monkeypatch.setattr(StepReplay, "look", lambda *arguments: Finding())
    assert_same_bits(looked, fit(data(6, bad=3), Noted(), on_nonfinite="skip", fused_optimizer=fused))


def test_where_the_host_does_not_know_at_once_a_step_is_read_again_when_training_logs(monkeypatch, caplog):
    at_once = optimization._if_on_host
    monkeypatch.setattr(optimization, "_if_on_host", lambda flag: None)  # as on a GPU
    with caplog.at_level(logging.WARNING):
        task = fit(data(6, bad=3), Noted(), on_nonfinite="skip")
    assert len(task.noting.seen) == 2
    assert (
        "In step 3, computed with the weights of step 5, the first output that is not finite is that of " in caplog.text
    )
    with caplog.at_level(logging.WARNING):
        fit(data(6, bad=3), InPhases(), on_nonfinite="skip")
    assert caplog.text.count("the first output that is not finite is that of first.0 (Linear)") == 1
    monkeypatch.setattr(optimization, "_if_on_host", at_once)
    assert_same_bits(task, fit(data(6, bad=3), Noted(), on_nonfinite="skip"))


@pytest.mark.parametrize("kind", [InPhases, ByHand])
def test_a_phase_that_is_left_out_is_looked_at(caplog, kind):
    with caplog.at_level(logging.WARNING):
        task = fit(data(6, bad=3), kind(), on_nonfinite="skip")
    assert "In step 3 the first output that is not finite is that of first.0 (Linear)" in caplog.text
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())


@pytest.mark.parametrize("kind", [InPhases, ByHand])
def test_going_back_names_the_module_of_a_phase_and_keeps_nothing_of_the_look(caplog, kind):
    settings = {"run_dir": kind.__name__, "log_every": "1step", "callbacks": [Checkpoint(every="2step")]}
    with caplog.at_level(logging.WARNING):
        rolled = fit(data(6, bad=3), kind(), on_nonfinite="rollback", **settings)
    assert "step 3 is left out. The first output that is not finite is that of first.0 (Linear)" in caplog.text
    assert_same_bits(rolled, fit(data(6, bad=3, without=True), kind(), run_dir="without"))
    with pytest.raises(NonFiniteLoss, match=r"The first output that is not finite is that of first\.0 \(Linear\)"):
        fit(data(6, bad=3), kind(), on_nonfinite="raise", **settings)


def test_a_session_leaves_out_the_step_with_its_statistics_and_tells_of_it(caplog):
    task = Normed()
    with (
        caplog.at_level(logging.WARNING),
        session("single", task, data(6, bad=3), on_nonfinite="skip") as s,
    ):
        for window in s.windows():
            s.mean(s.step(window))
    assert_same_bits(task, fit(data(6, bad=3, without=True), on_nonfinite="skip"))
    assert caplog.text.count("left out since the last log") == 1
    assert "step 3, since its loss was NaN or infinite (samples 8, 9, 10, 11). In step 3 the first" in caplog.text
    wrong: Any = "stop"
    with (
        pytest.raises(UserError, match="choose 'raise'"),
        session("single", task, data(1, bad=None), on_nonfinite=wrong),
    ):
        pass


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
    (_, said), _ = told = run_ranks(on_two_ranks, 2, broadcast_buffers)
    assert "step 3, since its loss was NaN or infinite on rank 1 (samples 9, 11). In step 3 the first output" in said
    assert "is that of first.0 (Linear), from inputs that were not finite already." in said
    for state, _ in told:
        assert all(torch.isfinite(value).all() for value in state.values())
        assert state["first.1.num_batches_tracked"] == 5


def test_stages_leave_out_the_same_step_with_its_statistics():
    for state in run_ranks(on_two_stages, 2):
        assert all(torch.isfinite(value).all() for value in state.values())
