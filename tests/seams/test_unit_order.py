"""Ranks that would exchange values of different units or parameters: refused by name, before they do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.seams.training import BOUND, MAKE_STRATEGY, Layers, batches, difference, trained
from trainkit.errors import UserError


@pytest.fixture(autouse=True)
def in_units(tmp_path, monkeypatch):
    """Every linear layer is a unit, unless a test sets `fsdp` itself."""
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, ("Linear",))


def use(monkeypatch, units):
    monkeypatch.setitem(MAKE_STRATEGY, "fsdp", lambda: FSDPStrategy(device="cpu", devices=2, units=list(units)))


class Branching(Layers):
    """From a step on ranks do not do the same."""

    first_step = 1
    width = 8

    def build(self):
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.steps = 0

    def training_step(self, batch):
        self.steps += 1
        differs = self.steps >= self.first_step and dist.is_initialized() and dist.get_rank() == 1
        return self.loss(batch, differs)

    def loss(self, batch, differs):
        inputs, targets = batch
        return nn.functional.mse_loss(self(self.experts[int(differs)](inputs)), targets)


class BranchingLater(Branching):
    first_step = 4


class UnequalExperts(Branching):
    def build(self):
        super().build()
        self.experts[1] = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


class Unconnected(Branching):
    """The loss of one rank does not depend on the model."""

    first_step = 2

    def loss(self, batch, differs):
        loss = super().loss(batch, False)
        return torch.zeros((), dtype=torch.float64, requires_grad=True) if differs else loss


class ConnectedToHalf(Branching):
    """The loss of one rank does not depend on the first layers."""

    first_step = 3

    def loss(self, batch, differs):
        inputs, targets = batch
        hidden = self.experts[0](torch.tanh(self.a(inputs)))
        return nn.functional.mse_loss(self.c(hidden.detach() if differs else hidden), targets)


class RunsMore(Branching):
    """One rank runs a layer at the end of its forward."""

    first_step = 3

    def loss(self, batch, differs):
        loss = super().loss(batch, False)
        return loss + self.experts[1](batch[0]).square().mean() if differs else loss


without_aborts = pytest.mark.skipif(torch.__version__ < (2, 9), reason="gloo of torch 2.8 aborts the process")


@pytest.mark.parametrize(
    ("make_task", "units", "message"),
    [
        (Branching, ("Linear",), "the forward of experts.0"),
        (
            BranchingLater,
            ("Linear",),
            "rank 1 is at the forward of experts.1, where another rank is at the forward of e",
        ),
        (Branching, (), r"ranks used different parameters in step 0.*experts\.0\.weight has a gradient"),
        *(
            # gloo aborts the process there.
            pytest.param(
                make_task, (), message, marks=pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch 2.8")
            )
            for make_task, message in (
                (UnequalExperts, r"the reduction of \d+ elements"),
                (Unconnected, "rank 1 is at the end, where another rank is at the reduction of"),
            )
        ),
        *(
            pytest.param(make_task, ("Linear",), message, marks=pytest.mark.slow)
            for make_task, message in (
                (RunsMore, "rank 1 is at the forward of experts.1, where another rank is at the backward of"),
                (Unconnected, "rank 1 is at the end, where another rank is at the backward of"),
                (ConnectedToHalf, "rank 1 is at the end, where another rank is at the backward of"),
            )
        ),
    ],
)
def test_ranks_that_run_different_units_are_named(make_task, units, message, monkeypatch):
    use(monkeypatch, units)
    with pytest.raises(UserError, match=f"{message}.*strategy=ddp"):
        trained("fsdp", make_task())


class UnconnectedWithoutOthers(Unconnected):
    """No other parameter is unused."""

    def build(self):
        super().build()
        del self.experts[1]


class UnconnectedLater(Unconnected):
    """The loss of one rank does not depend on the model in the last micro-batch of a step."""

    first_step = 4


@pytest.mark.parametrize(
    ("make_task", "settings", "remedy"),
    [
        (UnconnectedWithoutOthers, {}, "strategy.find_unused_parameters=true"),
        (UnconnectedLater, {"accumulate": 2, "find_unused_parameters": True}, "Set strategy=ddp."),
    ],
)
def test_torch_ddp_refuses_a_loss_that_depends_on_other_parameters_than_those_of_other_ranks(
    make_task, settings, remedy, monkeypatch
):
    monkeypatch.setitem(MAKE_STRATEGY, "torch_ddp", lambda: TorchDDPStrategy(device="cpu", devices=2, **settings))
    with pytest.raises(UserError, match=f"the loss of rank 1 does not depend on the parameter a.weight.*{remedy}"):
        trained("torch_ddp", make_task())


@pytest.mark.parametrize(
    ("strategy", "settings"), [(DDPStrategy, {}), (TorchDDPStrategy, {"find_unused_parameters": True})]
)
def test_the_strategies_that_are_advised_train_it(strategy, settings, monkeypatch):
    monkeypatch.setitem(MAKE_STRATEGY, "advised", lambda: strategy(device="cpu", devices=2, **settings))
    task = ConnectedToHalf()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for step, (inputs, targets) in enumerate(batches(), start=1):
        halves = [(inputs[rank::2], targets[rank::2]) for rank in range(2)]
        sum(0.5 * task.loss(half, rank == 1 and step >= 3) for rank, half in enumerate(halves)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(trained("advised", ConnectedToHalf()), task.state_dict()) < BOUND


class Alternating(Layers):
    """All ranks leave out the same layers in some steps, and run one twice."""

    def build(self):
        self.steps = -1

    def training_step(self, batch):
        self.steps += 1
        inputs, targets = batch
        return nn.functional.mse_loss(forward(self, inputs, self.steps), targets)


def forward(task, inputs, step):
    hidden = torch.tanh(task.a(inputs))
    for _ in range((1, 1, 0, 2, 1, 0)[step]):
        hidden = torch.tanh(task.b(hidden))
    return task.c(hidden)


def test_an_order_that_changes_on_all_ranks_alike_trains():
    task = Layers()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for step, (inputs, targets) in enumerate(batches()):
        nn.functional.mse_loss(forward(task, inputs, step), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(trained("fsdp", Alternating()), task.state_dict()) < BOUND
