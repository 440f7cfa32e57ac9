"""The drop-in against PyTorch's own DistributedDataParallel."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as StockDDP
from trainkit.strategies.ddp import DistributedDataParallel

from trainkit.testing import run_ranks

_spec = importlib.util.spec_from_file_location("ddp_test_models", Path(__file__).with_name("models.py"))
models = sys.modules.setdefault("ddp_test_models", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(models)

STEPS = 50


def differences(names, transport, steps):
    """Train each case with both; return the largest difference to stock, and between ranks, of any weight."""
    found = {}
    for name in names:
        case = models.CASES[name]
        torch.manual_seed(0)
        ours = case.make()
        stock = copy.deepcopy(ours)
        rank = dist.get_rank()
        wrapped = DistributedDataParallel(ours, bucket_cap_mb=0.001, transport=transport, **case.arguments)
        wrapped.reducer.plan  # noqa: B018 - exists before the first step
        models.train(wrapped, case=case, rank=rank, steps=steps)
        models.train(StockDDP(stock, bucket_cap_mb=0.001, **case.arguments), case=case, rank=rank, steps=steps)
        to_stock = max(
            (a - b).abs().max().item()
            for a, b in zip(ours.state_dict().values(), stock.state_dict().values())
            if a.is_floating_point()
        )
        flat = torch.cat([p.detach().double().reshape(-1) for p in ours.parameters()])
        others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(others, flat)
        found[name] = (to_stock, max((other - flat).abs().max().item() for other in others))
    return found


@pytest.mark.parametrize("transport", ["group", "shared_memory"])
def test_weights_after_50_steps_are_those_of_stock_ddp_bit_for_bit_on_two_ranks(transport):
    for rank in run_ranks(differences, 2, list(models.CASES), transport, STEPS, timeout=120):
        assert rank == {name: (0.0, 0.0) for name in models.CASES}


@pytest.mark.slow
def test_weights_after_50_steps_are_those_of_stock_ddp_on_three_ranks():
    for rank in run_ranks(differences, 3, list(models.CASES), "auto", STEPS, timeout=150):
        for name, (to_stock, between_ranks) in rank.items():
            assert to_stock <= 2e-6, name
            assert between_ranks == 0.0, name
