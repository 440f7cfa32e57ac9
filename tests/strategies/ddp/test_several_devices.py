"""`ddp` with a task on several devices of each rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy

from tests.marks import gpus, on_gpu
from tests.tasks import StopAt
from trainkit import Data, TaskModule, Trainer
from trainkit.errors import UserError
from trainkit.optim.precision import Precision

BATCH_SIZE, STEPS, LIMIT = 6, 5, 0.5
INPUTS = torch.randn(BATCH_SIZE * STEPS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Halves(TaskModule):
    """The first half on one device, the second on another; returns weights, and counts its steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
            self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.second.register_buffer("steps", torch.zeros(()))
        self.double()

    def place_on(self, devices: list[torch.device]) -> None:
        self.first.to(devices[0])
        self.second.to(devices[1])

    def training_step(self, batch: list[Tensor]) -> object:
        (inputs,) = batch
        if self.training:
            self.second.steps += 1
        outputs = self.second(self.first(inputs).to(self.second[0].weight.device)).squeeze(1)
        weights = (1.0 + (inputs[:, 0] > 0)).to(outputs)
        losses = (outputs - inputs.sum(1).to(outputs)).square()
        return {"loss": (losses * weights).sum() / weights.sum(), "weight": weights.sum()}

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class WithoutPlaces(Halves):
    place_on = TaskModule.place_on


class Forgetful(Halves):
    def place_on(self, devices: list[torch.device]) -> None:
        self.first.to(devices[0])


def fit(strategy, task, run_dir, *callbacks, resume=None):
    data = Data(train=TensorDataset(INPUTS), validation=TensorDataset(INPUTS[:5]), batch_size=BATCH_SIZE, shuffle=False)
    settings = {"max_duration": "1epoch", "loggers": [], "max_grad_norm": LIMIT}
    Trainer(strategy, callbacks=[Checkpoint(), *callbacks], run_dir=run_dir, **settings).fit(task, data, resume=resume)


@pytest.fixture(scope="module")
def expected():
    """Return the weights of a plain loop on the CPU."""
    task = Halves()
    optimizer = task.configure_optimizers()
    for inputs in INPUTS.split(BATCH_SIZE):
        optimizer.zero_grad()
        task.training_step([inputs])["loss"].backward()
        nn.utils.clip_grad_norm_(task.parameters(), LIMIT)
        optimizer.step()
    return task.state_dict()


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cpu"},
        pytest.param({"device": "cuda", "devices": 1}, marks=gpus(2)),
        pytest.param({"device": "cuda", "backend": "gloo"}, marks=gpus(2)),
        pytest.param({"device": "cuda"}, marks=gpus(4)),
    ],
    ids=["CPU", "one NCCL rank", "two gloo ranks on the same devices", "two NCCL ranks"],
)
def test_a_task_on_two_devices_of_each_rank_has_the_weights_of_a_plain_loop_also_resumed(settings, expected, tmp_path):
    strategies = [DDPStrategy(**{"devices": 2, "devices_per_rank": 2, **settings}) for _ in range(2)]
    fit(strategies[0], Halves(), tmp_path, StopAt(3))
    task = Halves()
    fit(strategies[1], task, tmp_path, resume="auto")
    for name, value in task.state_dict().items():
        assert (value.cpu() - expected[name]).abs().max() < 1e-9, name


def test_a_task_that_does_not_place_its_parts_is_refused():
    with pytest.raises(UserError, match=r"define WithoutPlaces.place_on\(self, devices\), or set strategy.devices_per"):
        DDPStrategy(devices=2, device="cpu", devices_per_rank=2).validate(WithoutPlaces(), Precision())


def test_more_devices_than_there_are_are_refused(monkeypatch):
    monkeypatch.setattr("trainkit.strategies.multiprocess.pick", lambda name: torch.device("cuda"))
    monkeypatch.setattr("trainkit.strategies.multiprocess.count", lambda kind: 3)
    monkeypatch.setattr("trainkit.strategies.multiprocess.has_streams", lambda device: True)
    strategy = DDPStrategy(devices=2, device="cuda", devices_per_rank=2)
    with pytest.raises(UserError, match=r"devices=2 with 2 devices each, but torch sees 3 .* set strategy.devices=1,"):
        strategy.validate(Halves(), Precision())
    assert DDPStrategy(device="cuda", devices_per_rank=2).num_ranks() == 1


@partial(on_gpu, devices=2)
def test_a_part_that_is_left_in_host_memory_is_named(tmp_path):
    with pytest.raises(UserError, match=r"place_on has left second.0.weight on cpu; move it to .*: cuda:0, cuda:1"):
        fit(DDPStrategy(device="cuda", devices=1, devices_per_rank=2), Forgetful(), tmp_path)
