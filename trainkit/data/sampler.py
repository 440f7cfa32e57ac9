"""ShardSampler: the samples of each global batch that a rank reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from trainkit.data.order import sample_seed
from trainkit.errors import UserError
from trainkit.rng import preserve_rng, seed_everything

_COMPARED = 1000
"""Indices of an epoch that are compared, to check that a sampler draws the same order on all ranks."""


class Order(Protocol):
    """The order of an epoch's samples: a pure function of the seed and the epoch."""

    num_samples: int

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Return the sample indices at positions `start`, `start + step`, ... below `stop`."""


class ShardSampler(DistributedSampler[Any]):
    """Gives rank r of W every W-th sample of each global batch; none is repeated or dropped.

        positions   0 1 2 3 | 4 5 6 7 | 8 9        batch_size 4, 10 samples, W = 2
        rank 0      0   2   | 4   6   | 8
        rank 1        1   3 |   5   7 |   9

    Over an epoch this equals PyTorch's `DistributedSampler`, if that neither pads nor drops samples.
    """

    def __init__(self, dataset: Sized, order: Order, *, rank: int, world_size: int) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank)  # type: ignore[arg-type] # only its len is used
        self.order = order

    def shard(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return this rank's sample indices among the positions from `start` to `stop` of the epoch's order."""
        return self.order.slice(epoch, start + self.rank, stop, self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices of the epoch given to `set_epoch`."""
        return iter(self.shard(self.epoch, 0, self.order.num_samples).tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self.order.num_samples, self.num_replicas))


class SamplerOrder:
    """The order of a custom sampler, drawn again for each epoch under a seed from (seed, epoch).

    It is the same on every rank and after a resume if the sampler draws from the global generators of torch, python or
    numpy, or from its `generator` attribute. Another source of randomness is not seeded.
    """

    def __init__(self, sampler: Sampler[int], *, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._epoch = -1
        self._indices = torch.empty(0, dtype=torch.int64)
        self.num_samples = len(sampler)  # type: ignore[arg-type] # checked where the loader is read

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Return the sampler's indices at positions `start`, `start + step`, ... below `stop`."""
        if epoch != self._epoch:
            self._indices = self._draw(epoch)
            self._epoch = epoch
        return self._indices[start:stop:step]

    def first_indices(self) -> list[int]:
        """Return the first indices of epoch 0, drawn again at each call."""
        with self._drawing(0) as indices:
            return [int(index) for index in islice(indices, _COMPARED)]

    def check(self, first_of_ranks: Sequence[list[int]]) -> str | None:
        """Return a warning if a resume would change the order, else `None`; raises UserError if ranks differ.

        Args:
            first_of_ranks: The `first_indices` of each rank.

        """
        name = type(self._sampler).__name__
        if any(drawn != first_of_ranks[0] for drawn in first_of_ranks):
            raise UserError(
                f"the sampler {name} draws another order on each rank, so samples would be repeated and lost; let it "
                "draw from torch's, python's or numpy's global generator, or from an attribute `generator` "
                "(torch.Generator), which are seeded for each epoch."
            )
        if self.first_indices() != first_of_ranks[0]:
            return (
                f"the sampler {name} draws from a generator that trainkit cannot seed: a resumed run would use "
                "another order. Let it draw from torch's, python's or numpy's global generator, or from an attribute "
                "`generator` (torch.Generator)."
            )
        return None

    def _draw(self, epoch: int) -> Tensor:
        with self._drawing(epoch) as drawn:
            indices = [int(index) for index in drawn]
        if len(indices) != self.num_samples:
            raise UserError(
                f"the sampler {type(self._sampler).__name__} gave {len(indices)} indices, but its __len__ is "
                f"{self.num_samples}; return the same number."
            )
        return torch.tensor(indices, dtype=torch.int64)

    @contextmanager
    def _drawing(self, epoch: int) -> Iterator[Iterator[int]]:
        """Yield the sampler's iterator of an epoch, under seeds that are the same on every rank."""
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        seed = sample_seed(self._seed, epoch, 0) % 2**63
        generator = getattr(self._sampler, "generator", None)
        with preserve_rng():
            seed_everything(seed)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            yield iter(self._sampler)
