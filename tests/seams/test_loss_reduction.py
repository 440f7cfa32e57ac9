"""A loss that is a sum over samples: exact under every strategy if the task says so, else a warning shows it."""

import json
import logging

import pytest
import torch
from torch import nn

from tests.seams.training import BATCH_SIZE, BOUND, EVERY, Layers, batches, difference, samples, trained
from trainkit import Data, Phase
from trainkit.errors import UserError
from trainkit.loggers.jsonl import JsonlLogger

NUM_SAMPLES = 3 * BATCH_SIZE + 3  # the last batch is short, and its shards are unequal


def data(num_samples=NUM_SAMPLES):
    return Data(train=samples(num_samples), validation=samples(num_samples), batch_size=BATCH_SIZE, shuffle=False)


class Unsaid(Layers):
    """The loss of the public VAE script: a sum over the batch."""

    def training_step(self, batch):
        inputs, targets = batch
        return 0.02 * nn.functional.mse_loss(self(inputs), targets, reduction="sum")

    validation_step = training_step


class Summed(Unsaid):
    loss_reduction = "sum"


class FarFromItsTargets(Layers):
    """Losses that differ little from sample to sample, and stay as they are."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)

    def training_step(self, batch):
        return super().training_step((batch[0], batch[1] + 30))


class UnsaidFarFromItsTargets(FarFromItsTargets):
    def training_step(self, batch):
        return len(batch[0]) * super().training_step(batch)


class SummedInPhases(Summed):
    def configure_phases(self):
        return [Phase("all", torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5))]

    def all_step(self, batch):
        return Summed.training_step(self, batch)


class SummedWithLBFGS(Summed):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class SummedWithWeight(Summed):
    def training_step(self, batch):
        return {"loss": super().training_step(batch), "weight": 2.0}


def plain_loop(task, optimizer, num_samples=NUM_SAMPLES):
    losses = []
    for batch in batches(num_samples):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = Unsaid.training_step(task, batch)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return task.state_dict(), losses


def sgd(task):
    return torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)


@pytest.mark.parametrize("strategy", EVERY)
def test_a_sum_over_samples_trains_as_in_a_plain_loop(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = Layers()
    reference, _ = plain_loop(task, sgd(task))
    # In equal micro-batches: an accumulated batch of 27 samples is split unevenly by the strategies that can.
    assert difference(trained(strategy, Summed(), data=data()), reference) < BOUND


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_phases_and_lbfgs_train_the_sum_too(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = Layers()
    assert difference(trained(strategy, SummedInPhases(), data=data()), plain_loop(task, sgd(task))[0]) < BOUND
    task = Layers()
    lbfgs = torch.optim.LBFGS(task.parameters(), lr=0.1, max_iter=3)
    assert difference(trained(strategy, SummedWithLBFGS(), data=data()), plain_loop(task, lbfgs)[0]) < BOUND


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_the_logged_loss_is_the_sum_over_the_global_batch_and_that_of_an_evaluation_a_mean(
    strategy, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    task = Layers()
    _, losses = plain_loop(task, sgd(task))
    settings = {"log_every": "1step", "evaluate_every": "1epoch", "run_dir": str(tmp_path / "run")}
    trained(strategy, Summed(), data=data(), loggers=[JsonlLogger()], **settings)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx(losses, rel=1e-9)
    inputs, targets = samples(NUM_SAMPLES).tensors
    mean = 0.02 * nn.functional.mse_loss(task(inputs), targets, reduction="sum").item() / NUM_SAMPLES
    assert [row["validation/loss"] for row in rows if "validation/loss" in row] == pytest.approx([mean], rel=1e-9)


def test_a_sum_with_a_weight_and_an_unknown_reduction_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"returned a weight.*loss_reduction = 'mean'"):
        trained("single", SummedWithWeight())
    task = Summed()
    task.loss_reduction = "summ"
    with pytest.raises(UserError, match="Did you mean 'sum'"):
        trained("single", task)


@pytest.mark.parametrize(("task", "warns"), [(UnsaidFarFromItsTargets, 1), (FarFromItsTargets, 0), (Summed, 0)])
def test_a_short_batch_shows_a_loss_that_grows_with_its_samples(task, warns, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        trained("single", task(), data=data(3 * BATCH_SIZE + 1), max_duration="2epoch")
    assert sum("loss_reduction = 'sum'" in record.getMessage() for record in caplog.records) == warns
