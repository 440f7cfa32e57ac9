"""Weights that are not finite never replace a sound checkpoint, with any policy and any caller (C9)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import NonFiniteLoss
from trainkit.testing import run_ranks

STEPS = 6
BAD = 4  # the step whose loss is finite and whose gradient is not


class Root(TaskModule):
    """The square root, whose gradient at zero is infinite, behind a mask that is never finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(1, 1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def training_step(self, batch: Any) -> Any:
        return self.line(batch[0]).square().mean() + (self.line.weight.sum() * batch[0]).abs().sqrt().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class StopAt(Callback):
    def on_step_end(self, run: Any) -> None:
        if run.state.step == BAD:
            run.request_stop("test")


def data(bad: int | None = BAD) -> Data:
    inputs = torch.ones(2 * STEPS, 1)
    if bad is not None:
        inputs[2 * bad - 2] = 0.0
    return Data(train=TensorDataset(inputs), batch_size=2, shuffle=False)


def fit(run_dir: str, policy: str = "raise", *, strategy: Any = None, bad: int | None = BAD, **settings: Any) -> Root:
    chosen = {"callbacks": [Checkpoint(every="2step", save_last_k=1)], "loggers": [], "log_every": "10step", **settings}
    task = Root()
    Trainer(strategy or SingleStrategy(device="cpu"), on_nonfinite=policy, run_dir=run_dir, **chosen).fit(
        task, data(bad)
    )
    return task


def on_two_ranks() -> str:
    with pytest.raises(NonFiniteLoss) as caught:
        fit("ranks", strategy=DDPStrategy(device="cpu"))
    return str(caught.value)


def is_sound(run_dir: str, *, step: int) -> bool:
    store = CheckpointStore(Path(run_dir) / "checkpoints")
    [entry] = store.entries()
    weights = store.load(entry)["task"]
    return entry.step == step and bool(torch.isfinite(weights["line.weight"]).all())


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("settings", [{}, {"max_duration": f"{BAD}step"}, {"callbacks": None}], ids=str)
def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_saved(settings):
    if "callbacks" in settings:  # the end of a run that is asked to stop is saved as well
        settings = {"callbacks": [Checkpoint(every="3step", save_last_k=1), StopAt()]}
    with pytest.raises(NonFiniteLoss, match=rf"step {BAD} left line\.weight not finite.*earlier checkpoints stay"):
        fit("run", **settings)
    assert is_sound("run", step=3 if "callbacks" in settings else 2)


def test_weights_that_are_not_finite_are_not_saved_when_the_run_is_to_stop():
    fit("run", "stop")
    assert is_sound("run", step=2)


def test_skipped_steps_can_be_saved():
    assert torch.isfinite(fit("run", "skip").line.weight).all()
    assert is_sound("run", step=STEPS)


@pytest.mark.parametrize("policy", ["raise", "stop", "skip", "rollback"])
def test_a_mask_of_minus_infinity_does_not_prevent_a_save(policy):
    fit("run", policy, bad=None)
    assert is_sound("run", step=STEPS)


def test_going_back_takes_a_checkpoint_with_a_mask_of_minus_infinity():
    assert torch.isfinite(fit("run", "rollback").line.weight).all()
    assert is_sound("run", step=STEPS)


def test_ranks_refuse_together():
    reports = run_ranks(on_two_ranks, 2)
    assert reports[0] == reports[1]
    assert is_sound("ranks", step=2)
