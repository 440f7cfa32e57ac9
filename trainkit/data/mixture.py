"""Several datasets as one: mixed by weights, or one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainkit.data.order import GlobalOrder, sample_seed
from trainkit.data.readers import get_sample_of
from trainkit.data.sampler import Order
from trainkit.errors import UserError


class CombinedDataset(Dataset[Any]):
    """The samples of several map-style datasets, those of the first one before those of the second.

    Datasets may be a list, or have names. Where one of them defines `get_sample(index, seed)`, it is called.
    """

    def __init__(self, datasets: Sequence[Any] | Mapping[str, Any]) -> None:
        self.datasets = dict(datasets) if isinstance(datasets, Mapping) else dict(enumerate(datasets))
        if not self.datasets:
            raise UserError(f"{type(self).__name__} needs at least one dataset.")
        for name, dataset in self.datasets.items():
            if not hasattr(dataset, "__len__") or len(dataset) == 0:
                raise UserError(f"{type(self).__name__}: dataset {name!r} has no samples, or no __len__.")
        self.lengths = [len(dataset) for dataset in self.datasets.values()]
        self._ends = list(accumulate(self.lengths))
        self._parts = list(self.datasets.values())
        self._seeded = [get_sample_of(dataset) for dataset in self._parts]
        if any(self._seeded):
            self.get_sample = self._get_sample

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number, own = self._place(index)
        return self._parts[number][own]

    def _get_sample(self, index: int, seed: int) -> Any:
        number, own = self._place(index)
        seeded = self._seeded[number]
        return self._parts[number][own] if seeded is None else seeded(own, seed)

    def _place(self, index: int) -> tuple[int, int]:
        """Return which dataset an index lies in, and the index there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)


class Mixture(CombinedDataset):
    """Mixes datasets by weights: of each epoch, each gives its exact share of samples, at random places.

        Mixture({"web": web, "code": code}, weights={"web": 3, "code": 1}, num_samples=400)
        epoch    w w c w w w c w ...        300 of web and 100 of code

    Each dataset is gone through in permutations of its own that go on from epoch to epoch: none of its samples comes
    again before all its others have. So a small dataset repeats within an epoch, and of a large one an epoch sees a
    part: the promise that an epoch holds each sample once is kept for each dataset over its own passes only. The order
    is a function of the seed and the epoch like any other; ranks, workers and resuming do not change it.

    Args:
        datasets: Map-style datasets, as a list or by name.
        weights: Shares of the samples, in any unit; by default the datasets' lengths.
        num_samples: Samples of an epoch; by default those of all datasets together.

    """

    def __init__(
        self,
        datasets: Sequence[Any] | Mapping[str, Any],
        *,
        weights: Sequence[float] | Mapping[str, float] | None = None,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(datasets)
        self.num_samples = num_samples if num_samples is not None else super().__len__()
        if isinstance(self.num_samples, bool) or self.num_samples < 1:
            raise UserError(f"Mixture: num_samples must be at least 1, got {num_samples}.")
        self.shares = _shares(self._weights(weights), self.num_samples)

    def order(self, *, seed: int, shuffle: bool) -> Order:
        """Return the order of an epoch's samples."""
        return MixtureOrder(self.lengths, self.shares, seed=seed, shuffle=shuffle)

    def _weights(self, weights: Sequence[float] | Mapping[str, float] | None) -> list[float]:
        if weights is None:
            return [float(length) for length in self.lengths]
        if isinstance(weights, Mapping):
            if weights.keys() != self.datasets.keys():
                raise UserError(f"Mixture: weights are of {list(weights)}, and datasets are {list(self.datasets)}.")
            weights = [weights[str(name)] for name in self.datasets]
        if len(weights) != len(self.datasets) or not all(weight >= 0 for weight in weights) or sum(weights) <= 0:
            raise UserError(f"Mixture: weights must be one number for each dataset, none negative, got {weights}.")
        return [float(weight) for weight in weights]


class Sequential(CombinedDataset):
    """Goes through datasets one after the other in each epoch, each of them shuffled: a curriculum.

    Sequential([easy, hard])
    epoch 0    e3 e0 e2 e1 h1 h4 h0 h3 h2        every sample once
    """

    def order(self, *, seed: int, shuffle: bool) -> Order:
        """Return the order of an epoch's samples."""
        return SequentialOrder(self.lengths, seed=seed, shuffle=shuffle)


class SequentialOrder:
    """The orders of several datasets one after the other."""

    def __init__(self, lengths: Sequence[int], *, seed: int, shuffle: bool) -> None:
        self.num_samples = sum(lengths)
        self._orders = _orders(lengths, seed=seed, shuffle=shuffle)
        self._starts = [0, *accumulate(lengths)]

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Return the indices at positions `start`, `start + step`, ... below `stop`."""
        positions = torch.arange(start, max(start, min(stop, self.num_samples)), step)
        parts = []
        for number, order in enumerate(self._orders):
            first, end = self._starts[number], self._starts[number + 1]
            mine = positions[(positions >= first) & (positions < end)] - first
            if len(mine):
                parts.append(order.slice(epoch, int(mine[0]), int(mine[-1]) + 1, step) + first)
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


class MixtureOrder:
    """`shares[d]` draws of dataset d an epoch, at places that a permutation of the epoch's positions gives."""

    def __init__(self, lengths: Sequence[int], shares: Sequence[int], *, seed: int, shuffle: bool) -> None:
        self.num_samples = sum(shares)
        self._lengths, self._shares = list(lengths), list(shares)
        self._places = GlobalOrder(self.num_samples, seed=seed, shuffle=True)
        self._orders = _orders(lengths, seed=seed, shuffle=shuffle)
        self._first_places = [0, *accumulate(shares)]
        self._first_indices = [0, *accumulate(lengths)]

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Return the indices at positions `start`, `start + step`, ... below `stop`."""
        places = self._places.slice(epoch, start, stop, step)
        indices = torch.empty_like(places)
        for number, share in enumerate(self._shares):
            first = self._first_places[number]
            mine = (places >= first) & (places < first + share)
            if bool(mine.any()):
                draws = places[mine] - first + epoch * share  # counted over all epochs
                indices[mine] = self._drawn(number, draws) + self._first_indices[number]
        return indices

    def _drawn(self, number: int, draws: Tensor) -> Tensor:
        """Return the samples of a dataset's draws: each pass over it is a permutation of its own."""
        length, order = self._lengths[number], self._orders[number]
        passes, positions = draws // length, draws % length
        samples = torch.empty_like(draws)
        for one in passes.unique().tolist():
            mine = passes == one
            low, high = int(positions[mine].min()), int(positions[mine].max())
            samples[mine] = order.slice(one, low, high + 1)[positions[mine] - low]
        return samples


def _orders(lengths: Sequence[int], *, seed: int, shuffle: bool) -> list[GlobalOrder]:
    """Return an order for each dataset; two of one length have different ones."""
    seeds = [sample_seed(seed, 0, number) % 2**62 for number in range(len(lengths))]
    return [GlobalOrder(length, seed=own, shuffle=shuffle) for length, own in zip(lengths, seeds, strict=True)]


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Return whole numbers with a given sum, as near to the weights as they can be."""
    exact = [weight / sum(weights) * total for weight in weights]
    shares = [int(value) for value in exact]
    most_left = sorted(range(len(exact)), key=lambda number: shares[number] - exact[number])
    for number in most_left[: total - sum(shares)]:
        shares[number] += 1
    return shares
