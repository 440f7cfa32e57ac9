"""Batches of samples that are about equally long, so that little of them is padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.errors import UserError
from trainkit.order import GlobalOrder, sample_seed

BATCHES_OF_A_GROUP = 50


class LengthGroupedOrder:
    """Each sample once an epoch, those of a global batch about equally long.

        shuffled      7 2 9 0 | 4 1 8 3 | 5 6        groups of some batches, here of three
        by length     0 1 2 3 | 4 5 6 7 | 8 9        within a group
        batches       4 5 6 7 | 0 1 2 3 | 8 9        shuffled again; a short last batch stays the last

    The order is a function of (seed, epoch) alone. Memory: 8 bytes a sample for the lengths, and one group.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        batches_of_a_group: int = BATCHES_OF_A_GROUP,
    ) -> None:
        self._lengths = torch.as_tensor(lengths, dtype=torch.int64)
        if self._lengths.dim() != 1:
            raise UserError(f"lengths must be one number for each sample, got shape {tuple(self._lengths.shape)}.")
        self.num_samples = len(self._lengths)
        self._order = GlobalOrder(self.num_samples, seed=seed, shuffle=shuffle)
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._group_size = batch_size * batches_of_a_group
        self._kept: tuple[int, int, Tensor] | None = None

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Return the samples at positions `start`, `start + step`, ... below `stop`."""
        stop = min(stop, self.num_samples)
        if start >= stop:
            return torch.empty(0, dtype=torch.int64)
        first, last = start // self._group_size, (stop - 1) // self._group_size
        groups = torch.cat([self._group(epoch, number) for number in range(first, last + 1)])
        offset = first * self._group_size
        return groups[start - offset : stop - offset : step].clone()

    def _group(self, epoch: int, number: int) -> Tensor:
        if self._kept is None or self._kept[:2] != (epoch, number):
            self._kept = (epoch, number, self._made(epoch, number))
        return self._kept[2]

    def _made(self, epoch: int, number: int) -> Tensor:
        begin = number * self._group_size
        samples = self._order.slice(epoch, begin, begin + self._group_size)
        # Stable: samples of one length stay in their random order.
        samples = samples[torch.argsort(self._lengths[samples], stable=True)]
        batches = list(samples.split(self._batch_size))
        short = [batches.pop()] if len(batches[-1]) < self._batch_size else []
        if self._shuffle and batches:
            generator = torch.Generator().manual_seed(sample_seed(self._seed, epoch, number) % 2**63)
            batches = [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
        return torch.cat([*batches, *short])
