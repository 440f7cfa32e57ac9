"""The drop-in and the strategy with compiled modules: the weights of eager ones, and no warnings."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy, DistributedDataParallel

from tests.tasks import Fitting, fit, flat
from trainkit import Data
from trainkit.testing import run_ranks

STEPS = 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def trained(wrapped: nn.Module, *, compile_wrapper: bool) -> Tensor:
    if compile_wrapper:
        wrapped = torch.compile(wrapped, backend="aot_eager")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(wrapped)


def drop_in_compiled(static_graph: bool) -> tuple[list[float], list[str]]:
    """Return distances to stock DDP of the module compiled inside, block by block and around, and warnings."""
    arguments = {"static_graph": static_graph, "bucket_cap_mb": 0.0005}
    expected = trained(StockDDP(net()), compile_wrapper=False)
    inside, blocks = net(), net()
    inside.compile(backend="aot_eager")
    for block in blocks:
        block.compile(backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [
            trained(DistributedDataParallel(inside, **arguments), compile_wrapper=False),
            trained(DistributedDataParallel(blocks, **arguments), compile_wrapper=False),
            trained(DistributedDataParallel(net(), **arguments), compile_wrapper=True),
        ]
    distances = [(one - expected).abs().max().item() for one in found]
    return distances, [f"{w.filename}:{w.lineno} {w.category.__name__}: {w.message}" for w in caught]


def static_or_not() -> list[tuple[list[float], list[str]]]:
    found = []
    for static_graph in (False, True):
        torch.compiler.reset()
        found.append(drop_in_compiled(static_graph))
    return found


@pytest.mark.slow
def test_a_compiled_module_in_the_drop_in_has_the_weights_of_stock_ddp():
    for found in run_ranks(static_or_not, 2):
        for distances, caught in found:
            assert max(distances) < 1e-6
            assert caught == []


def strategy_compiled(folder: str) -> tuple[float, list[str]]:
    eager, compiled = Fitting(net()), Fitting(net())
    compiled.net.compile(backend="aot_eager")
    data = Data(train=TensorDataset(torch.randn(30, 8, generator=torch.Generator().manual_seed(0))), batch_size=12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for task in (eager, compiled):
            strategy = DDPStrategy(device="cpu", accumulate=2)
            fit(strategy, task, data, max_duration="2epoch", run_dir=f"{folder}/{id(task)}")
    return (flat(eager) - flat(compiled)).abs().max().item(), [str(w.message) for w in caught]


@pytest.mark.slow
def test_a_compiled_task_has_the_weights_of_an_eager_one(tmp_path):
    for distance, caught in run_ranks(strategy_compiled, 2, str(tmp_path)):
        assert distance < 1e-6
        assert caught == []
