"""Tasks whose step changes state train as in one process, or are refused by name."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.pipeline.planner import TrainingStep
from trainkit.strategies.pipeline.schedules import Schedule
from trainkit.strategies.pipeline.staged_model import StagedModel
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.strategies.pipeline.training import Training, make, step_batches
from tests.strategies.pipeline.zoo.comparison import difference, largest_difference
from tests.strategies.pipeline.zoo.tasks import (
    EQUAL,
    REFUSED,
    REFUSED_AT_A_CUT,
    REFUSED_IN_THE_FIRST_STEP,
    TOO_CLOSE_FOR_FOUR,
    Clamped,
    CountedPhases,
    CounterInModule,
    CounterInTheMiddle,
    ExtraState,
    HiddenTensor,
    LossAverage,
    Normalized,
    PointerElsewhere,
    ReplacedBuffer,
    ReplacedLater,
    SwappedBuffers,
    TeacherMovedLast,
    TeacherThroughData,
)
from trainkit.data.batch import MicroBatch
from trainkit.errors import UserError
from trainkit.testing import rank_outcomes, run_ranks

BOUND = 1e-9
ONE_OF_EACH_KIND = [
    ReplacedLater,
    SwappedBuffers,
    HiddenTensor,
    CounterInTheMiddle,
    CounterInModule,
    LossAverage,
    PointerElsewhere,
    TeacherThroughData,
    Clamped,
    Normalized,
    ExtraState,
    CountedPhases,
]


def _differences(cases):
    return {f"{model.__name__} {settings}": difference(model, **settings) for model, settings in cases}


def _too_large(num_ranks, cases, *, timeout=60):
    found = run_ranks(_differences, num_ranks, cases, timeout=timeout)
    assert len(found[0]) == len(cases)
    return {name: value for rank in found for name, value in rank.items() if not value <= BOUND}


def test_one_task_of_each_kind_has_the_state_of_one_process_on_every_rank():
    assert _too_large(2, [(model, {"num_steps": 3}) for model in ONE_OF_EACH_KIND]) == {}


def test_several_stages_of_a_rank_keep_their_own_attributes():
    models = [ReplacedLater, SwappedBuffers, CounterInTheMiddle, HiddenTensor]

    assert _too_large(2, [(model, {"num_steps": 3, "schedule": "interleaved_1f1b"}) for model in models]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "schedule"),
    [
        (2, "1f1b"),
        (2, "gpipe"),
        (2, "interleaved_1f1b"),
        (4, "1f1b"),
        (4, "gpipe"),
    ],
)
def test_every_task_has_the_state_of_one_process_under_every_schedule(num_ranks, schedule):
    four = num_ranks == 4 or schedule == "interleaved_1f1b"
    models = [model for model in EQUAL if not four or model not in TOO_CLOSE_FOR_FOUR]

    assert _too_large(num_ranks, [(model, {"schedule": schedule}) for model in models], timeout=200) == {}


def _plan(model, split_points=None):
    """Plan in this process, as a run does before training."""
    task = make(model).double()
    model_of_stages = StagedModel(
        schedule=Schedule("1f1b", 2, 1),
        split_points=split_points,
        shared_parameters="replicated",
        balance="speed",
        trace="eager",
    )
    batch = step_batches(model, sizes=[4], num_steps=1)[0].micro_batches[0].batch
    steps = {"training_step": TrainingStep(task.training_step)}
    model_of_stages.plan = model_of_stages.make_plan(task, steps, batch, torch.device("cpu"))
    return task


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_state_that_cannot_be_followed_is_refused_before_training(model):
    with pytest.raises(UserError, match=REFUSED[model]):
        _plan(model)


@pytest.mark.parametrize("model", REFUSED_AT_A_CUT, ids=lambda model: model.__name__)
def test_a_stage_does_not_begin_between_the_users_of_state(model):
    with pytest.raises(UserError, match=REFUSED_AT_A_CUT[model]):
        _plan(model, ["layers.4"])


@pytest.mark.parametrize("model", [TeacherMovedLast, TeacherThroughData, CounterInTheMiddle, LossAverage, HiddenTensor])
def test_planning_leaves_the_task_as_it_was(model):
    before = make(model).double()
    after = _plan(model)

    assert largest_difference(after.state_dict(), before.state_dict()) == 0.0
    assert largest_difference(after.observations(), before.observations()) == 0.0
    assert [p.requires_grad for p in after.parameters()] == [p.requires_grad for p in before.parameters()]


@pytest.mark.parametrize("model", REFUSED_IN_THE_FIRST_STEP, ids=lambda model: model.__name__)
def test_what_the_first_step_changes_beside_the_trace_ends_the_run(model):
    for outcome in rank_outcomes(difference, 2, model, timeout=60):
        assert REFUSED_IN_THE_FIRST_STEP[model] in outcome.failure


class _Evaluated(ReplacedBuffer):
    """Uses the mean and the count of training in its first layers of an evaluation."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def training_step(self, batch):
        x = self.body(batch[0], 0, 6)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        return self.loss(self.body(x - self.mean, 6) * self.calls, batch)

    def validation_step(self, batch):
        centered = batch[0] - self.mean
        return {"loss": self.loss(self.body(centered) * centered, batch) * self.calls}


def _evaluated():
    task = make(_Evaluated)
    strategy = PipelineStrategy(stages=2, device="cpu")
    training = Training(task, strategy).run(step_batches(_Evaluated, sizes=[4, 4], num_steps=2))
    batch = step_batches(_Evaluated, sizes=[4], num_steps=1, seed=9)[0].micro_batches[0]
    with torch.no_grad():
        found = strategy.evaluate(training.task.eval(), MicroBatch(batch.batch, 4), "validation_step").loss
    strategy.final_state_dict(task)
    strategy.teardown()
    return float(found - task.validation_step(batch.batch)["loss"])


def test_an_evaluation_uses_the_state_of_the_stage_that_changes_it():
    assert max(map(abs, run_ranks(_evaluated, 2))) <= BOUND


class _Replicated(Normalized):
    """Moves a mean, a teacher and a count with each replica's own samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def training_step(self, batch):
        loss = super().training_step((batch[0] - self.mean, batch[1]))
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        self.count += 1
        loss = loss + self.teacher(batch[0]).square().mean()
        with torch.no_grad():
            self.teacher.weight.lerp_(self.layers[7].weight, 0.1)
        return loss


def _with_replicas():
    strategy = PipelineStrategy(stages=2, replicas=2, device="cpu")
    training = Training(make(_Replicated), strategy)
    replica = strategy.comm.rank
    training.run(step_batches(_Replicated, sizes=[4] * 4, num_steps=3, replica=replica, num_replicas=2))
    strategy.final_state_dict(training.task)
    found = copy.deepcopy(training.task.state_dict())
    strategy.teardown()
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return found, None
    ddp = DDPStrategy(device="cpu", process_group=pair)
    training = Training(make(_Replicated), ddp)
    training.run(step_batches(_Replicated, sizes=[4] * 4, num_steps=3, replica=dist.get_rank(), num_replicas=2))
    return found, copy.deepcopy(training.task.state_dict())


def test_state_of_replicas_is_that_of_ddp():
    answers = run_ranks(_with_replicas, 4)
    expected = answers[0][1]

    assert all(largest_difference(found, expected) <= BOUND for found, _ in answers)
