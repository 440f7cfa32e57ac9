"""LBFGS: the weights of a loop by hand, the same under every strategy that does not shard, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from trainkit.callbacks.learning_rate_finder import LearningRateFinder
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.dp import DataParallelStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.tasks import (
    EachStep,
    Regression,
    StopAt,
    WeightedRegression,
    assert_same_bits,
    regression_data,
    seeded,
    weighted_data,
    weights,
)
from tests.tasks import fit as train
from trainkit import Data, Phase, TaskModule, UserError
from trainkit.optim.chained_optimizer import ChainedOptimizer
from trainkit.testing import run_ranks
from trainkit.trainer import FitResult

LINE_SEARCHES = [None, "strong_wolfe"]


def lbfgs(line_search: str | None) -> Any:
    def make(task: nn.Module) -> Any:
        optimizer = torch.optim.LBFGS(task.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)
        return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))

    return make


def fit(task: TaskModule, run_dir: Any, strategy: Any = None, *, data: Any = None, **settings: Any) -> FitResult:
    samples = data or regression_data(28, dtype=torch.float64)  # 8 in the last batch
    settings = {"precision": "fp64", "report": False, **settings}
    data = Data(train=samples, batch_size=10, shuffle=False)
    return train(strategy or SingleStrategy(device="cpu"), task, data, run_dir=run_dir, **settings)


@pytest.mark.parametrize("line_search", LINE_SEARCHES)
def test_weights_are_those_of_a_loop_by_hand(line_search, tmp_path):
    actual, expected = Regression(lbfgs(line_search), hidden=8), Regression(lbfgs(line_search), hidden=8).double()
    fit(actual, tmp_path, max_duration="2epoch")
    optimizer, schedule = expected.configure_optimizers()
    inputs, targets = regression_data(28, dtype=torch.float64).tensors
    for batch in list(zip(inputs.split(10), targets.split(10), strict=True)) * 2:

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = expected.training_step(batch)
            loss.backward()
            return loss

        optimizer.step(closure)
        schedule.step()
    assert_same_bits(actual, expected)


class WithNorm(Regression):
    """Has statistics of batches, and a step that changes its batch."""

    def __init__(self, line_search: str | None) -> None:
        super().__init__(lbfgs(line_search))
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        inputs += 1
        return nn.functional.mse_loss(self.network(self.norm(inputs)), targets)


class InPhases(TaskModule):
    """A first layer trained by Adam, and a second by LBFGS."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))

    def step(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.second(torch.tanh(self.first(batch[0]))), batch[1])

    first_step = second_step = step

    def configure_phases(self) -> list[Phase]:
        second = torch.optim.LBFGS(self.second.parameters(), max_iter=3)
        return [Phase("first", torch.optim.Adam(self.first.parameters(), lr=0.01)), Phase("second", second)]


def made(kind: str) -> tuple[TaskModule, Any]:
    """Return a task and its data; `None`: those of the other tests."""
    if kind == "phases":
        return InPhases(), None
    if kind == "plain":
        return Regression(lbfgs(None), hidden=4), None
    data = TensorDataset(*(tensor.double() for tensor in weighted_data(28).tensors))
    return WeightedRegression(lbfgs("strong_wolfe"), hidden=4), data


STRATEGIES: dict[str, Any] = {
    "dp": lambda: DataParallelStrategy(devices=["cpu", "cpu"]),
    "ddp": lambda: DDPStrategy(device="cpu", accumulate=5),
    "torch_ddp": lambda: TorchDDPStrategy(device="cpu"),
    "fusion": lambda: FusionStrategy(device="cpu"),
}


def distances(folder: str, expected: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    """Return the largest difference of each strategy's weights to those of one device."""
    found = {}
    for kind, alone in expected.items():
        for name in STRATEGIES if kind != "phases" else ["ddp"]:
            task, data = made(kind)
            run_dir = f"{folder}/{dist.get_rank() if name == 'dp' else ''}/{name} {kind}"
            fit(task, run_dir, STRATEGIES[name](), data=data)
            found[f"{name} {kind}"] = max((weights(task)[key] - alone[key]).abs().max().item() for key in alone)
    return found


@pytest.mark.slow
def test_weights_are_those_of_one_device_under_strategies_that_do_not_shard(tmp_path):
    expected = {}
    for kind in ("plain", "weighted, strong_wolfe", "phases"):
        task, data = made(kind)
        fit(task, tmp_path / "alone" / kind, data=data)
        expected[kind] = weights(task)
    for found in run_ranks(distances, 2, str(tmp_path), expected, timeout=150):
        assert len(found) == 9
        assert all(distance < 1e-9 for distance in found.values()), found


class Dropping(Regression):
    """Keeps the random generator at the start of each evaluation."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, hidden=8, dropout=0.5)
        self.starts: list[bytes] = []

    def training_step(self, batch: Any) -> Any:
        self.starts.append(torch.get_rng_state().numpy().tobytes())
        return super().training_step(batch)


def test_evaluations_of_a_step_draw_the_same_numbers_and_later_steps_those_of_other_optimizers(tmp_path):
    tasks = {"LBFGS": Dropping(lbfgs(None)), "SGD": Dropping(None)}
    noted = {name: EachStep(lambda run: torch.get_rng_state()) for name in tasks}
    for name, task in tasks.items():
        fit(task, tmp_path / name, callbacks=[noted[name]])
    assert len(tasks["LBFGS"].starts) > 6 and len(tasks["SGD"].starts) == 3
    assert list(dict.fromkeys(tasks["LBFGS"].starts)) == tasks["SGD"].starts
    for own, expected in zip(noted["LBFGS"].seen, noted["SGD"].seen, strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("line_search", LINE_SEARCHES)
def test_statistics_count_each_batch_once(line_search, tmp_path):
    task = WithNorm(line_search)
    fit(task, tmp_path)
    inputs = 1 + regression_data(28, dtype=torch.float64).tensors[0]
    means = torch.stack([batch.mean(0) for batch in inputs.split(10)])
    assert task.norm.num_batches_tracked == 3
    torch.testing.assert_close(task.norm.running_mean, means.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("line_search", LINE_SEARCHES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(line_search, tmp_path):
    whole, stopped, resumed = (Regression(lbfgs(line_search), hidden=8) for _ in range(3))
    fit(whole, tmp_path / "whole")
    run_dir = fit(stopped, tmp_path / "stopped", callbacks=[StopAt(2)]).run_dir
    fit(resumed, tmp_path / "resumed", resume=run_dir)
    assert_same_bits(resumed, whole)


def test_the_learning_rate_finder_varies_the_rate_of_lbfgs(tmp_path):
    task = Regression(lbfgs(None))
    alone = Regression(lbfgs(None))
    finder = LearningRateFinder(num_steps=10, on_finish="continue")
    fit(task, tmp_path / "found", callbacks=[finder], max_duration="1step")
    fit(alone, tmp_path / "alone", max_duration="1step")
    assert finder.suggestion is not None
    assert_same_bits(task, alone)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    # the strategy, settings of the Trainer, and what the error says
    "norm": (SingleStrategy, {"max_grad_norm": 1.0}, "Set max_grad_norm=null, or use"),
    "value": (SingleStrategy, {"max_grad_value": 1.0}, "Set max_grad_value=null, or use"),
    "skip": (SingleStrategy, {"on_nonfinite": "skip"}, r"Set trainer\.on_nonfinite=raise, or use"),
    "spikes": (SingleStrategy, {"skip_grad_norm_factor": 3.0}, r"Set trainer\.skip_grad_norm_factor=null, or use"),
    "scaler": (SingleStrategy, {"precision": "fp16-mixed"}, r"Set trainer\.precision=bf16-mixed, or use"),
    "auto": (
        lambda device: SingleStrategy(device=device, micro_batch_size="auto"),
        {},
        "micro_batch_size=auto does not",
    ),
    "bucketwise": (
        lambda device: DDPStrategy(device=device, optimizer_in_backward=True),
        {},
        "optimizer_in_backward=false",
    ),
    "hook": (lambda device: DDPStrategy(device=device, comm_hook="power_sgd"), {}, "comm_hook=none"),
    "fsdp": (FSDPStrategy, {}, "LBFGS may need full parameters"),
    "sharded": (
        lambda device: FusionStrategy(device=device, shard_optimizer=True),
        {},
        "LBFGS may need full parameters",
    ),
}


def refusals(folder: str) -> None:
    for name, (strategy, settings, message) in REFUSED.items():
        with pytest.raises(UserError, match=message):
            fit(Regression(lbfgs(None)), f"{folder}/{name}", strategy(device="cpu"), **settings)


def test_what_cannot_evaluate_a_step_again_is_refused_by_name(tmp_path):
    run_ranks(refusals, 1, str(tmp_path))
    with pytest.raises(UserError, match="strategy=pipeline divides them over the stages"):
        task = Regression(lbfgs(None))
        PipelineStrategy(device="cpu").prepare_optimizer(task, SimpleNamespace(step_name="", needs_closure=True))


class Manual(InPhases):
    manual = True

    def manual_step(self, control: Any) -> None:
        control.run_due_phases()


def test_a_task_that_drives_its_phases_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"Manual\.manual_step may begin another phase"):
        fit(Manual(), tmp_path)


def test_lbfgs_is_no_part_of_a_chain():
    with pytest.raises(UserError, match="ChainedOptimizer steps each optimizer once, and LBFGS"):
        ChainedOptimizer(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
