"""The tutorial of docs/tutorial_equal_weights.md: accumulation, `dp` and `ddp` print the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import fit
from trainkit import Callback, Data, TaskModule
from trainkit.testing import run_ranks

NUM_SAMPLES = 48
BATCH_SIZE = 4  # of one micro-batch


class Line(TaskModule):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(16, 1, bias=False)
        nn.init.ones_(self.line.weight)

    def training_step(self, batch):
        return self.line(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class MeanLine(Line):
    def training_step(self, batch):
        return super().training_step(batch) / len(batch[0])


class EpochWeights(Callback):
    def __init__(self):
        self.weights = []

    def on_epoch_end(self, run):
        self.weights.append(run.task.line.weight.detach().clone())


def inputs(num_samples=NUM_SAMPLES):
    return torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(1))


def trained(strategy, parts, run_dir, *, task=Line, num_samples=NUM_SAMPLES):
    """Return the weights after each epoch."""
    seen, data = EpochWeights(), Data(train=TensorDataset(inputs(num_samples)), batch_size=BATCH_SIZE * parts)
    fit(strategy, task(), data, seen, max_duration="2epoch", run_dir=run_dir)
    return seen.weights


def trained_on_this_rank(run_dir):
    parts = torch.distributed.get_world_size()
    return trained(DDPStrategy(device="cpu"), parts, run_dir)


def written_by_hand(parts, *, loss=torch.sum, num_samples=NUM_SAMPLES):
    """Train as the tutorial does: micro-batches of 4 from perm[r::N], loss / N, backward N times, one step."""
    task = Line()
    optimizer = task.configure_optimizers()
    weights = []
    for epoch in range(2):
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))
        shares = [order[rank::parts].split(BATCH_SIZE) for rank in range(parts)]
        for micro_batches in zip(*shares, strict=True):
            for indices in micro_batches:
                (loss(task.line(inputs(num_samples)[indices])) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(task.line.weight.detach().clone())
    return weights


def assert_printed_equal(weights, expected):
    assert len(weights) == len(expected) == 2
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [32, 34, 33], ids=["full batches", "last batch of two", "last batch of one"])
def test_the_mean_over_samples_is_that_of_whole_batches_with_any_accumulation(accumulate, num_samples, tmp_path):
    strategy = SingleStrategy(device="cpu", accumulate=accumulate)
    weights = trained(strategy, 1, tmp_path, task=MeanLine, num_samples=num_samples)
    assert_printed_equal(weights, written_by_hand(1, loss=torch.mean, num_samples=num_samples))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_accumulation_and_replicas_print_the_weights_of_the_hand_written_loop(parts, tmp_path):
    expected = written_by_hand(parts)
    assert_printed_equal(trained(SingleStrategy(device="cpu", accumulate=parts), parts, tmp_path / "single"), expected)
    assert_printed_equal(trained(DataParallelStrategy(devices=["cpu"] * parts), parts, tmp_path / "dp"), expected)


@pytest.mark.parametrize("parts", [2, 3])
def test_each_rank_of_ddp_prints_the_weights_of_accumulation(parts, tmp_path):
    expected = trained(SingleStrategy(device="cpu", accumulate=parts), parts, tmp_path / "single")
    for weights in run_ranks(trained_on_this_rank, parts, tmp_path / "ddp"):
        assert_printed_equal(weights, expected)
