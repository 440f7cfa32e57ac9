"""Several optimizers as one: schedules, checkpoints, and the weights under every strategy."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fsdp.sharded_muon import assign_owners
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.marks import needs_muon
from tests.tasks import EachStep, Regression, StopAt, assert_same_bits, fit, regression_data, weights
from trainkit import Callback, Data, TaskModule
from trainkit.errors import UserError
from trainkit.optim.chained_optimizer import ChainedOptimizer
from trainkit.testing import run_ranks


def muon_and_adamw(task: nn.Module) -> Any:
    matrices = [parameter for parameter in task.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in task.parameters() if parameter.dim() != 2]
    optimizer = ChainedOptimizer(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2))
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def muon(task: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in task.parameters() if parameter.dim() == 2], lr=0.02)


def sgd_and_adamw(task: nn.Module) -> ChainedOptimizer:
    first = torch.optim.SGD(task.network[0].parameters(), lr=0.1, momentum=0.9)
    return ChainedOptimizer(first, torch.optim.AdamW(task.network[3].parameters(), lr=0.1))


def task() -> TaskModule:
    return Regression(muon_and_adamw, hidden=8)


def trained(strategy: Any, folder: str, resume: Any = None, **settings: Any) -> TaskModule:
    one = task()
    data = Data(train=regression_data(32, dtype=torch.float64), batch_size=8)
    fit(strategy, one, data, run_dir=folder, resume=resume, precision="fp64", report=False, **settings)
    return one


def distances(folder: str, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each strategy's weights to those of one device."""
    strategies = {
        "ddp": DDPStrategy(device="cpu"),
        "optimizer_in_backward": DDPStrategy(device="cpu", optimizer_in_backward=True),
        "fusion": FusionStrategy(device="cpu", shard_optimizer=False),
        "pipeline": PipelineStrategy(device="cpu"),
    }
    found = {}
    for name, strategy in strategies.items():
        together = trained(strategy, f"{folder}/{name}")
        found[name] = max((own - expected[key]).abs().max().item() for key, own in weights(together).items())
    return found


@needs_muon
def test_muon_for_matrices_and_adamw_for_the_rest_have_the_weights_of_a_loop_by_hand(tmp_path):
    expected = task().double()
    matrices = [parameter for parameter in expected.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in expected.parameters() if parameter.dim() != 2]
    first, second = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)
    batch = regression_data(8, dtype=torch.float64).tensors
    for step in range(3):
        for optimizer, rate in ((first, 0.02), (second, 1e-2)):
            optimizer.param_groups[0]["lr"] = rate * (1 / (1 + step))
        expected.zero_grad()
        expected.training_step(batch).backward()
        first.step()
        second.step()
    actual = task()
    data = Data(train=regression_data(8, dtype=torch.float64), batch_size=8, shuffle=False)
    settings = {"max_duration": "3step", "precision": "fp64", "report": False, "run_dir": tmp_path}
    fit(SingleStrategy(device="cpu"), actual, data, **settings)
    assert_same_bits(actual, expected)


@needs_muon
def test_it_trains_to_the_weights_of_one_device_where_optimizers_are_not_sharded(tmp_path):
    alone = trained(SingleStrategy(device="cpu"), str(tmp_path / "alone"))
    for found in run_ranks(distances, 2, str(tmp_path), weights(alone), timeout=150):
        assert found.keys() == {"ddp", "optimizer_in_backward", "fusion", "pipeline"}
        assert all(distance < 1e-9 for distance in found.values()), found


@needs_muon
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path):
    whole = trained(SingleStrategy(device="cpu"), str(tmp_path / "whole"))
    trained(SingleStrategy(device="cpu"), str(tmp_path / "stopped"), callbacks=[StopAt(2)])
    resumed = trained(SingleStrategy(device="cpu"), None, resume=tmp_path / "stopped")
    assert_same_bits(resumed, whole)


class Wide(Regression):
    """Has a matrix of one row, of which most ranks have none, and one that is not used."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, hidden=8)
        self.unused = nn.Parameter(torch.ones(3, 5))


class Save(Callback):
    """Saves at the end, by shards where there are any."""

    def on_fit_end(self, run: Any) -> None:
        run.checkpointer.save(reason="test", sharded=run.strategy.shards_parameters)


SHARDED: dict[str, tuple[Any, dict[str, Any]]] = {  # the optimizer, and settings of the Trainer
    "Muon and AdamW": (muon_and_adamw, {"max_grad_norm": 0.05}),
    "Muon": (muon, {"on_nonfinite": "skip"}),
    "SGD and AdamW": (sgd_and_adamw, {}),
}


def wide(strategy: Any, name: str, folder: Any, **settings: Any) -> dict[str, torch.Tensor]:
    """Return the weights after training with one of the optimizers, or after going on with a run."""
    optimizer, always = SHARDED[name]
    one, resume = Wide(optimizer), settings.pop("resume", False)
    data = Data(train=regression_data(30, dtype=torch.float64), batch_size=8)  # 6 in the last batch
    settings = {"max_duration": "8step", "precision": "fp64", "report": False, **always, **settings}
    run_dir = f"{folder}/{name}"
    fit(strategy, one, data, run_dir=run_dir, resume=run_dir if resume else None, **settings)
    return weights(one)


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((own - others[key]).abs().max().item() for key, own in some.items())


def distances_of_sharded(folder: str, expected: dict[str, Any], stop: int, replicate: int = 1) -> list[float]:
    """Go on under `fsdp` until after a step; return the distances to the weights of one device there."""
    found = []
    for name, by_step in expected.items():
        strategy = FSDPStrategy(device="cpu", units=["Linear"], replicate=replicate)
        ours = wide(strategy, name, folder, resume=True, max_duration=f"{stop}step", callbacks=[Save()])
        found.append(distance(ours, by_step[stop - 1]))
    if replicate == 1:
        whole, name = FusionStrategy(device="cpu", shard_optimizer=True), "SGD and AdamW"
        ours = wide(whole, name, f"{folder}/fusion {stop}", max_duration=f"{stop}step")
        found.append(distance(ours, expected[name][stop - 1]))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, torch.Tensor]]]:
    """The weights after each step on one device, with each optimizer."""
    folder, found = tmp_path_factory.mktemp("alone"), {}
    for name in SHARDED:
        seen = EachStep(lambda run: weights(run.task))
        wide(SingleStrategy(device="cpu"), name, folder, callbacks=[seen])
        found[name] = seen.seen
    return found


@needs_muon
@pytest.mark.slow
def test_a_run_with_shards_of_matrices_goes_on_under_other_numbers_of_ranks(alone, tmp_path):
    for name in SHARDED:
        wide(SingleStrategy(device="cpu"), name, tmp_path, max_duration="1step", callbacks=[Save()])
    for num_ranks, stop in ((3, 2), (2, 3)):
        for found in run_ranks(distances_of_sharded, num_ranks, str(tmp_path), alone, stop, timeout=150):
            assert max(found) < 1e-9, found
    for name, expected in alone.items():
        assert list((tmp_path / name / "checkpoints").glob("*.shards/*"))
        resumed = wide(SingleStrategy(device="cpu"), name, tmp_path, resume=True)
        assert distance(resumed, expected[7]) < 1e-9, name


@needs_muon
@pytest.mark.slow
def test_each_group_of_ranks_has_its_own_owners_of_matrices(alone, tmp_path):
    for name in SHARDED:
        wide(SingleStrategy(device="cpu"), name, tmp_path, max_duration="1step", callbacks=[Save()])
    for stop in (2, 3):
        for found in run_ranks(distances_of_sharded, 4, str(tmp_path), alone, stop, 2, timeout=150):
            assert max(found) < 1e-9, found


def test_matrices_are_divided_over_their_owners_by_elements():
    assert assign_owners([6, 3, 2, 2], 2) == [0, 1, 1, 1]
    assert assign_owners([1, 1, 8, 1, 4], 3) == [2, 2, 0, 2, 1]
    assert assign_owners([5, 5], 1) == [0, 0]


@needs_muon
def test_muon_is_refused_with_shards_on_the_host():
    refused = task()
    strategy = FSDPStrategy(device="cpu", offload="cpu")
    with pytest.raises(UserError, match=r"strategy\.offload=cpu does not support Muon"):
        strategy.prepare_optimizer(refused, SimpleNamespace(optimizer=muon(refused)))


@needs_muon
def test_fusion_refuses_to_shard_what_needs_full_matrices(make_trainer):
    for optimizer in (muon, muon_and_adamw):
        refused = Regression(optimizer, hidden=8)
        strategy = FusionStrategy(device="cpu", shard_optimizer=True)
        with pytest.raises(UserError, match=r"Muon may need full parameters; use .*strategy=fsdp shards Muon"):
            make_trainer(strategy).fit(refused, Data(train=regression_data(8), batch_size=4))


def test_parameters_without_weight_decay_stay_with_their_optimizer(make_trainer):
    def both(task: nn.Module) -> ChainedOptimizer:
        first = torch.optim.SGD(task.network[0].parameters(), lr=0.1, weight_decay=0.1)
        return ChainedOptimizer(first, torch.optim.AdamW(task.network[3].parameters(), lr=0.1))

    one, seen = Regression(both, hidden=8), {}

    class See(StopAt):
        def on_step_end(self, run):
            super().on_step_end(run)
            groups = run.phase_optimizer.optimizer.param_groups
            seen.update({(group["optimizer"], group["weight_decay"]): len(group["params"]) for group in groups})

    make_trainer(no_weight_decay=["bias"], callbacks=[See(2)]).fit(one, Data(train=regression_data(8), batch_size=4))
    assert seen == {(0, 0.1): 1, (0, 0.0): 1, (1, 0.01): 1, (1, 0.0): 1}
