"""A run rolls back to before a loss that was not finite, skips that step, and ends as if it had never been."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import SkipStep, assert_same_bits
from trainkit import Callback, Data, TaskModule, Trainer, UserError
from trainkit.checkpoint.store import load_from
from trainkit.errors import CheckpointError, NonFiniteLoss
from trainkit.loggers.jsonl import JsonlLogger
from trainkit.loops.rollback import RollbackPoint
from trainkit.testing import run_ranks

NUM_SAMPLES = 40  # ten batches of 4


class Root(nn.Module):
    """The square root, whose gradient at zero is infinite."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.sqrt()


class Regression(TaskModule):
    """`loss`: one sample makes its output infinite; `gradient`: one makes its gradient so, and the loss after it."""

    def __init__(self, bad: str = "loss", dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bad = bad
        self.network = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.root = Root()

    def training_step(self, batch: Any) -> Any:
        inputs, marks = batch
        outputs = self.network(inputs).square() + 1
        if self.bad == "loss":
            outputs = self.root(outputs * (1 + marks))
        else:
            outputs = outputs + self.root(outputs * (1 - marks).clamp(min=0))
        return outputs.mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def data(*bad: int, kind: str = "loss") -> Data:
    marks = torch.zeros(NUM_SAMPLES, 1)
    marks[list(bad)] = float("inf") if kind == "loss" else 1.0
    inputs = torch.randn(NUM_SAMPLES, 1, generator=torch.Generator().manual_seed(1))
    return Data(train=TensorDataset(inputs, marks), batch_size=4)


def step_of(sample: int) -> int:
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
    return order.index(sample) // 4 + 1


def trainer(run_dir: str, strategy: Any = None, **settings: Any) -> Trainer:
    every = settings.pop("every", "3step")
    defaults = {"log_every": "4step", "on_nonfinite": "rollback", "loggers": [JsonlLogger()]}
    chosen = {"callbacks": [Checkpoint(every=every)], **defaults, **settings}
    return Trainer(strategy or SingleStrategy(device="cpu"), run_dir=run_dir, **chosen)


def listed(run_dir: str, strategy: Any = None, **settings: Any) -> Any:
    """Return the task of a run that skipped the step of the bad sample from the start."""
    task = Regression()
    trainer(run_dir, strategy, callbacks=[SkipStep(step_of(7))], **settings).fit(task, data(7))
    return task


def on_two_ranks(way: str) -> Any:
    strategy = DDPStrategy(device="cpu")
    if way == "listed":
        return listed(way, strategy, loggers=[], max_grad_norm=1.0).state_dict()
    task = Regression()
    trainer(way, strategy, on_nonfinite="rollback", loggers=[], max_grad_norm=1.0).fit(task, data(7))
    return task.state_dict()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("log_every", "every"), [("1step", "3step"), ("4step", "2step"), ("4step", None)])
def test_after_a_rollback_training_continues_without_the_step_and_ends_as_one_that_skipped_it(caplog, log_every, every):
    rolled = Regression()
    with caplog.at_level(logging.WARNING):
        result = trainer("rolled", log_every=log_every, every=every).fit(rolled, data(7))
    assert_same_bits(rolled, listed("listed", log_every=log_every))
    assert rolled.network[1].num_batches_tracked == 9
    assert (result.steps, result.samples) == (10, NUM_SAMPLES)
    said = caplog.text
    assert f"at step {step_of(7)} (samples" in said and "rolling back to step" in said
    assert f"step {step_of(7)} is skipped. Set trainer.detect_anomaly=true to find the operation." in said


def test_without_random_numbers_a_rollback_ends_as_on_nonfinite_skip_does():
    rolled, skipped = Regression(dropout=0.0), Regression(dropout=0.0)
    trainer("rolled").fit(rolled, data(7))
    trainer("skipped", on_nonfinite="skip").fit(skipped, data(7))
    assert_same_bits(dict(rolled.named_parameters()), dict(skipped.named_parameters()))


def test_logs_and_checkpoints_are_those_of_one_run():
    trainer("run", log_every="1step", every="4step").fit(Regression(), data(7))  # steps 5 and 6 are logged twice
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert steps == [step for step in range(1, 11) if step != step_of(7)]
    content = load_from("run").payload
    assert content["state"]["skipped_steps"] == [step_of(7)]


@pytest.mark.parametrize("every", ["1step", "4step"])
def test_a_step_whose_gradient_is_not_finite_is_found_behind_the_loss_that_followed(caplog, every):
    task = Regression("gradient")
    with caplog.at_level(logging.WARNING):
        result = trainer("run", log_every="1step", every=every).fit(task, data(7, kind="gradient"))
    assert result.steps == 10
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())
    found = re.search(r"step (\d+) left (\S+) not finite: step (\d+) is skipped\.", caplog.text)
    assert found is not None and int(found.group(1)) == int(found.group(3)) == step_of(7)
    assert found.group(2) in task.state_dict()


def test_a_run_with_too_many_rollbacks_fails():
    with pytest.raises(NonFiniteLoss, match="after 2 rollbacks"):
        trainer("run", max_rollbacks=2).fit(Regression(), data(*range(NUM_SAMPLES)))
    with pytest.raises(UserError, match="max_rollbacks must be a whole number"):
        trainer("run", max_rollbacks=0)


@pytest.mark.parametrize("every", ["2step", None])
def test_a_run_that_fails_names_the_parameter_and_how_to_find_the_operation(every):
    with pytest.raises(NonFiniteLoss) as caught:
        trainer("run", on_nonfinite="raise", every=every).fit(Regression(), data(7))
    assert "set trainer.detect_anomaly=true to find the operation" in str(caught.value)
    assert ", and by now network.0.weight is not finite. Lower" in str(caught.value)


def test_ranks_roll_back_together():
    rolled, skipped = run_ranks(on_two_ranks, 2, "rollback"), run_ranks(on_two_ranks, 2, "listed")
    names = [name for name, _ in Regression().named_parameters()]
    for state in (*rolled, *skipped):
        assert_same_bits({name: state[name] for name in names}, {name: skipped[0][name] for name in names})


def test_checkpoints_of_an_earlier_run_in_the_folder_are_not_restored(caplog):
    trainer("run", max_duration="1step").fit(Regression(), data())  # leaves its own last step
    rolled = Regression()
    with caplog.at_level(logging.WARNING):
        trainer("run", every=None).fit(rolled, data(7))
    assert "rolling back to step 0" in caplog.text
    assert_same_bits(rolled, listed("listed"))


class Doctored(Callback):
    """Saves steps 2 to 4, of which the third has weights that are not finite, and finds the rollback point."""

    def on_step_end(self, run: Any) -> None:
        if run.state.step in (2, 3, 4):
            run.checkpointer.save(reason="test")
        if run.state.step == 4:
            payload = run.checkpointer.store.load(run.checkpointer.store.entries()[1])
            payload["task"]["network.0.weight"].fill_(float("nan"))
            run.checkpointer.store.save(payload, name="step_00000003", step=3, epoch=0)
            self.found = [RollbackPoint(run).checkpoint_before(step) for step in (2, 3, 4, 5)]


def test_the_rollback_point_is_the_last_checkpoint_with_finite_weights_before_the_step():
    doctored = Doctored()
    trainer("run", callbacks=[doctored], max_duration="4step").fit(Regression(), data())
    assert [step for step, _ in doctored.found] == [0, 2, 2, 4]


class Alters(Callback):
    """Takes the counters from the checkpoint that the run will roll back to."""

    def on_step_complete(self, run: Any) -> None:
        if run.state.step == step_of(7) - 1:
            entry = run.checkpointer.store.last()
            payload = run.checkpointer.store.load(entry)
            del payload["state"]
            run.checkpointer.store.save(payload, name=f"step_{entry.step:08d}", step=entry.step, epoch=0)


def test_an_altered_checkpoint_is_not_rolled_back_to():
    altered = trainer("run", callbacks=[Checkpoint(every="1step"), Alters()])
    with pytest.raises(CheckpointError, match="was not saved by a run: it has no valid state"):
        altered.fit(Regression(), data(7))


def test_a_run_without_a_folder_warns_that_it_cannot_roll_back(caplog):
    with caplog.at_level(logging.WARNING):
        trainer("run", fast_dev_run=True).fit(Regression(), data())
    assert "this run has no folder for any" in caplog.text
