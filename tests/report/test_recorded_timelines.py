"""The profiler and the recorded timelines find the known times of a slowed backward."""

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
from trainkit.profiling import covered_seconds, read_timeline
from trainkit.testing import run_ranks

FORWARD = 0.03  # seconds that a step sleeps in its forward
LATE = 0.06
BACKWARD = {0: (0.04, 0.04, 0.04), 1: (0.06, 0.14, 0.04)}  # rank -> each layer's sleep, first done first


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, sleep):
        ctx.sleep = sleep
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.sleep()
        return gradient, None


class SlowLayers(TaskModule):
    """Three layers whose gradients arrive after sleeps, whose starts and ends are kept.

    Rank 1's first gradient comes after rank 0's, rank 0's second after rank 1's first, and its third after
    `first_is_reduced`.
    """

    def __init__(self, folder):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.folder = folder
        self.steps = []
        self.first_is_reduced = lambda: True

    def training_step(self, batch):
        value = batch[0]
        step = {"forward": [], "backward": [[], [], []]}
        self.steps.append(step)
        self._sleep(FORWARD, step["forward"])
        for number, layer in zip((2, 1, 0), self.layers, strict=True):
            value = _Slow.apply(layer(value), partial(self._sleep_in_backward, number, step["backward"][number]))
        return value.square().mean()

    def _sleep_in_backward(self, number, times):
        rank = torch.distributed.get_rank()
        own, other = (
            self.folder / f"rank_{each}_has_its_first_gradient_of_step_{len(self.steps)}" for each in (rank, 1 - rank)
        )
        if number == 1:
            own.touch()
        self._sleep(BACKWARD[rank][number], times)
        if number == 1 - rank:
            self._wait_for(other.exists, times)
        elif number == 2 and rank == 0:
            self._wait_for(self.first_is_reduced, times)

    def _wait_for(self, fact, times):
        while not fact():
            time.sleep(1e-3)
            times[1] = time.perf_counter()

    def _sleep(self, seconds, times):
        times.append(time.perf_counter())
        time.sleep(seconds)
        times.append(time.perf_counter())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Instants(Callback):
    """Writes when the sleeps of each step and the step itself ended, on the clock that all processes share."""

    def on_fit_start(self, run):
        if run.run_dir.name == "group":  # whose buckets are reduced by a thread of its own

            def first_is_reduced():
                buckets = run.strategy.gradients.reducer.buckets  # none in the first step
                reduction = buckets[0].reduction if buckets else None
                return reduction is None or reduction.finished_at is not None

            run.task.first_is_reduced = first_is_reduced

    def on_step_end(self, run):
        run.task.steps[-1]["end"] = time.perf_counter()

    def on_fit_end(self, run):
        path = run.run_dir / f"instants_{torch.distributed.get_rank()}.json"
        path.write_text(json.dumps(run.task.steps))


STRATEGIES = {
    "shared_memory": partial(DDPStrategy, bucket_cap_mb=0.015, transport="shared_memory"),
    "group": partial(DDPStrategy, bucket_cap_mb=0.015, transport="process_group"),
    "fusion": partial(FusionStrategy, buffer_mb=0.015),
}


class UserHook(Callback):
    """A communication hook of the user under PyTorch's DDP."""

    calls = 0

    def on_fit_start(self, run):
        def hook(group, bucket):
            self.calls += 1
            return allreduce_hook(group, bucket)

        run.strategy.gradients.wrapped.register_comm_hook(run.strategy.comm.group, hook)


class LateStage(Callback):
    """The second stage begins each step late; writes when, and when the first stage ended its last forward."""

    def __init__(self):
        self.instants = []

    def on_step_end(self, run):
        runtime = run.strategy.runtime
        if run.strategy.mesh.stage == 1:
            time.sleep(LATE)
            self.instants.append(time.perf_counter())  # before its next step
        else:
            forwards = [span.end for span in runtime.spans if span.action.kind == "F"]
            self.instants.append(runtime._began + max(forwards))

    def on_fit_end(self, run):
        (run.run_dir / f"instants_{run.strategy.mesh.stage}.json").write_text(json.dumps(self.instants))


def train_under_each_strategy(folder):
    settings = {"max_duration": "4step", "loggers": []}
    for name, strategy in STRATEGIES.items():
        trainer = Trainer(
            strategy(device="cpu", record_timeline=True),
            run_dir=folder / name,
            callbacks=[Profiler(start_step=6, end_step=6), Instants()],  # measures overlap in steps 3 and 4
            **settings,
        )
        trainer.fit(SlowLayers(folder / name), Data(train=TensorDataset(torch.randn(32, 64)), batch_size=8))
    hook = UserHook()
    for name, callbacks in (("torch_ddp", []), ("torch_ddp_with_a_hook", [hook])):
        trainer = Trainer(
            TorchDDPStrategy(device="cpu", bucket_cap_mb=0.015),
            run_dir=folder / name,
            callbacks=[Profiler(start_step=6, end_step=6), Instants(), *callbacks],
            **settings,
        )
        trainer.fit(SlowLayers(folder / name), Data(train=TensorDataset(torch.randn(32, 64)), batch_size=8))
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
    calls = run_ranks(train_under_each_strategy, 2, folder, timeout=170)
    assert min(calls) >= 4  # the user's hook stays, also while profiling
    return folder


def instants(folder):
    """Return the instants of each step, of rank 0 and of rank 1."""
    return [json.loads((folder / f"instants_{rank}.json").read_text()) for rank in range(2)]


def spans_of(folder, rank, step):
    """Return the spans of a recorded step by kind, and when each bucket was ready, started and reduced."""
    events = json.loads((folder / f"timeline_rank_{rank}.json").read_text())["traceEvents"]
    computed, buckets = {}, {}
    for event in events:
        if event["name"].startswith(f"step {step}: "):
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            if event["tid"] == "compute":
                computed[event["name"].split()[2]] = start, end
            else:
                ready, *_ = buckets.get(event["tid"], (start,))
                buckets[event["tid"]] = ready, start, end
    return computed, list(buckets.values())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [1, 2, 3])  # the first step is reduced at its end
@pytest.mark.parametrize("name", ["shared_memory", "group", "fusion"])
def test_spans_lie_between_the_instants_at_which_they_can_start_and_end(runs, name, step, rank):
    all_instants = instants(runs / name)
    own, other = all_instants[rank][step], all_instants[1 - rank][step]
    computed, buckets = spans_of(runs / name, rank, step)
    (forward, forward_end), (backward, backward_end), (wait, wait_end) = (
        computed[kind] for kind in ("forward", "backward", "wait")
    )
    gradients = own["backward"]
    assert all_instants[rank][step - 1]["end"] < forward < own["forward"][0]
    assert own["forward"][1] < forward_end == pytest.approx(backward, abs=1e-6) and backward < gradients[0][0]
    assert gradients[2][1] < backward_end == pytest.approx(wait, abs=1e-6) and wait < wait_end < own["end"]
    # A bucket is under way from when this rank has it until the slower rank has it too.
    assert len(buckets) == 3
    for number, (ready, started, end) in enumerate(buckets):
        assert gradients[number][1] < ready <= started < (gradients[number + 1][0] if number < 2 else backward_end)
        assert max(gradients[number][1], other["backward"][number][1]) < end < wait_end + 1e-6
    # Rank 1 comes second and adds up at once, rank 0 when its next bucket is full: neither waits for the end.
    *_, last_of_rank_0 = all_instants[0][step]["backward"]
    if name != "group":
        assert buckets[0][2] < last_of_rank_0[0]
    elif rank == 0:  # rank 1 may notice later what a thread of its own has done
        assert buckets[0][2] < last_of_rank_0[1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "word"), [("shared_memory", "bucket"), ("group", "bucket"), ("fusion", "buffer")])
def test_the_report_draws_the_step_of_median_length_of_rank_0(runs, name, word):
    timeline = read_timeline(runs / name)
    steps = [spans_of(runs / name, 0, step) for step in (1, 2, 3)]
    lengths = [computed["wait"][1] - computed["forward"][0] for computed, _ in steps]
    assert timeline.step == 2 + lengths.index(sorted(lengths)[1])
    computed, buckets = steps[timeline.step - 2]
    assert [track.name for track in timeline.tracks] == ["compute", *(f"{word} {number}" for number in range(3))]
    drawn = [(span.start, span.end) for span in timeline.tracks[0].spans]
    drawn += [(track.spans[-1].start, track.spans[-1].end) for track in timeline.tracks[1:]]
    begin = computed["forward"][0]
    recorded = [*computed.values(), *((start, end) for _, start, end in buckets)]
    assert drawn == [pytest.approx((start - begin, end - begin), abs=1e-6) for start, end in recorded]
    hidden = next(figure for figure in timeline.figures if "hidden" in figure.name)
    whole = sum(covered_seconds([(start, end) for _, start, end in buckets]) for _, buckets in steps)
    behind = sum(
        covered_seconds([(start, min(end, computed["backward"][1])) for _, start, end in buckets])
        for computed, buckets in steps
    )
    assert hidden.value == pytest.approx(behind / whole, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared_memory", "group", "fusion", "torch_ddp", "torch_ddp_with_a_hook"])
def test_the_profiler_measures_the_communication_hidden_behind_backward(runs, name):
    """From the first gradient of this rank to the last of the slower one; backward goes on for two layers of it."""
    overlap = json.loads((runs / name / "profile.json").read_text())["overlap"]
    own, other = instants(runs / name)
    steps = range(2, 2 + overlap["steps"])

    def mean(seconds):
        return sum(max(seconds(own[step], other[step], step), 0.0) for step in steps) / len(steps)

    exposed, communication = overlap["exposed_seconds"], overlap["communication_seconds"]
    assert exposed < mean(lambda own, other, step: own["end"] - own["backward"][2][1])
    assert communication < mean(lambda own, other, step: own["end"] - own["backward"][0][1])
    # Each bucket starts before the sleep for the next one, and is under way until the slower rank has it.
    starts = [(own[step]["backward"][1][0], own[step]["backward"][2][0]) for step in steps]
    ends = [[min(other[step]["backward"][k][1], own[step]["backward"][2][1]) for k in range(2)] for step in steps]
    hidden = [covered_seconds(list(zip(*pair, strict=True))) for pair in zip(starts, ends, strict=True)]
    assert communication - exposed > sum(hidden) / len(hidden)
    if name.startswith("torch_ddp"):  # PyTorch's Reducer does not tell when backward ended
        assert exposed > 0
        assert communication > mean(lambda own, other, step: other["backward"][2][1] - own["backward"][1][0])
    else:
        backward_end = {step: spans_of(runs / name, 0, step)[0]["backward"][1] for step in steps}
        assert exposed > mean(lambda own, other, step: other["backward"][2][1] - backward_end[step])
        assert communication > mean(
            lambda own, other, step: covered_seconds(
                [
                    (own["backward"][k + 1][0] if k < 2 else backward_end[step], other["backward"][k][1])
                    for k in range(3)
                ]
            )
        )
    assert overlap["hidden_share"] == pytest.approx(1 - exposed / communication, abs=1e-9)
    assert f"{overlap['hidden_share']:.0%} of it hidden" in overlap["line"]
    ends = [max(rank[step]["backward"][2][1] for rank in (own, other)) for step in range(4)]
    assert ends[3] - own[2]["forward"][0] < 2 * overlap["step_seconds"] < own[3]["end"] - own[1]["backward"][2][1]


@pytest.mark.slow
def test_the_profiler_measures_how_long_a_stage_waits(runs):
    overlap = json.loads((runs / "pipeline" / "profile.json").read_text())["overlap"]
    own, other = instants(runs / "pipeline")
    # From the last forward of the first stage until, at the earliest, the second starts the step.
    waited = sum(max(other[step - 1] - own[step], 0.0) for step in (2, 3)) / 2
    assert waited < overlap["exposed_seconds"] < overlap["step_seconds"]
    assert overlap["line"].startswith("overlap: PipelineStrategy waits for others in ")
