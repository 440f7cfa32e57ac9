"""Tasks whose step changes state train as in one process, or are refused by name."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.pipeline.plan.planner import TrainingStep
from trainkit.strategies.pipeline.plan.schedules import Schedule
from trainkit.strategies.pipeline.run.staged_model import StagedModel
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.marks import EVERY_CASE
from tests.strategies.pipeline.training import Training, make, step_batches
from tests.strategies.pipeline.zoo import tasks
from tests.strategies.pipeline.zoo.comparison import (
    difference,
    differences,
    largest_difference,
    places,
    refusal,
    spread,
)
from tests.strategies.pipeline.zoo.state import (
    REFUSED_AT_A_CUT,
    CounterInTheMiddle,
    HiddenTensor,
    LossAverage,
    Normalized,
    ReplacedBuffer,
    TeacherMovedLast,
    TeacherThroughData,
)
from trainkit.data.batch import MicroBatch
from trainkit.errors import UserError
from trainkit.task import has_phases
from trainkit.testing import rank_outcomes, run_ranks

BOUND = 1e-9
ONE_OF_EACH_KIND = [
    *("ReplacedLater", "SwappedBuffers", "HiddenTensor", "CounterInTheMiddle", "CounterInModule", "LossAverage"),
    *("PointerElsewhere", "TeacherThroughData", "Clamped", "Normalized", "ExtraState", "CountedPhases", "Adversarial"),
    *("a mask that is passed on", "packed sequences", "a generator of numpy", "a changed argument"),
]
CHAINS = tasks.in_chains([name for name in tasks.PIECES if name in tasks.EQUAL])
_WARNS = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
OF_ONE_STEP = [name for name in tasks.EQUAL if name not in tasks.IN_PHASES]
WHOLE = [name for name in OF_ONE_STEP if name in tasks.SMALL and name not in tasks.PIECES]


# ---- Cuts, with all stages in this process


def _four_stages(graph):
    return [spread(places(graph), 3)]


def _every_cut(graph):
    return [[place] for place in places(graph)]


def _every_cut_at_once(graph):
    return [places(graph)]


def _some_cuts(graph):
    return [[place] for place in spread(places(graph), 3)] + _four_stages(graph)


def test_the_zoo_has_120_tasks_of_which_nine_of_ten_are_accepted():
    assert len(tasks.TASKS) >= 120
    assert len(tasks.EQUAL) >= 0.9 * len(tasks.TASKS)


def test_the_tasks_in_phases_are_known():
    assert {name for name in tasks.EQUAL if has_phases(make(tasks.TASKS[name]))} == tasks.IN_PHASES


@pytest.mark.slow
@_WARNS
@pytest.mark.parametrize("name", CHAINS)
def test_pieces_one_behind_the_other_train_in_four_stages_as_in_one(name):
    found = differences(tasks.find(name), _four_stages, num_steps=1)

    assert {cuts: value for cuts, value in found.items() if not value <= BOUND} == {}


@_WARNS
@pytest.mark.parametrize("name", WHOLE)
def test_tasks_train_in_four_stages_as_in_one(name):
    found = differences(tasks.TASKS[name], _four_stages, num_steps=1)

    assert {cuts: value for cuts, value in found.items() if not value <= BOUND} == {}


@_WARNS
@pytest.mark.parametrize(
    "name", ["nested Functions", "a module that calls a Function by a name bound before", "custom_op"]
)
def test_no_stage_begins_inside_a_call_with_a_backward_of_its_own(name):
    found = differences(tasks.TASKS[name], _every_cut, num_steps=1)

    assert {cuts: value for cuts, value in found.items() if not value <= BOUND} == {}


@pytest.mark.slow
@_WARNS
@pytest.mark.parametrize("name", tasks.in_chains([name for name in OF_ONE_STEP if name in tasks.SMALL]))
def test_a_stage_may_begin_at_every_place(name):
    found = differences(tasks.find(name), _every_cut if EVERY_CASE else _every_cut_at_once)

    assert found
    assert {cuts: value for cuts, value in found.items() if not value <= BOUND} == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", tasks.OF_LIBRARY if EVERY_CASE else tasks.OF_LIBRARY[::4])
def test_models_of_transformers_are_the_same_in_four_stages(name):
    found = differences(tasks.LIBRARY[name], _some_cuts if EVERY_CASE else _four_stages)

    assert {cuts: value for cuts, value in found.items() if not value <= BOUND} == {}


@_WARNS
@pytest.mark.parametrize("name", tasks.REFUSED)
def test_what_cannot_be_followed_is_refused_before_training(name):
    task = tasks.TASKS[name]
    with pytest.raises(UserError, match=tasks.REFUSED[name]):
        _plan(task)


@pytest.mark.parametrize("name", tasks.REFUSED_LATER)
def test_what_one_batch_alone_shows_is_refused_there(name):
    message = refusal(tasks.TASKS[name], _four_stages)

    assert message is not None
    assert re.search(tasks.REFUSED_LATER[name], message)


# ---- Ranks


def _differences(cases):
    return {f"{name} {settings}": difference(tasks.TASKS[name], **settings) for name, settings in cases}


def _too_large(num_ranks, cases, *, timeout=600):
    found = run_ranks(_differences, num_ranks, cases, timeout=timeout)
    assert len(found[0]) == len(cases)
    return {name: value for rank in found for name, value in rank.items() if not value <= BOUND}


@pytest.mark.slow
def test_one_task_of_each_kind_has_the_state_of_one_process_on_every_rank():
    assert _too_large(2, [(name, {"num_steps": 3}) for name in ONE_OF_EACH_KIND]) == {}


@pytest.mark.slow
def test_several_stages_of_a_rank_keep_their_own_attributes():
    names = [
        *("ReplacedLater", "SwappedBuffers", "CounterInTheMiddle", "HiddenTensor", "HookRegisteredOnce"),
        *("CountedInBytes", "BatchWritten", "PenaltiesOfModules"),
        "a generator of Python",
    ]

    assert _too_large(2, [(name, {"num_steps": 3, "schedule": "interleaved_1f1b"}) for name in names]) == {}


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
    batch = step_batches(task, sizes=[4], num_steps=1)[0].micro_batches[0].batch
    steps = {"training_step": TrainingStep(task.training_step)}
    model_of_stages.plan = model_of_stages.make_plan(task, steps, batch, torch.device("cpu"))
    return task


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


def test_what_the_first_step_changes_beside_the_trace_ends_the_run_on_every_rank():
    for outcome in rank_outcomes(_differences, 2, [("WrittenThroughNumpy", {})], timeout=600):
        assert "the first step changed 'seen', which the traced step did not" in outcome.failure


class _HookedTogether(ReplacedBuffer):
    """Counts backwards by a hook on two tensors, which torch does not accept from placeholders."""

    def training_step(self, batch):
        first = self.body(batch[0], 0, 1)
        second = self.body(first, 1, 2)
        torch.autograd.graph.register_multi_grad_hook([first, second], lambda gradients: None)
        return self.loss(self.body(second, 2), batch)


def test_an_error_of_the_steps_own_code_in_a_stage_names_the_placeholders():
    of_the_step = r"\nAssertionError.*\nThe step's own code raised this. In a pipeline it has placeholders"
    failures = [outcome.failure for outcome in rank_outcomes(_trained_in_stages, 2, timeout=600)]
    assert [bool(re.search(of_the_step, failure)) for failure in failures].count(True) == 1


def _trained_in_stages():
    difference(_HookedTogether, split_points=["layers.4"])


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
        # Of weights: what replicas keep of their own samples is refused.
        self.mean = 0.9 * self.mean + 0.1 * self.layers[0].weight.detach().mean(0)
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


@pytest.mark.slow
def test_state_of_replicas_is_that_of_ddp():
    answers = run_ranks(_with_replicas, 4)
    expected = answers[0][1]

    assert all(largest_difference(found, expected) <= BOUND for found, _ in answers)
