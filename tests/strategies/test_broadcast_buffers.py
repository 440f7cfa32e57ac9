"""Which tensors stand for a task's buffers when these are sent."""

from __future__ import annotations

import torch
from torch import nn
from trainkit.strategies.multiprocess import BroadcastBuffers


def module() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made[0].register_buffer("mean", torch.zeros(3))
    made[0].register_buffer("later", None)
    made[1].register_buffer("cache", torch.zeros(4))
    return made


def test_a_tensor_that_took_a_buffers_place_is_sent():
    made = module()
    shared = BroadcastBuffers(made)
    made[0].mean = made[0].mean + 1.0
    assert [tensor is buffer for tensor, buffer in zip(shared.now(), made.buffers(), strict=True)] == [True, True]


def test_messages_keep_their_shapes_when_a_buffer_grows_goes_or_comes():
    made = module()
    mean, cache = made.buffers()
    shared = BroadcastBuffers(made)
    made[0].mean, made[0].later, made[1].cache = None, torch.zeros(1), torch.zeros(9)
    assert [tensor is before for tensor, before in zip(shared.now(), (mean, cache), strict=True)] == [True, True]
    made[1].cache = torch.ones(4)
    assert shared.now()[1] is made[1].cache


def test_only_those_that_are_shared_are_sent():
    made = module()
    assert BroadcastBuffers(made, is_shared=lambda name: name == "1.cache").now() == [made[1].cache]
