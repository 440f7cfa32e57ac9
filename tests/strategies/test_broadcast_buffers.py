"""BroadcastBuffers: the tensors that are broadcast for a module's buffers."""

from __future__ import annotations

import torch
from torch import nn
from trainkit.strategies.multiprocess import BroadcastBuffers


def module() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].register_buffer("mean", torch.zeros(3))
    net[0].register_buffer("later", None)
    net[1].register_buffer("cache", torch.zeros(4))
    return net


def test_the_tensor_that_replaced_a_buffer_is_broadcast():
    net = module()
    shared = BroadcastBuffers(net)
    net[0].mean = net[0].mean + 1.0
    assert [tensor is buffer for tensor, buffer in zip(shared.now(), net.buffers(), strict=True)] == [True, True]


def test_shapes_stay_when_a_buffer_grows_is_removed_or_is_added():
    net = module()
    mean, cache = net.buffers()
    shared = BroadcastBuffers(net)
    net[0].mean, net[0].later, net[1].cache = None, torch.zeros(1), torch.zeros(9)
    assert [tensor is before for tensor, before in zip(shared.now(), (mean, cache), strict=True)] == [True, True]
    net[1].cache = torch.ones(4)
    assert shared.now()[1] is net[1].cache


def test_only_shared_buffers_are_broadcast():
    net = module()
    assert BroadcastBuffers(net, is_shared=lambda name: name == "1.cache").now() == [net[1].cache]
