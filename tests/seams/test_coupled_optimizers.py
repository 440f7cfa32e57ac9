"""Optimizers and step hooks that look at several parameters, where a stage has some of them."""

import pytest
import torch
from torch import nn
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.seams.training import BOUND, MAKE_STRATEGY, Layers, batches, difference, trained
from trainkit import Callback
from trainkit.errors import UserError


class Normalised(torch.optim.SGD):
    """SGD with the gradient of all parameters scaled to length 1."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class PerTensor(torch.optim.SGD):
    """SGD with each gradient clipped by its own norm."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    nn.utils.clip_grad_norm_([parameter], 0.1)
        return super().step(closure)


class WithNormalised(Layers):
    def configure_optimizers(self):
        return Normalised(self.parameters(), lr=0.1)


class WithHook(Layers):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(self.parameters(), 0.1))
        return optimizer


class WithPerTensor(Layers):
    def configure_optimizers(self):
        return PerTensor(self.parameters(), lr=0.1)


class CountingHook(Layers):
    """Its hook counts steps."""

    def configure_optimizers(self):
        optimizer = PerTensor(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(self.count)
        return optimizer

    def count(self, optimizer, args, kwargs):
        self.steps = getattr(self, "steps", 0) + 1


class HookInTheRun(Callback):
    """Registers a hook that clips, in the third step."""

    def on_step_end(self, run):
        if run.state.step == 2:
            optimizer = run.phase_optimizers[0].optimizer
            optimizer.register_step_pre_hook(clip)
        assert run.state.step < 3


def clip(optimizer, args, kwargs):
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


@pytest.mark.parametrize(
    ("make_task", "name"), [(WithNormalised, "Normalised"), (WithHook, r"the step hook WithHook\.configure_")]
)
def test_a_pipeline_refuses_an_optimizer_that_needs_all_gradients(make_task, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{name}.*strategy=pipeline.*max_grad_norm"):
        trained("pipeline", make_task())


def test_a_hook_that_needs_all_gradients_is_refused_in_the_step_in_which_it_comes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"the step hook clip.*strategy=pipeline"):
        trained("pipeline", Layers(), HookInTheRun())


@pytest.mark.parametrize("make_task", [WithPerTensor, CountingHook])
@pytest.mark.parametrize(
    "settings", [{"stages": 2}, {"stages": 1, "replicas": 2, "shard_optimizer": True}], ids=["stages", "shards"]
)
def test_a_pipeline_trains_with_an_optimizer_of_single_tensors(make_task, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = Layers()
    optimizer = PerTensor(task.parameters(), lr=0.1)
    for inputs, targets in batches():
        nn.functional.mse_loss(task(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    monkeypatch.setitem(MAKE_STRATEGY, "pipeline", lambda: PipelineStrategy(device="cpu", **settings))
    assert difference(trained("pipeline", make_task()), task.state_dict()) < BOUND
