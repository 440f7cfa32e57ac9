"""StepBatch: the micro-batches of one optimizer step on one rank, and how a global batch is split; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from trainkit.data.order import Order, ShardSampler
    from trainkit.distributed.collectives import Collectives


@dataclass(slots=True)
class MicroBatch:
    """The batch of one forward pass on one device."""

    batch: Any
    """The argument of the task's step."""
    num_samples: int
    """Its weight, unless the task returns one."""


@dataclass(slots=True)
class StepBatch:
    """One rank's shard of a global batch."""

    micro_batches: list[MicroBatch]
    """Empty on a rank without samples in a short last batch."""
    num_samples: int
    """Samples of the whole global batch, over all ranks."""
    num_items: int
    """Positions of the epoch's order that the global batch takes."""
    ends_epoch: bool
    """Whether this is the last step of its epoch."""
    is_even: bool = True
    """Whether rank r has the samples r, r + W, ... of the global batch; if not, any number of them, or none."""


@dataclass(frozen=True)
class BatchPlan:
    """The split of a global batch: ranks x micro-batches of a rank x samples of a micro-batch."""

    batch_size: int
    world_size: int
    micro_batches: int
    micro_batch_size: int

    @property
    def num_backwards(self) -> int:
        """Backward passes of a rank in a step."""
        return self.micro_batches

    def __str__(self) -> str:
        return (
            f"global batch {self.batch_size} = {self.world_size} rank{'s' * (self.world_size > 1)} x "
            f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} x {self.micro_batch_size} samples"
        )


class ShardsData(Protocol):
    """The attributes of a strategy that batch loaders use."""

    @property
    def device(self) -> torch.device:
        """The device that batches are copied to."""

    @property
    def comm(self) -> Collectives:
        """The rank of this process, and the number of ranks."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches into which each rank splits its shard of a step."""

    def plan(self, batch_size: int, *, even: bool = True) -> BatchPlan:
        """Return the split of a global batch."""

    def sampler(self, dataset: Any, order: Order) -> ShardSampler:
        """Return the sampler of this rank's shard of each global batch."""


def split_error(batch_size: int, *, accumulate: int, world_size: int) -> str | None:
    """Return the error if a batch cannot be split into `accumulate` equal micro-batches on each rank, else `None`."""
    if batch_size % accumulate == 0 and -(-batch_size // world_size) >= accumulate:  # samples of the largest shard
        return None
    # Equal micro-batches need a divisor of the global batch, with at least one sample of each for every rank.
    divisors = [n for n in range(1, min(batch_size // world_size, batch_size) + 1) if batch_size % n == 0]
    near = min(divisors, key=lambda n: abs(n - accumulate), default=1)
    size = max(1, batch_size // (accumulate * world_size))
    return (
        f"batch_size={batch_size} cannot be split into accumulate={accumulate} equal micro-batches on {world_size} "
        f"rank(s); set accumulate={near}, or micro_batch_size={size}, which allows an uneven split."
    )
