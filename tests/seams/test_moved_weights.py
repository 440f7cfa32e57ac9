"""Strategies that move weights to other memory: tensors that share it are refused, and assigned values are kept."""

import pytest
import torch
from torch import nn

from tests.seams.training import BOUND, Layers, batches, difference, trained
from trainkit import Callback
from trainkit.errors import UserError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class TiedByMemory(Layers):
    name = r"b\.weight"

    def finish(self):
        self.b.weight.data = self.a.weight.data


class WithView(Layers):
    name = "row"

    def finish(self):
        self.row = self.a.weight.detach()[0]


class WithViewAsBuffer(Layers):
    name = "_buffers.shadow"

    def finish(self):
        self.register_buffer("shadow", self.a.weight.detach().t())


@pytest.mark.parametrize("make_task", [TiedByMemory, WithView, WithViewAsBuffer])
@pytest.mark.parametrize("strategy", ["fusion_sharded", "pipeline", "fsdp"])
def test_tensors_in_the_memory_of_a_moved_weight_are_refused(strategy, make_task):
    with pytest.raises(UserError, match=rf"{make_task.name} is in the memory of the parameter a\.weight"):
        trained(strategy, make_task())


def decay(task):
    for parameter in task.parameters():
        parameter.data = parameter.data * 0.9


class Decays(Callback):
    def on_step_end(self, run):
        with run.whole_task() as task:
            decay(task)


@pytest.mark.parametrize("strategy", ["ddp", "fusion_sharded", "fsdp", "pipeline"])
def test_data_that_a_callback_assigns_is_trained_on(strategy):
    task = Layers()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for inputs, targets in batches():
        nn.functional.mse_loss(task(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        decay(task)
    assert difference(trained(strategy, Layers(), Decays()), task.state_dict()) < BOUND
