"""What strategies record of a step is what happened: the known times of a slowed backward are found in it."""

import json
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy

from trainkit import Data, TaskModule, Trainer
from trainkit.testing import run_ranks
from trainkit.timeline import read_timeline

MS = 1e-3
FORWARD = 30 * MS
BACKWARD = {0: (40 * MS, 40 * MS, 40 * MS), 1: (60 * MS, 140 * MS, 40 * MS)}  # rank -> each layer's, first done first


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class SlowLayers(TaskModule):
    """Three layers whose gradients arrive after known times."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def training_step(self, batch):
        value = batch[0]
        time.sleep(FORWARD)
        rank = torch.distributed.get_rank()
        for layer, seconds in zip(self.layers, reversed(BACKWARD[rank]), strict=True):
            value = _Slow.apply(layer(value), seconds)
        return value.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


STRATEGIES = {
    "shared_memory": partial(DDPStrategy, bucket_mb=0.015, transport="shared_memory"),
    "group": partial(DDPStrategy, bucket_mb=0.015, transport="group"),
    "fusion": partial(FusionStrategy, buffer_mb=0.015),
}


def train_under_each(folder):
    for name, strategy in STRATEGIES.items():
        run_dir = folder / name
        trainer = Trainer(
            strategy(device="cpu", timeline=True), max_duration="4step", run_dir=run_dir, callbacks=[], loggers=[]
        )
        trainer.fit(SlowLayers(), Data(train=TensorDataset(torch.randn(32, 64)), batch_size=8))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(train_under_each, 2, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "word"), [("shared_memory", "bucket"), ("group", "bucket"), ("fusion", "buffer")])
def test_the_picture_of_buckets_shows_what_happened(runs, name, word):
    timeline = read_timeline(runs / name)
    forward, backward, wait = timeline.lanes[0].spans
    buckets = [lane.spans[-1] for lane in timeline.lanes[1:]]
    assert [lane.name for lane in timeline.lanes] == ["compute", *(f"{word} {number}" for number in range(3))]
    near = {"abs": 30 * MS}
    own, other = BACKWARD[0], BACKWARD[1]
    begin = forward.end
    assert forward.end - forward.start == pytest.approx(FORWARD, **near)
    assert backward.end - backward.start == pytest.approx(sum(own), **near)
    # A bucket is under way from when this rank has it until the slower rank has it too.
    assert buckets[0].start - begin == pytest.approx(own[0], **near)
    assert buckets[1].start - begin == pytest.approx(own[0] + own[1], **near)
    assert buckets[1].end - begin == pytest.approx(other[0] + other[1], **near)
    assert buckets[2].end - begin == pytest.approx(sum(other), **near)
    # Rank 1 comes second and adds up at once, rank 0 when its next bucket is full: neither waits for the end.
    assert other[0] - 10 * MS < buckets[0].end - begin < own[0] + own[1] + 30 * MS
    assert wait.end - wait.start == pytest.approx(sum(other) - sum(own), **near)
    hidden = next(figure for figure in timeline.figures if "hidden" in figure.name)
    assert hidden.value == pytest.approx(1 - (sum(other) - sum(own)) / (sum(other) - own[0]), abs=0.2)
    assert json.loads((runs / name / "timeline_rank_1.json").read_text())["traceEvents"]
