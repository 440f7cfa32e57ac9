"""Several optimizers as one: schedules, checkpoints, and the weights under every strategy."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Regression, StopAt, assert_same_bits, regression_data, weights
from trainkit import Data, TaskModule, Trainer
from trainkit.errors import UserError
from trainkit.optim.chained_optimizer import ChainedOptimizer
from trainkit.testing import run_ranks


def muon_and_adamw(task: nn.Module) -> Any:
    matrices = [parameter for parameter in task.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in task.parameters() if parameter.dim() != 2]
    optimizer = ChainedOptimizer(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2))
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def muon(task: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in task.parameters() if parameter.dim() == 2])


def task() -> TaskModule:
    return Regression(muon_and_adamw, hidden=8)


def trained(strategy: Any, folder: str, **settings: Any) -> tuple[TaskModule, Trainer]:
    one = task()
    data = Data(train=regression_data(32, dtype=torch.float64), batch_size=8)
    defaults: dict[str, Any] = {"precision": "fp64", "callbacks": [], "loggers": [], "report": False}
    trainer = Trainer(strategy, run_dir=folder, **{**defaults, **settings})
    trainer.fit(one, data)
    return one, trainer


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
        together = trained(strategy, f"{folder}/{name}")[0]
        found[name] = max((own - expected[key]).abs().max().item() for key, own in weights(together).items())
    return found


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
    Trainer(
        SingleStrategy(device="cpu"),
        precision="fp64",
        max_duration="3step",
        callbacks=[],
        loggers=[],
        report=False,
        run_dir=tmp_path,
    ).fit(actual, data)
    assert_same_bits(actual, expected)


def test_it_trains_to_the_weights_of_one_device_where_optimizers_are_not_sharded(tmp_path):
    alone, _ = trained(SingleStrategy(device="cpu"), str(tmp_path / "alone"))
    for found in run_ranks(distances, 2, str(tmp_path), weights(alone), timeout=150):
        assert found.keys() == {"ddp", "optimizer_in_backward", "fusion", "pipeline"}
        assert all(distance < 1e-9 for distance in found.values()), found


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path):
    whole, _ = trained(SingleStrategy(device="cpu"), str(tmp_path / "whole"))
    _, stopped = trained(SingleStrategy(device="cpu"), str(tmp_path / "stopped"), callbacks=[StopAt(2)])
    resumed = task()
    trainer = Trainer(SingleStrategy(device="cpu"), precision="fp64", callbacks=[], loggers=[], report=False)
    trainer.fit(resumed, Data(train=regression_data(32, dtype=torch.float64), batch_size=8), resume=stopped.run_dir)
    assert_same_bits(resumed, whole)


@pytest.mark.parametrize("strategy", [FSDPStrategy, lambda device: FusionStrategy(device=device, shard_optimizer=True)])
@pytest.mark.parametrize("optimizer", ["ChainedOptimizer", "Muon"])
def test_strategies_that_shard_the_optimizer_refuse_what_needs_full_matrices(make_trainer, strategy, optimizer):
    refused = Regression(muon_and_adamw, hidden=8)
    if optimizer == "Muon":
        refused = Regression(muon, hidden=8)
    with pytest.raises(UserError, match=rf"{optimizer} may need full parameters; use one of SGD"):
        make_trainer(strategy(device="cpu")).fit(refused, Data(train=regression_data(8), batch_size=4))


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
