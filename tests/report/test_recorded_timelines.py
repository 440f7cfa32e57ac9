"""What strategies record of a step is what happened: the known times of a slowed backward are found in it."""

import json
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset
from trainkit.callbacks.profiler import Profiler
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.tasks import Regression, regression_data
from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.profiling import read_timeline
from trainkit.testing import run_ranks

MS = 1e-3
FORWARD = 30 * MS
LATE = 60 * MS
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
    "shared_memory": partial(DDPStrategy, bucket_cap_mb=0.015, transport="shared_memory"),
    "group": partial(DDPStrategy, bucket_cap_mb=0.015, transport="process_group"),
    "fusion": partial(FusionStrategy, buffer_mb=0.015),
}


class HookOfTheUser(Callback):
    """Reduces gradients under PyTorch's DDP as the user wants it."""

    calls = 0

    def on_fit_start(self, run):
        def hook(group, bucket):
            self.calls += 1
            return allreduce_hook(group, bucket)

        run.strategy._wrapped.register_comm_hook(run.strategy.comm.group, hook)


class LateStage(Callback):
    """The second stage begins each step later than the first."""

    def on_step_end(self, run):
        if run.strategy.mesh.stage == 1:
            time.sleep(LATE)


def train_under_each(folder):
    settings = {"max_duration": "4step", "loggers": []}
    for name, strategy in STRATEGIES.items():
        trainer = Trainer(
            strategy(device="cpu", record_timeline=True),
            run_dir=folder / name,
            callbacks=[Profiler(start_step=6, end_step=6)],  # looks at overlap in steps 3 and 4
            **settings,
        )
        trainer.fit(SlowLayers(), Data(train=TensorDataset(torch.randn(32, 64)), batch_size=8))
    hook = HookOfTheUser()
    for name, callbacks in (("torch_ddp", []), ("torch_ddp_with_a_hook", [hook])):
        trainer = Trainer(
            TorchDDPStrategy(device="cpu", bucket_cap_mb=0.015),
            run_dir=folder / name,
            callbacks=[Profiler(start_step=6, end_step=6), *callbacks],
            **settings,
        )
        trainer.fit(SlowLayers(), Data(train=TensorDataset(torch.randn(32, 64)), batch_size=8))
    trainer = Trainer(
        PipelineStrategy(stages=2, device="cpu", accumulate=2),
        run_dir=folder / "pipeline",
        callbacks=[Profiler(start_step=6, end_step=6), LateStage()],
        **settings,
    )
    trainer.fit(Regression(hidden=8), Data(train=regression_data(32), batch_size=8))
    return hook.calls


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    calls = run_ranks(train_under_each, 2, folder)
    assert min(calls) >= 4  # the user's hook stayed, also while somebody looked
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "word"), [("shared_memory", "bucket"), ("group", "bucket"), ("fusion", "buffer")])
def test_the_picture_of_buckets_shows_what_happened(runs, name, word):
    timeline = read_timeline(runs / name)
    forward, backward, wait = timeline.tracks[0].spans
    buckets = [track.spans[-1] for track in timeline.tracks[1:]]
    assert [track.name for track in timeline.tracks] == ["compute", *(f"{word} {number}" for number in range(3))]
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared_memory", "group", "fusion", "torch_ddp", "torch_ddp_with_a_hook"])
def test_the_profiler_says_what_of_the_communication_is_hidden_behind_backward(runs, name):
    """From the first gradient of this rank to the last of the slower one; backward goes on for two layers of it."""
    own, other = BACKWARD[0], BACKWARD[1]
    overlap = json.loads((runs / name / "profile.json").read_text())["overlap"]
    assert FORWARD + sum(other) - 20 * MS < overlap["step_seconds"] < 2 * (FORWARD + sum(other))
    assert overlap["exposed_seconds"] == pytest.approx(sum(other) - sum(own), abs=30 * MS)
    assert overlap["communication_seconds"] == pytest.approx(sum(other) - own[0], abs=40 * MS)
    assert overlap["hidden_share"] == pytest.approx(1 - (sum(other) - sum(own)) / (sum(other) - own[0]), abs=0.1)
    assert f"{overlap['hidden_share']:.0%} of it hidden" in overlap["line"]


@pytest.mark.slow
def test_the_profiler_says_how_long_a_stage_waits_for_others(runs):
    overlap = json.loads((runs / "pipeline" / "profile.json").read_text())["overlap"]
    assert LATE - 20 * MS < overlap["exposed_seconds"] < overlap["step_seconds"]
    assert overlap["line"].startswith("overlap: PipelineStrategy waits for others in ")
