"""Weights in a callback: `run.whole_task()` has all values, and its changes reach every rank."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainkit.strategies.pipeline.run.absent import AbsentTensors
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.seams.training import BOUND, MAKE_STRATEGY, Layers, batches, difference, trained
from trainkit import Callback
from trainkit.errors import UserError

WHOLE = ("single", "ddp", "fsdp", "pipeline")
"""Strategies under which the callbacks below have the weights of the plain loop."""


@pytest.fixture(autouse=True)
def _last_layer_on_the_last_stage(monkeypatch):
    # An automatic partition follows measured times, and may leave the last stage the loss alone.
    make = partial(PipelineStrategy, device="cpu", stages=2, accumulate=2, split_points=["c"])
    monkeypatch.setitem(MAKE_STRATEGY, "pipeline", make)


def plain_loop(after_step, start=lambda task: None):
    """Train in a plain loop, and call `after_step` with the task and the number of steps after each of them."""
    task = Layers()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    start(task)
    for step, (inputs, targets) in enumerate(batches(), start=1):
        nn.functional.mse_loss(task(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(task, step)
    return {name: tensor.clone() for name, tensor in task.state_dict().items()}


class AfterStep(Callback):
    """Calls `change` with the whole task after every step."""

    def on_fit_start(self, run):
        with run.whole_task() as task:
            self.start(task)

    def on_step_end(self, run):
        with run.whole_task() as task:
            self.change(task, run.state.step)

    def start(self, task):
        pass


class Clip(AfterStep):
    """Keeps every weight in an interval."""

    def change(self, task, step):
        with torch.no_grad():
            for parameter in task.parameters():
                parameter.clamp_(-0.2, 0.2)


class Shrink(AfterStep):
    """Assigns to `.data`, as old code does."""

    def change(self, task, step):
        for parameter in task.parameters():
            parameter.data = parameter.data * 0.9


class Teacher(AfterStep):
    """Pulls the weights to their moving average, by torch's AveragedModel."""

    def start(self, task):
        self.average = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def change(self, task, step):
        self.average.update_parameters(task)
        if step % 2 == 0:
            task.load_state_dict(self.average.module.state_dict())


class Lookahead(AfterStep):
    """Goes half of the way back to the slow weights."""

    def start(self, task):
        self.slow = {name: parameter.detach().clone() for name, parameter in task.named_parameters()}

    def change(self, task, step):
        with torch.no_grad():
            for name, parameter in task.named_parameters():
                self.slow[name] += 0.5 * (parameter - self.slow[name])
                parameter.copy_(self.slow[name])


class Prune(AfterStep):
    """Sets the smallest weights of each layer to zero."""

    def change(self, task, step):
        for layer in (task.a, task.b, task.c):
            prune.l1_unstructured(layer, "weight", amount=0.3)
            prune.remove(layer, "weight")


class KeepBest(AfterStep):
    """Goes back to the copy with the smallest norm."""

    def start(self, task):
        self.best = float("inf"), copy.deepcopy(task.state_dict())

    def change(self, task, step):
        norm = sum(float(parameter.detach().norm()) for parameter in task.parameters())
        if norm < self.best[0]:
            self.best = norm, copy.deepcopy(task.state_dict())
        else:
            task.load_state_dict(self.best[1])


class Reset(AfterStep):
    """Initializes the last layer again, by random numbers."""

    def change(self, task, step):
        if step == 3:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(step)
                task.c.reset_parameters()


@pytest.mark.parametrize("strategy", WHOLE)
@pytest.mark.parametrize(
    "kinds", [(Clip, Shrink, Teacher, Lookahead, KeepBest, Reset), (Prune,)], ids=["in place", "pruned"]
)
def test_callbacks_that_change_weights_have_those_of_a_plain_loop(strategy, kinds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = [kind() for kind in kinds]

    def change(task, step):
        for callback in callbacks:
            callback.change(task, step)

    reference = plain_loop(change, lambda task: [callback.start(task) for callback in callbacks])
    assert difference(trained(strategy, Layers(), *[kind() for kind in kinds]), reference) < BOUND


class MainRankAlone(AfterStep):
    """Changes the weights on rank 0 only."""

    def on_step_end(self, run):
        with run.whole_task() as task, torch.no_grad():
            for parameter in task.parameters():
                parameter.mul_(0.9 if run.is_main else 100.0)


def shrink(task, step):
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.mul_(0.9)


@pytest.mark.parametrize("strategy", [name for name in WHOLE if name != "ddp"])
def test_what_rank_0_leaves_is_what_every_rank_trains_on(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert difference(trained(strategy, Layers(), MainRankAlone()), plain_loop(shrink)) < BOUND


def test_replicas_of_stages_have_the_values_of_rank_0(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MAKE_STRATEGY, "grid", lambda: PipelineStrategy(device="cpu", stages=2, replicas=2))
    assert difference(trained("grid", Layers(), MainRankAlone()), plain_loop(shrink)) < BOUND


def assign_data(task):
    task.c.weight.data = task.c.weight.data * 0.9


def copy_in_place(task):
    with torch.no_grad():
        task.c.weight.copy_(torch.zeros(1, 8))


WAYS = {
    "a norm": lambda task: float(task.c.weight.detach().norm()),
    "an item": lambda task: task.c.bias.item(),
    "an element": lambda task: task.c.weight[0],
    "arithmetic": lambda task: 2.0 * task.c.weight,
    "data": lambda task: task.c.weight.data,
    "data assigned": assign_data,
    "in place": copy_in_place,
    "state_dict": lambda task: task.state_dict(),
    "deepcopy": copy.deepcopy,
    "foreach": lambda task: torch._foreach_norm(list(task.parameters())),
    "vector": lambda task: nn.utils.parameters_to_vector(task.parameters()),
    "forward": lambda task: task(torch.zeros(1, 8, dtype=torch.float64)),
    "gradient": lambda task: setattr(task.c.weight, "grad", torch.zeros(1, 8)),
    "conversion": lambda task: task.double(),
}


class Touches(Callback):
    """Touches the weights of the last layer in every way, without `whole_task`, on the rank that does not hold it."""

    def on_step_end(self, run):
        for how, touch in WAYS.items():
            if run.is_main:
                with pytest.raises(
                    UserError, match=r"run\.task\.c\.\w+ is on stage 1.*with run\.whole_task\(\) as task"
                ):
                    touch(run.task)
                    raise AssertionError(how)


def test_touching_a_parameter_of_another_stage_names_it_and_whole_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reference = plain_loop(lambda task, step: None)
    assert difference(trained("pipeline", Layers(), Touches()), reference) < BOUND


class AsksForMetadata(Callback):
    """Uses what every stage knows of every parameter."""

    def on_step_end(self, run):
        names = {parameter: name for name, parameter in run.task.named_parameters()}
        assert names[run.task.c.weight] == "c.weight" and run.task.c.weight in set(run.task.parameters())
        for parameter in run.task.parameters():
            assert parameter.dtype == torch.float64 and parameter.requires_grad and parameter.grad is None
            assert parameter.numel() == parameter.shape.numel() and parameter.device.type == "cpu"
            assert torch.zeros_like(parameter).shape == parameter.shape and isinstance(parameter, nn.Parameter)


def test_what_a_step_leaves_on_another_stage_may_be_an_absent_tensor_itself():
    absent, table = AbsentTensors(), torch.zeros(2)
    absent.add({"table": "run.task.table is on stage 0"}, {"table": table})
    for left in (torch.zeros(2), table, torch.zeros(2), torch.zeros(2)):
        hidden = absent.hide("run.task.last is on stage 0", "last", left)
        with pytest.raises(UserError, match="is on stage 0"):
            hidden.sum()


def test_names_shapes_and_types_of_all_stages_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reference = plain_loop(lambda task, step: None)
    assert difference(trained("pipeline", Layers(), AsksForMetadata()), reference) < BOUND


class KeepsLoss(Layers):
    """A task whose step leaves a tensor of the last stage in an attribute, and one in a buffer."""

    def build(self):
        self.last_loss = torch.zeros(())
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.last_loss = loss.detach()
        self.average = self.average * 0.5 + loss.detach()
        return loss


class ReadsAttributes(Callback):
    """Reads on the first stage what the last one has left, in the context and outside of it."""

    def on_step_end(self, run):
        if run.is_main:
            for name in ("last_loss", "average"):
                with pytest.raises(UserError, match=rf"run\.task\.{name} is on stage 1"):
                    getattr(run.task, name).item()
        with run.whole_task() as task:
            assert task.last_loss.item() > 0 and task.average.item() > 0


def test_attributes_that_another_stage_assigns_are_read_in_the_whole_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # One micro-batch: what several of them leave in a buffer is not what one process leaves.
    whole = partial(PipelineStrategy, device="cpu", stages=2, accumulate=1, split_points=["c"])
    monkeypatch.setitem(MAKE_STRATEGY, "pipeline", whole)
    assert trained("pipeline", KeepsLoss(), ReadsAttributes())["average"] > 0


class Replaces(Callback):
    """Replaces a parameter in the whole task."""

    def on_step_end(self, run):
        with run.whole_task() as task:
            task.c.weight = nn.Parameter(task.c.weight.detach().clone())


def test_a_parameter_that_is_replaced_in_the_whole_task_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"replaced 'c\.weight'"):
        trained("pipeline", Layers(), Replaces())
