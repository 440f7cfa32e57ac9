"""Hooks on parameters and parametrizations in a pipeline: once for each micro-batch, as in one process."""

import pytest
import torch
from torch.nn.utils import parametrizations
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.seams.training import BATCH_SIZE, BOUND, MAKE_STRATEGY, Layers, batches, difference, trained
from trainkit import Callback
from trainkit.errors import UserError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def register(task):
    """Scale every gradient, before it is added to `.grad` and after."""
    for parameter in task.parameters():
        parameter.register_hook(scale)
        parameter.register_post_accumulate_grad_hook(shrink)


def scale(gradient):
    return gradient * 0.5


def shrink(parameter):
    parameter.grad.mul_(0.9)


class Register(Callback):
    """Registers the hooks once the task is divided."""

    def on_fit_start(self, run):
        register(run.task)


def plain_loop(task, micro_batches):
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    size = BATCH_SIZE // micro_batches
    for inputs, targets in batches():
        for batch in zip(inputs.split(size), targets.split(size), strict=True):
            (task.training_step(batch) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


def hooked():
    task = Layers()
    register(task)
    return task


def test_hooks_act_once_for_each_micro_batch():
    assert difference(trained("pipeline", Layers(), Register()), plain_loop(hooked(), 2)) < BOUND


@pytest.mark.parametrize("strategy", ["grid", "ddp"])
def test_hooks_that_are_registered_in_the_run_act_before_replicas_reduce(strategy, monkeypatch):
    settings = {"device": "cpu", "stages": 2, "replicas": 2, "accumulate": 1}
    monkeypatch.setitem(MAKE_STRATEGY, "grid", lambda: PipelineStrategy(**settings))
    assert difference(trained(strategy, Layers(), Register()), plain_loop(hooked(), 1)) < BOUND


class Tied(Layers):
    def build(self):
        self.b.weight = self.a.weight


def test_hooks_of_a_parameter_with_copies_in_several_stages_are_refused(monkeypatch):
    settings = {"device": "cpu", "stages": 2, "shared_parameters": "replicated", "split_points": ["b"]}
    monkeypatch.setitem(MAKE_STRATEGY, "copies", lambda: PipelineStrategy(**settings))
    with pytest.raises(UserError, match=r"a\.weight has hooks.*shared_parameters=same_stage"):
        trained("copies", Tied(), Register())


class Clipped(Tied):
    """Tied weights whose hook, which is not linear, needs the sum of both uses."""

    def finish(self):
        self.a.weight.register_post_accumulate_grad_hook(clip)


def clip(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def test_a_split_point_between_the_uses_of_a_parameter_with_a_hook_is_refused(monkeypatch):
    settings = {"device": "cpu", "stages": 2, "shared_parameters": "replicated", "split_points": ["b"], "accumulate": 1}
    monkeypatch.setitem(MAKE_STRATEGY, "copies", lambda: PipelineStrategy(**settings))
    with pytest.raises(UserError, match=r"a\.weight' has a hook on its gradient, which is the sum"):
        trained("copies", Clipped())


class Parametrized(Layers):
    """Each layer has another parametrization of torch."""

    def build(self):
        parametrizations.orthogonal(self.a)
        parametrizations.spectral_norm(self.b)
        parametrizations.weight_norm(self.c)


class WithHooks(Layers):
    def finish(self):
        for parameter in self.parameters():
            parameter.register_hook(scale)


@pytest.mark.parametrize("make_task", [Parametrized, WithHooks])
def test_stages_keep_parametrizations_and_hooks_of_the_constructor(make_task):
    assert difference(trained("pipeline", make_task()), plain_loop(make_task(), 2)) < BOUND
