"""Modules that the constructor put into evaluation mode stay in it, also after an evaluation."""

import pytest
import torch
from torch import nn

from tests.seams.training import BATCH_SIZE, BOUND, WIDTH, Layers, batches, difference, samples, trained
from trainkit import Data


class FrozenBackbone(Layers):
    def build(self):
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.a.requires_grad_(False).eval()

    def configure_optimizers(self):
        return torch.optim.SGD([*self.b.parameters(), *self.c.parameters()], lr=0.1)


class Adapter(nn.Linear):
    """Merges its low-rank weights in evaluation mode, as public adapters do in `train`."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += -self.low.weight.data if mode else self.low.weight.data
            self.is_merged = not mode
        return self

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs if self.is_merged else outputs + self.low(inputs)


class WithAdapter(Layers):
    def build(self):
        self.a = Adapter()


def plain_loop(make_task=FrozenBackbone):
    task = make_task()
    optimizer = task.configure_optimizers()
    for inputs, targets in batches():
        nn.functional.mse_loss(task(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp", "pipeline"])
def test_a_frozen_backbone_stays_in_evaluation_mode(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Data(train=samples(), validation=samples(), batch_size=BATCH_SIZE, shuffle=False)
    weights = trained(strategy, FrozenBackbone(), data=data, evaluate_every="2step", num_sanity_batches=1)
    assert difference(weights, plain_loop()) < BOUND


def test_modules_that_change_their_weights_with_the_mode_change_them_back_after_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Data(train=samples(), validation=samples(), batch_size=BATCH_SIZE, shuffle=False)
    weights = trained("single", WithAdapter(), data=data, evaluate_every="2step")
    assert difference(weights, plain_loop(WithAdapter)) < BOUND


def test_a_task_that_was_evaluated_as_a_whole_trains_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = Layers().eval()
    trained("single", task)
    assert all(module.training for module in task.modules())
