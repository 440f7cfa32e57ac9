"""The Reducer on CUDA devices: streams, nccl with one process, gloo with two processes on one device."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy, DistributedDataParallel
from trainkit.strategies.reducer.grad_norm import total_norm
from trainkit.strategies.reducer.reducer import Reducer, ReducerSettings
from trainkit.strategies.single import SingleStrategy

from tests.marks import gpus, on_gpu
from trainkit import Data, TaskModule, Trainer
from trainkit.testing import run_ranks

pytestmark = gpus()


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
    for distance in run_ranks(distance_to_stock, num_ranks, backend, side_stream):
        assert distance < 1e-6


RANKS = pytest.mark.parametrize(("backend", "num_ranks"), [("nccl", 1), ("gloo", 2)])


class Regression(TaskModule):
    """Counts some samples twice; one layer is never used."""

    def __init__(self, *, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.unused = nn.Linear(2, 2)
        self.weighted = weighted

    def training_step(self, batch: list[Tensor]) -> object:
        errors = (self.net(batch[0]).squeeze(1) - batch[0].sum(1)).square()
        counts = 1 + (batch[0][:, 0] > 0)
        return (
            {"loss": (errors * counts).sum() / counts.sum(), "weight": counts.sum()} if self.weighted else errors.mean()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


CASES: dict[str, tuple[bool, dict[str, object], dict[str, object]]] = {
    # weighted, arguments of the strategy, of the Trainer
    "plain": (False, {}, {}),
    "weighted, accumulated": (True, {"accumulate": 2}, {}),
    "clipped": (False, {"bucket_cap_mb": 0.0002}, {"max_grad_norm": 0.5}),
    "clipped in fp64": (False, {}, {"max_grad_norm": 0.5, "precision": "fp64"}),
    "found": (False, {"find_unused_parameters": "graph"}, {}),
    "overlapped": (False, {"optimizer_in_backward": True, "bucket_cap_mb": 0.0002}, {}),
    "static": (False, {"static_graph": True}, {}),
    "bf16": (False, {"reduce_dtype": "bf16"}, {}),
    "hooked": (False, {"comm_hook": default_hooks.allreduce_hook}, {}),
}


def distances_to_single(backend: str, folder: str) -> dict[str, float]:
    # In the last step one of two ranks has no samples, and has to learn which parameters the other one has used.
    x = torch.randn(49, 8, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, (weighted, arguments, settings) in CASES.items():
        group = dist.new_group(backend=backend)
        own = {key: value for key, value in arguments.items() if key == "accumulate"}
        tasks = []
        for strategy in (
            SingleStrategy(device="cuda", **own),
            DDPStrategy(device="cuda", process_group=group, **arguments),
        ):
            tasks.append(Regression(weighted=weighted))
            run_dir = f"{folder}/{type(strategy).__name__} {name} {dist.get_rank()}"
            trainer = Trainer(strategy, max_duration="3epoch", callbacks=[], loggers=[], run_dir=run_dir, **settings)
            trainer.fit(tasks[-1], Data(train=TensorDataset(x), batch_size=12))
        pairs = zip(*(task.parameters() for task in tasks), strict=True)
        found[name] = max((a.cpu() - b.cpu()).abs().max().item() for a, b in pairs)
    return found


@RANKS
def test_weights_of_the_strategy_are_those_of_one_gpu(backend, num_ranks, tmp_path):
    for rank in run_ranks(distances_to_single, num_ranks, backend, str(tmp_path), timeout=300):
        for name, distance in rank.items():
            assert distance < (2e-2 if "bf16" in name else 1e-4), name


def steps_that_may_not_wait() -> None:
    """With nccl a step only gives the GPU work: `error` raises at the first call that waits for it."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    settings = ReducerSettings(average=False, bucket_cap_mb=0.01, find_unused_parameters="auto")
    reducer = Reducer(list(model.named_parameters()), group=dist.new_group(backend="nccl"), settings=settings)
    x = torch.randn(8, 64, device="cuda")
    for step in range(6):
        if step == 3:  # the first ones make the buckets and the communicator
            torch.cuda.set_sync_debug_mode("error")
        with reducer.session():
            model(x).square().mean().backward()
        reducer.gradient_norm()
        model.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    reducer.close()


def test_no_step_waits_for_the_gpu():
    run_ranks(steps_that_may_not_wait, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_of_all_types_are_those_of_the_cpu(dtype):
    gradient = torch.randn(1000, dtype=dtype)
    found = total_norm([gradient.cuda()], torch.device("cuda"))
    assert found.item() == pytest.approx(gradient.double().norm().item(), rel=1e-3)


class Towers(nn.Module):
    """Two towers on two devices, whose gradients arrive on two threads at once; `spare` takes no part in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("left", "right", "spare"):
            setattr(self, name, nn.Sequential(*(nn.Linear(6, 6) for _ in range(8))))
        self.double()

    def place(self, devices: list[torch.device]) -> Towers:
        self.left.to(devices[0]), self.right.to(devices[1]), self.spare.to(devices[1])
        return self

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        first, second = self.left[0].weight.device, self.right[0].weight.device
        towers = self.left(x.to(first)).tanh() + self.right(x.to(second)).tanh().to(first)
        return towers + self.spare(x.to(second)).to(first) if spare else towers


SPARE = [True, False, True, True]
ROWS = torch.randn(len(SPARE), 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def towers_of_two_devices(backend: str, arguments: dict[str, object], spares: list[bool]) -> list[Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = 2 * rank if backend == "nccl" else 0  # NCCL refuses two ranks on one device
    model = Towers().place([torch.device("cuda", first), torch.device("cuda", first + 1)])
    wrapped = DistributedDataParallel(model, process_group=dist.new_group(backend=backend), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ExitStack() as streams:  # of which forward and backward run
        for device in (first, first + 1):
            torch.cuda.synchronize(device)  # the values of the module
            streams.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        for x, spare in zip(ROWS, spares, strict=True):
            optimizer.zero_grad()
            wrapped(x[rank::world_size], spare).square().mean().backward()
            optimizer.step()
    torch.cuda.synchronize(first), torch.cuda.synchronize(first + 1)
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("arguments", "spares"),
    [
        ({}, [True] * 4),
        ({"bucket_cap_mb": 0.0003, "gradient_as_bucket_view": True}, [True] * 4),
        ({"bucket_cap_mb": 0.0003, "find_unused_parameters": True}, SPARE),
    ],
    ids=["copied", "views", "unused"],
)
@pytest.mark.parametrize(("backend", "num_ranks"), [("nccl", 1), ("nccl", 2), ("gloo", 2)])
def test_a_module_on_two_devices_of_each_rank_has_the_weights_of_a_plain_loop(backend, num_ranks, arguments, spares):
    needed = 4 if (backend, num_ranks) == ("nccl", 2) else 2
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")
    plain = Towers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for x, spare in zip(ROWS, spares, strict=True):
        optimizer.zero_grad()
        plain(x, spare).square().mean().backward()
        optimizer.step()
    for weights in run_ranks(towers_of_two_devices, num_ranks, backend, arguments, spares, timeout=120):
        for weight, expected in zip(weights, plain.parameters(), strict=True):
            assert (weight - expected).abs().max() < 1e-9


def towers_on_other_devices() -> str:
    devices = [torch.device("cuda", index) for index in (0, 1)]
    model = Towers().place(devices if dist.get_rank() else [devices[0], devices[0]])
    with pytest.raises(RuntimeError, match="do not have the same model") as error:
        DistributedDataParallel(model, process_group=dist.new_group(backend="gloo"))
    return str(error.value)


@partial(on_gpu, devices=2)
def test_ranks_that_place_a_module_otherwise_are_refused():
    for message in run_ranks(towers_on_other_devices, 2):
        assert (
            "right.0.weight (6, 6) torch.float64 on rank 0, but right.0.weight (6, 6) torch.float64 on device 1"
            in message
        )
