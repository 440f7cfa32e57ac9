"""The harness: an ordinary task has the weights of the plain loop under every strategy."""

import pytest
import torch
from torch import nn

from tests.seams.training import BOUND, EVERY, Layers, batches, difference, trained


def plain_loop():
    task = Layers()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for inputs, targets in batches():
        nn.functional.mse_loss(task(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


@pytest.mark.parametrize("strategy", EVERY)
def test_an_ordinary_task_has_the_weights_of_a_plain_loop(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert difference(trained(strategy, Layers()), plain_loop()) < BOUND
