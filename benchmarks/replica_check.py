"""Share of training that the comparison of replicas takes: `ddp` on ranks of one host, with default log points.

    python benchmarks/replica_check.py [--ranks 2] [--steps 6000]

Each task is a stack of square layers. The time of a comparison is that of its checksums and of the first step's
collective; at log points the sums travel with the metrics, in a collective that is there anyway.
"""

from __future__ import annotations

import argparse
import time
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp.strategy import DDPStrategy

from trainkit import Data, TaskModule, Trainer
from trainkit.loops.replica_check import ReplicaCheck
from trainkit.testing import run_ranks

SIZES = ((64, 1), (256, 4), (1024, 4), (2048, 4))
"""Width and number of layers of each task."""


class Stack(TaskModule):
    """Square layers with a loss of least squares."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: Any) -> Any:
        """Return the mean of the squared outputs."""
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def measure(width: int, layers: int, steps: int) -> tuple[int, float, int, float]:
    """Return the parameters, the seconds of all steps, the comparisons and their seconds, on this rank."""
    seconds: list[float] = []

    def timed(method: Any) -> Any:
        @wraps(method)
        def call(*arguments: Any, **settings: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments, **settings)
            finally:
                seconds.append(time.perf_counter() - start)

        return call

    ReplicaCheck.sums = timed(ReplicaCheck.sums)  # type: ignore[method-assign]
    task = Stack(width, layers)
    data = Data(train=TensorDataset(torch.randn(16 * 200, width)), batch_size=16)
    strategy = DDPStrategy(device="cpu")
    trainer = Trainer(strategy, max_duration=f"{steps}step", callbacks=[], loggers=[], report=False)
    result = trainer.fit(task, data)
    return sum(parameter.numel() for parameter in task.parameters()), result.seconds, len(seconds), sum(seconds)


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6000)
    options = parser.parse_args()
    print("| parameters | ms a step | comparisons | ms each | share |\n| ---: | ---: | ---: | ---: | ---: |")
    for width, layers in SIZES:
        steps = max(options.steps * 64**2 // width**2, 200)
        first = run_ranks(measure, options.ranks, width, layers, steps, timeout=900)[0]
        parameters, total, count, compared = first
        row = f"{parameters:,} | {1e3 * total / steps:.2f} | {count} in {steps} steps | {1e3 * compared / count:.2f}"
        print(f"| {row} | {compared / total:.2%} |", flush=True)


if __name__ == "__main__":
    main()
