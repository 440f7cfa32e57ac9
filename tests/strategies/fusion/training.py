"""Tasks and short runs for the tests of fusion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from trainkit.strategies.transports import hosts

from tests.equality import Perceptron, StepWeights, make
from tests.tasks import fit
from trainkit import TaskModule

OPTIMIZERS = {
    "sgd": lambda task: torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda task: torch.optim.AdamW(
        [
            {"params": [p for p in task.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in task.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        eps=1e-3,
    ),
}


def pretend_hosts(ranks_of_a_host):
    """Treat every few ranks as a host, in this process from now on."""
    hosts.host_name = lambda: f"host {dist.get_rank() // ranks_of_a_host}"


def train(strategy, task, data, *callbacks, steps=6, **settings):
    return fit(strategy, task, data, *callbacks, max_duration=f"{steps}step", **settings)


def trained(strategy, name, *callbacks, optimizer="sgd", steps=4, **settings):
    """Return the weights after every step; in the last batch of an epoch, the third, some ranks have no samples."""
    task, data = make(name, 13, batch_size=6)
    task.configure_optimizers = lambda: OPTIMIZERS[optimizer](task)
    seen = StepWeights()
    train(strategy, task, data, seen, *callbacks, steps=steps, **settings)
    return seen.steps


SMALL_BUFFER = 0.0005  # MiB; parameters lie in several chunks


class Drift(TaskModule):
    """Its gradients are those of the data alone, so that its weights show the sum of all that was applied."""

    def __init__(self):
        super().__init__()
        self.long, self.short = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(7))

    def training_step(self, batch):
        return (batch[0] @ torch.cat([self.long, self.short])).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Overflowing(Drift):
    """Its gradients are finite, but those of rank 1 are above 65504 in the third step."""

    def training_step(self, batch):
        self.calls = getattr(self, "calls", 0) + 1
        return super().training_step(batch) * (1e6 if self.calls == 3 and dist.get_rank() == 1 else 1.0)


class Partly(Perceptron):
    """Trains its second head with every other sample, and never its third one."""

    def build(self):
        super().build()
        self.second = nn.Linear(8, 1)
        self.third = nn.Linear(8, 1)

    def training_step(self, batch):
        outputs = self.network(batch[0]) + (self.second(batch[0]) if batch[0].sum() > 0 else 0.0)
        return (outputs - batch[1]).square().mean()

    def configure_optimizers(self):
        # Weight decay would change parameters that should not be updated.
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)


class Wide(Perceptron):
    def build(self):
        self.network = nn.Sequential(nn.Linear(8, 1000), nn.Tanh(), nn.Linear(1000, 1))


def naive_bytes_per_server(variables: Sequence[int], world_size: int) -> list[int]:
    """Return the servers' loads if variables stay whole: the largest first, each to the least loaded server."""
    loads = [0] * world_size
    for size in sorted(variables, reverse=True):
        loads[loads.index(min(loads))] += size
    return loads


def imbalance(loads: Sequence[int]) -> float:
    """Return the load of the busiest server divided by the mean load."""
    return max(loads) * len(loads) / sum(loads)
