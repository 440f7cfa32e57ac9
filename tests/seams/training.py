"""Training under every strategy against a plain torch loop, for what user code does outside of forward and backward.

The loop of a test is written in the test: a copy of the task could have lost the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.errors import UserError

BATCH_SIZE, STEPS, WIDTH = 8, 6, 8
BOUND = 1e-9
"""Largest difference of weights in fp64 between a strategy and the plain loop."""

MAKE_STRATEGY: dict[str, Callable[[], Any]] = {
    "single": lambda: SingleStrategy(device="cpu", accumulate=2),
    "dp": lambda: DataParallelStrategy(devices=["cpu"] * 2),
    "ddp": lambda: DDPStrategy(device="cpu", devices=2),
    "torch_ddp": lambda: TorchDDPStrategy(device="cpu", devices=2),
    "fusion": lambda: FusionStrategy(device="cpu", devices=2),
    "fusion_sharded": lambda: FusionStrategy(device="cpu", devices=2, shard_optimizer=True),
    "fsdp": lambda: FSDPStrategy(device="cpu", devices=2),
    "pipeline": lambda: PipelineStrategy(device="cpu", stages=2, accumulate=2),
}
EVERY = tuple(MAKE_STRATEGY)


class Layers(TaskModule):
    """Regression by three layers in fp64, the same weights in every process; `build` may change it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
            self.build()
            self.double()
        self.finish()

    def build(self) -> None:
        """Add modules."""

    def finish(self) -> None:
        """Add what belongs to the parameters in fp64: hooks, attributes, aliases."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(inputs)))))

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


def samples(num_samples: int = BATCH_SIZE * STEPS) -> TensorDataset:
    """Return inputs of WIDTH features and one target each, in fp64."""
    inputs = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def batches(num_samples: int = BATCH_SIZE * STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the global batches of one epoch, not shuffled, for the plain loop of a test."""
    inputs, targets = samples(num_samples).tensors
    yield from zip(inputs.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True)


def trained(
    strategy: str, task: TaskModule, *callbacks: Callback, data: Data | None = None, **settings: Any
) -> dict[str, Tensor]:
    """Return the weights of `task` after training for one epoch under the strategy called `strategy`."""
    data = data or Data(train=samples(), batch_size=BATCH_SIZE, shuffle=False)
    defaults = {"max_duration": "1epoch", "loggers": [], "num_sanity_batches": 0}
    Trainer(MAKE_STRATEGY[strategy](), callbacks=[*callbacks], **{**defaults, **settings}).fit(task, data)
    return {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}


def difference(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the largest difference of two states; infinity for other names or shapes."""
    if weights.keys() != reference.keys() or any(weights[name].shape != reference[name].shape for name in weights):
        return float("inf")
    largest = [(weights[name].double() - reference[name].double()).abs().max() for name in weights]
    return torch.stack(largest).max().item()  # NaN for weights that are NaN, which Python's max may lose


def assert_equal_or_refused(
    strategies: tuple[str, ...], make_task: Callable[[], TaskModule], reference: dict[str, Tensor], **refused: str
) -> None:
    """Assert that each strategy has the weights of the plain loop, or raises UserError with the words in `refused`."""
    for name in strategies:
        try:
            outcome: float | str = difference(trained(name, make_task()), reference)
        except UserError as error:
            outcome = str(error)
        if name in refused:
            assert isinstance(outcome, str) and refused[name] in outcome, (name, outcome)
        else:
            assert isinstance(outcome, float) and outcome < BOUND, (name, outcome)
