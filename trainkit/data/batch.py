"""The micro-batches of one optimizer step on one rank, and how a global batch is split into them; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainkit.data.sampler import Order, ShardSampler
    from trainkit.distributed.collectives import Collectives


@dataclass(slots=True)
class MicroBatch:
    """What one device takes in one forward."""

    batch: Any
    """What the task's step is called with."""
    num_samples: int
    """Samples in it: its weight, unless the task returns another."""


@dataclass(slots=True)
class StepBatch:
    """One rank's part of a global batch."""

    micro_batches: list[MicroBatch]
    """Empty on a rank that a short last batch leaves without samples."""
    num_samples: int
    """Samples of the whole global batch, over all ranks."""
    num_items: int
    """How far the global batch moves on in the epoch's order."""
    ends_epoch: bool
    """Whether this is the last window of its epoch."""


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is split: ranks x micro-batches of a rank x samples of a micro-batch."""

    batch_size: int
    world_size: int
    micro_batches: int
    micro_batch_size: int

    def __str__(self) -> str:
        return (
            f"global batch {self.batch_size} = {self.world_size} rank{'s' * (self.world_size > 1)} x "
            f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} x {self.micro_batch_size} samples"
        )


class ShardsData(Protocol):
    """The part of a strategy that data loaders need."""

    @property
    def comm(self) -> Collectives:
        """Which rank this process is, of how many."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in which each rank is asked to take its shard of a step."""

    def plan(self, batch_size: int, *, even: bool = True) -> BatchPlan:
        """Return how a global batch is split."""

    def sampler(self, dataset: Any, order: Order) -> ShardSampler:
        """Return the sampler of this rank's shard of each global batch."""


def split_error(batch_size: int, *, accumulate: int, world_size: int) -> str | None:
    """Return why a batch cannot be split into `accumulate` equal micro-batches on each rank; `None` if it can."""
    share = -(-batch_size // world_size)  # of the rank that has most
    if batch_size % accumulate == 0 and share >= accumulate:
        return None
    divisors = [n for n in range(1, min(batch_size // world_size, batch_size) + 1) if batch_size % n == 0]
    near = min(divisors, key=lambda n: abs(n - accumulate), default=1)
    size = max(1, batch_size // (accumulate * world_size))
    return (
        f"batch_size={batch_size} cannot be cut into accumulate={accumulate} equal micro-batches on {world_size} "
        f"rank(s); set accumulate={near}, or micro_batch_size={size}, which needs no even cut."
    )
