"""`ddp` gives the weights of one device where gradients arrive in unusual ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.strategies.ddp.models import Checkpointed, SparseEmbedding
from tests.tasks import Fitting, fit, flat, seeded
from trainkit import Data
from trainkit.testing import run_ranks

SMALL_BUCKET_MB = 0.0003  # several buckets in each of these models


class Routed(nn.Module):
    """Each sample goes through one of three branches; which of them a rank uses changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 1) for _ in range(4))  # the last is used by nobody
        self.used: list[tuple[bool, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        stem, branch_of_sample = torch.tanh(self.stem(x)), (x[:, 0].abs() * 10).long() % 3
        self.used.append(tuple((branch_of_sample == choice).any().item() for choice in range(3)))
        outputs = torch.zeros(len(x), 1)
        for index, branch in enumerate(self.branches):
            rows = (branch_of_sample == index).nonzero().squeeze(1)
            if len(rows):
                outputs = outputs.index_copy(0, rows, branch(stem[rows]))
        return outputs


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "unused": (Routed, {}),
    "unused, found": (Routed, {"find_unused_parameters": "graph"}),
    "unused, overlapped": (Routed, {"optimizer_in_backward": True}),
    "unused, accumulated": (Routed, {"accumulate": 2}),
    "sparse": (lambda: SparseEmbedding(1), {}),
    "sparse, accumulated": (lambda: SparseEmbedding(1), {"accumulate": 2}),
    "checkpointed": (lambda: Checkpointed(1, reentrant=False, repeats=2), {}),
    "checkpointed, overlapped": (lambda: Checkpointed(1, reentrant=False, repeats=2), {"optimizer_in_backward": True}),
    "checkpointed, reentrant": (lambda: Checkpointed(1, reentrant=True), {}),
    "checkpointed twice, reentrant": (lambda: Checkpointed(1, reentrant=True, repeats=2), {"static_graph": True}),
}


def fitting(make: Any) -> Fitting:
    net = seeded(make)
    momentum = 0.0 if isinstance(net, SparseEmbedding) else 0.9  # torch's has none for sparse gradients
    return Fitting(net, lambda task: torch.optim.SGD(task.parameters(), lr=0.02, momentum=momentum))


def distances_to_single(folder: str) -> tuple[dict[str, float], list[Any]]:
    found, used = {}, []
    x = torch.randn(53, 8, generator=torch.Generator().manual_seed(1))
    data = Data(train=TensorDataset(x, x.sum(1, keepdim=True) / 8), batch_size=8)
    for name, (make, arguments) in CASES.items():
        alone, task = fitting(make), fitting(make)
        if dist.get_rank() == 0:
            single = SingleStrategy(device="cpu", accumulate=arguments.get("accumulate"))
            fit(single, alone, data, max_duration="8step", run_dir=f"{folder}/1 {name}")
        expected = flat(alone)
        dist.broadcast(expected, 0)
        ddp = DDPStrategy(device="cpu", bucket_cap_mb=SMALL_BUCKET_MB, **arguments)
        fit(ddp, task, data, max_duration="8step", run_dir=f"{folder}/ddp {name}")
        found[name] = (flat(task) - expected).abs().max().item()
        used += [task.net.used] if name == "unused" else []
    return found, used


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_are_those_of_one_device_in_any_order_of_gradients(num_ranks, tmp_path):
    # 53 samples in batches of 8 end with one of 5, the seventh; one step follows.
    outcomes = run_ranks(distances_to_single, num_ranks, str(tmp_path))
    for found, _ in outcomes:
        assert {name: distance for name, distance in found.items() if not distance < 1e-6} == {}
    histories = [tuple(used[0]) for _, used in outcomes]
    assert len(set(histories)) == num_ranks, "ranks use different branches"
    assert all(len(set(history)) > 1 for history in histories), "and so do steps"
