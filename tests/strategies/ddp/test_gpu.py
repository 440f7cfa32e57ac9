"""The Reducer on CUDA devices: streams, nccl with one process, gloo with two processes on one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP
from trainkit.strategies.ddp import DistributedDataParallel

from trainkit.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def distance_to_stock(backend: str, side_stream: bool) -> float:
    group = dist.new_group(backend=backend)
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    stock = copy.deepcopy(ours)
    arguments = {"process_group": group, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    for wrapped in (DistributedDataParallel(ours, **arguments), StockDDP(stock, **arguments)):
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(10):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x = torch.randn(8, 64, generator=generator).cuda()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return max((a - b).abs().max().item() for a, b in zip(ours.parameters(), stock.parameters(), strict=True))


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize(("backend", "num_ranks"), [("nccl", 1), ("gloo", 2)])
def test_weights_on_cuda_are_those_of_stock_ddp(backend, num_ranks, side_stream):
    for distance in run_ranks(distance_to_stock, num_ranks, backend, side_stream, timeout=120):
        assert distance < 1e-6
