"""An optimizer that steps one bucket at a time."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from trainkit.strategies.ddp.strategy import BucketwiseOptimizer


def test_a_bucket_is_stepped_alone_and_by_the_settings_of_its_groups():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    groups = [{"params": parameters[:2], "lr": 1.0}, {"params": parameters[2:], "lr": 10.0}]
    optimizer = torch.optim.SGD(groups)
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    entries = [SimpleNamespace(parameter=parameter) for parameter in (*parameters[1:3], nn.Parameter(torch.zeros(1)))]
    BucketwiseOptimizer(optimizer).step(SimpleNamespace(index=0, entries=entries))
    assert [parameter.item() for parameter in parameters] == [0.0, -1.0, -10.0, 0.0]
    assert [group["params"] for group in optimizer.param_groups] == [parameters[:2], parameters[2:]]
