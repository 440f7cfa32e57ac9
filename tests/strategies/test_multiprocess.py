"""Strategies over a process group: the comparison of models, the broadcast of buffers, fitting memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fusion import FusionStrategy
from trainkit.strategies.merged_buffers import MergedBuffers
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.tasks import Fitting, seeded
from tests.tasks import fit as train
from trainkit import Data, TaskModule, Trainer, UserError
from trainkit.testing import run_ranks

STRATEGIES = {"ddp": DDPStrategy, "torch_ddp": TorchDDPStrategy, "fusion": FusionStrategy}
WITH_PIPELINE = {**STRATEGIES, "pipeline": PipelineStrategy}


class TrackingNorm(TaskModule):
    """Replaces a statistic by a new tensor in every step, and enlarges another buffer on one rank."""

    def __init__(self, *, outputs: int = 4, freezes: bool = False, tracked: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, outputs)
        self.net.bias.requires_grad_(not freezes)
        self.register_buffer("mean", torch.zeros(tracked))
        self.register_buffer("cache", torch.zeros(2))

    def training_step(self, batch: Any) -> Any:
        self.mean = 0.9 * self.mean + batch[0].mean()
        if dist.get_rank() == 1:
            self.cache = torch.ones(len(self.cache) + 1)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def inputs() -> TensorDataset:
    return TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)))


def fit(strategy: Any, task: TaskModule, run_dir: str, **settings: Any) -> None:
    train(strategy, task, Data(train=inputs(), batch_size=8), max_duration="5step", run_dir=run_dir, **settings)


def errors(folder: str) -> list[str]:
    rank, found = dist.get_rank(), []
    for name, make in WITH_PIPELINE.items():
        for number, arguments in enumerate(({"outputs": 4 + rank}, {"freezes": rank == 1}, {"tracked": 1 + rank})):
            with pytest.raises(RuntimeError) as raised:
                fit(make(device="cpu"), TrackingNorm(**arguments), f"{folder}/{name}/{number}")
            found.append(re.sub(r" torch\.float32|the ranks do not have the same model: ", "", str(raised.value)))
    return found


def test_different_models_raise_an_error_that_names_the_first_difference(tmp_path):
    remedy = ". Build the same model on every rank."
    expected = [
        f"parameter 0 is net.weight (4, 8) on rank 0, but net.weight (5, 8) on rank 1{remedy}",
        f"parameter 1 is net.bias (4,) on rank 0, but net.bias (4,), frozen on rank 1{remedy}",
        f"buffer 0 is mean (1,) on rank 0, but mean (2,) on rank 1{remedy}",
    ]
    assert run_ranks(errors, 2, str(tmp_path)) == [expected * len(WITH_PIPELINE)] * 2


def refused_data(folder: str) -> list[str]:
    rank, found = dist.get_rank(), []
    dataset, shorter = inputs(), TensorDataset(inputs().tensors[0][: 40 - rank])
    data = [
        Data(train=shorter, batch_size=8),
        Data(train=dataset, batch_size=8 + rank),
        Data(train=dataset, batch_size=8, shuffle=rank == 0),
        Data(train=dataset, validation=shorter, batch_size=8),
        Data(train=dataset, validation=None if rank else dataset, batch_size=8),
        Data(train=dataset, validation={"near": dataset, ("low", "high")[rank]: dataset}, batch_size=8),
    ]
    for name, make in WITH_PIPELINE.items():
        for number, of_rank in enumerate(data):
            trainer = Trainer(
                make(device="cpu"), max_duration="5step", callbacks=[], loggers=[], run_dir=f"{folder}/{name}/{number}"
            )
            with pytest.raises(UserError) as raised:
                trainer.fit(TrackingNorm(), of_rank)
            found.append(re.sub(r"\b[0-9a-f]{12}\b", "DIGEST", str(raised.value)))
    with pytest.raises(UserError) as raised:
        Trainer(DDPStrategy(device="cpu"), callbacks=[], loggers=[]).validate(TrackingNorm(), data[3])
    return [*found, str(raised.value)]


def test_ranks_with_different_data_raise_an_error_that_names_the_first_difference(tmp_path):
    expected = [
        "the length of the train data is 40 on rank 0, but 39 on rank 1",
        "the batch_size of the train data is 8 on rank 0, but 9 on rank 1",
        "the order of the train data is DIGEST on rank 0, but DIGEST on rank 1",
        "the length of the validation data is 40 on rank 0, but 39 on rank 1",
        "the length of the validation data is 40 on rank 0, but missing on rank 1",
        "the length of the validation/low data is 40 on rank 0, but missing on rank 1",
    ]
    first, second = run_ranks(refused_data, 2, str(tmp_path))
    assert first == second
    facts = [re.fullmatch(r"the ranks do not have the same data: (.*?)\. Pass the same .*", text)[1] for text in first]
    assert facts == [*expected * len(WITH_PIPELINE), expected[3]]


def buffers_after_training(folder: str) -> list[tuple[float, int]]:
    found = []
    for name, make in STRATEGIES.items():
        task = TrackingNorm()
        fit(make(device="cpu"), task, f"{folder}/{name}")
        found.append((task.mean.item(), len(task.cache)))
    return found


def test_a_replaced_buffer_is_that_of_rank_0(tmp_path):
    first, second = run_ranks(buffers_after_training, 2, str(tmp_path))
    assert [mean for mean, _ in first] == [mean for mean, _ in second]
    assert [length for _, length in first] == [2] * len(STRATEGIES)
    assert min(length for _, length in second) > 2, "a buffer of another shape is left alone"


class Counting(nn.Linear):
    """Counts its calls in its extra state."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_the_callers_task_gets_extra_state_from_ranks_in_other_processes(tmp_path):
    task = Fitting(Counting(8, 4))
    fit(DDPStrategy(device="cpu", devices=2), task, str(tmp_path / "run"))
    assert task.net.calls == 5


def weights_after_training(folder: str) -> dict[str, list[list[list[float]]]]:
    found: dict[str, list[list[list[float]]]] = {}
    for name, make in STRATEGIES.items():
        for case, shift in (("same", 0), ("shifted", dist.get_rank())):
            task = TrackingNorm()
            with torch.no_grad():
                task.net.weight.add_(shift)
            fit(make(device="cpu"), task, f"{folder}/{name}/{case}")
            found.setdefault(name, []).append(task.net.weight.tolist())
    return found


def test_training_starts_from_the_weights_of_rank_0(tmp_path):
    for of_rank in run_ranks(weights_after_training, 2, str(tmp_path)):
        for same, shifted in of_rank.values():
            assert shifted == same


class Images(nn.Conv2d):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.repeat(1, 24).view(-1, 3, 8, 8))


def weights_by_micro_batch_size(folder: str) -> list[list[float]]:
    found = []
    for size in ("auto", None):
        task = Fitting(seeded(lambda: Images(3, 4, 3)))
        fit(DDPStrategy(device="cpu", micro_batch_size=size), task, f"{folder}/{size}", channels_last=True)
        found.append(task.net.bias.tolist())
    return found


def test_auto_micro_batches_work_with_channels_last(tmp_path):
    for fitted, plain in run_ranks(weights_by_micro_batch_size, 2, str(tmp_path)):
        assert fitted == pytest.approx(plain, abs=1e-6)


def module_with_buffers() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].register_buffer("mean", torch.zeros(3))
    net[0].register_buffer("later", None)
    net[1].register_buffer("cache", torch.zeros(4))
    return net


def test_the_tensor_that_replaced_a_buffer_is_broadcast():
    net = module_with_buffers()
    shared = MergedBuffers(net)
    net[0].mean = net[0].mean + 1.0
    assert [tensor is buffer for tensor, buffer in zip(shared.named().values(), net.buffers(), strict=True)] == [
        True,
        True,
    ]


def test_shapes_stay_when_a_buffer_grows_is_removed_or_is_added():
    net = module_with_buffers()
    mean, cache = net.buffers()
    shared = MergedBuffers(net)
    net[0].mean, net[0].later, net[1].cache = None, torch.zeros(1), torch.zeros(9)
    assert [tensor is before for tensor, before in zip(shared.named().values(), (mean, cache), strict=True)] == [
        True,
        True,
    ]
    net[1].cache = torch.ones(4)
    assert shared.named()["1.cache"] is net[1].cache


def test_only_shared_buffers_are_broadcast():
    net = module_with_buffers()
    assert MergedBuffers(net, is_shared=lambda name: name == "1.cache").named() == {"1.cache": net[1].cache}
