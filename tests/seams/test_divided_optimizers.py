"""Optimizers and step hooks that look at several parameters, where an optimizer is stepped for parts of them."""

import pytest
import torch
from torch import nn
from trainkit.strategies.ddp.strategy import DDPStrategy

from tests.seams.training import BOUND, MAKE_STRATEGY, Layers, batches, difference, trained
from trainkit import Callback
from trainkit.errors import UserError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    in_backward = {"device": "cpu", "devices": 2, "optimizer_in_backward": True}
    monkeypatch.setitem(MAKE_STRATEGY, "in_backward", lambda: DDPStrategy(**in_backward))


def clip(optimizer, args, kwargs):
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


class WithHook(Layers):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(clip)
        return optimizer


class Normalised(torch.optim.SGD):
    def step(self, closure=None):
        clip(self, (), {})
        return super().step(closure)


class WithNormalised(Layers):
    def configure_optimizers(self):
        return Normalised(self.parameters(), lr=0.1)


class Counting(Layers):
    """Its hook counts the steps, of which there is one for each batch."""

    calls = 0

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, optimizer, args, kwargs):
        self.calls += 1


class RegisterHook(Callback):
    """Registers a hook of the optimizer's steps after the second step."""

    def __init__(self, hook):
        self.hook = hook

    def on_step_end(self, run):
        if run.state.step == 2:
            run.phase_optimizers[0].optimizer.register_step_pre_hook(self.hook)
        assert run.state.step < 3 or self.hook is not clip


def scale(optimizer, args, kwargs):
    """Halve each gradient: the same for a part of the parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


@pytest.mark.parametrize("strategy", ["fusion_sharded", "in_backward"])
def test_a_hook_that_needs_all_gradients_is_refused_where_the_optimizer_is_divided(strategy):
    with pytest.raises(UserError, match=r"step hook clip.*several parameters.*max_grad_norm"):
        trained(strategy, WithHook())


@pytest.mark.parametrize("strategy", ["fusion_sharded", "in_backward"])
def test_such_a_hook_is_refused_in_the_step_in_which_it_comes(strategy):
    with pytest.raises(UserError, match=r"step hook clip.*several parameters"):
        trained(strategy, Layers(), RegisterHook(clip))


def test_an_optimizer_that_needs_all_gradients_is_refused_in_backward():
    with pytest.raises(UserError, match=r"Normalised may use several parameters.*optimizer_in_backward=true"):
        trained("in_backward", WithNormalised())


def test_a_hook_of_single_tensors_that_comes_during_the_run_is_called_once_a_step():
    task = Layers()
    optimizer = task.configure_optimizers()
    for step, batch in enumerate(batches(), start=1):
        task.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.register_step_pre_hook(scale)
    assert difference(trained("fusion_sharded", Layers(), RegisterHook(scale)), task.state_dict()) < BOUND
