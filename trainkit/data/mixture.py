"""Mixture and Sequential: several datasets as one, mixed by weights or in sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import Dataset

from trainkit.data.order import GlobalOrder, Order, sample_seed
from trainkit.data.readers import get_sample_of
from trainkit.errors import UserError
from trainkit.settings import check_arguments


class CombinedDataset(Dataset[Any]):
    """The concatenated samples of several map-style datasets, given as a list or by name.

    `get_sample(index, seed)` is called for datasets that define it.
    """

    def __init__(self, datasets: Sequence[Any] | Mapping[str, Any]) -> None:
        self.datasets = dict(datasets) if isinstance(datasets, Mapping) else dict(enumerate(datasets))
        if not self.datasets:
            raise UserError(f"{type(self).__name__} needs at least one dataset.")
        for name, dataset in self.datasets.items():
            if not hasattr(dataset, "__len__") or len(dataset) == 0:
                raise UserError(f"{type(self).__name__}: dataset {name!r} has no samples, or no __len__.")
        self._members = list(self.datasets.values())
        self.lengths = [len(dataset) for dataset in self._members]
        self._ends = list(accumulate(self.lengths))
        self._seeded = [get_sample_of(dataset) for dataset in self._members]
        # Only then: a reader that finds the attribute calls it in place of `__getitem__`.
        if any(self._seeded):
            self.get_sample = self._get_sample

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number, index = self._locate(index)
        return self._members[number][index]

    def _get_sample(self, index: int, seed: int) -> Any:
        number, index = self._locate(index)
        seeded = self._seeded[number]
        return self._members[number][index] if seeded is None else seeded(index, seed)

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of the dataset that has an index, and the index in that dataset."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)


class Mixture(CombinedDataset):
    """Mixes datasets by weights: each gives an exact number of samples to an epoch, at random positions.

        Mixture({"web": web, "code": code}, weights={"web": 3, "code": 1}, num_samples=400)
        epoch    w w c w w w c w ...        300 of web and 100 of code

    Passes over a dataset continue from epoch to epoch, each pass a new permutation: no sample repeats before all others
    of its dataset. A small dataset repeats within an epoch, and an epoch may not reach the end of a large one.
    The order is a function of the seed and the epoch, so ranks, workers and resuming do not change it.

    Args:
        datasets: Map-style datasets, as a list or by name.
        weights: Relative numbers of samples; by default the datasets' lengths.
        num_samples: Samples of an epoch; by default the sum of the lengths.

    """

    def __init__(
        self,
        datasets: Sequence[Any] | Mapping[str, Any],
        *,
        weights: Sequence[float] | Mapping[str, float] | None = None,
        num_samples: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        super().__init__(datasets)
        check_arguments(Mixture.__init__, locals(), of="Mixture")
        self.num_samples = num_samples if num_samples is not None else super().__len__()
        self.counts = _apportion(self._weights(weights), self.num_samples)

    def order(self, *, seed: int, shuffle: bool) -> Order:
        return MixtureOrder(self.lengths, self.counts, seed=seed, shuffle=shuffle)

    def _weights(self, weights: Sequence[float] | Mapping[str, float] | None) -> list[float]:
        if weights is None:
            return [float(length) for length in self.lengths]
        if isinstance(weights, Mapping):
            if weights.keys() != self.datasets.keys():
                raise UserError(
                    f"Mixture: weights have the names {list(weights)}, but datasets have {list(self.datasets)}."
                )
            weights = [weights[str(name)] for name in self.datasets]
        if len(weights) != len(self.datasets) or not all(weight >= 0 for weight in weights) or sum(weights) <= 0:
            raise UserError(
                f"Mixture: weights must be one number for each dataset, at least 0 and not all 0, got {weights}."
            )
        return [float(weight) for weight in weights]


class Sequential(CombinedDataset):
    """Reads datasets in sequence in each epoch, each of them shuffled: a curriculum.

    Sequential([easy, hard])
    epoch 0    e3 e0 e2 e1 h1 h4 h0 h3 h2        every sample once
    """

    def order(self, *, seed: int, shuffle: bool) -> Order:
        return MixtureOrder(self.lengths, self.lengths, seed=seed, shuffle=shuffle, in_sequence=True)


class MixtureOrder:
    """`counts[d]` draws of dataset d an epoch, at positions that follow a permutation of the epoch, or in sequence."""

    def __init__(
        self, lengths: Sequence[int], counts: Sequence[int], *, seed: int, shuffle: bool, in_sequence: bool = False
    ) -> None:
        self.num_samples = sum(counts)
        self._lengths, self._counts = lengths, counts
        self._places = GlobalOrder(self.num_samples, seed=seed, shuffle=not in_sequence)
        self._orders = [  # datasets of equal length have different orders
            # Below 2**62, since a GlobalOrder adds the epoch to its seed.
            GlobalOrder(length, seed=sample_seed(seed, 0, number) % 2**62, shuffle=shuffle)
            for number, length in enumerate(lengths)
        ]
        self._first_places = [0, *accumulate(counts)]
        self._first_indices = [0, *accumulate(lengths)]

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        places = self._places.slice(epoch, start, stop, step)
        indices = torch.empty_like(places)
        for number, count in enumerate(self._counts):
            first = self._first_places[number]
            mine = (places >= first) & (places < first + count)
            if bool(mine.any()):
                # So that a pass over the dataset continues in the next epoch, where this one has ended.
                draws = places[mine] - first + epoch * count  # counted over all epochs
                indices[mine] = self._drawn(number, draws) + self._first_indices[number]
        return indices

    def _drawn(self, number: int, draws: Tensor) -> Tensor:
        """Return the samples of a dataset's draws; each pass over the dataset is a new permutation."""
        length, order = self._lengths[number], self._orders[number]
        passes, positions = draws // length, draws % length
        samples = torch.empty_like(draws)
        for number_of_pass in passes.unique().tolist():
            mine = passes == number_of_pass
            # Only the span that is needed: a full permutation for each pass of a small slice would cost its length.
            low, high = int(positions[mine].min()), int(positions[mine].max())
            samples[mine] = order.slice(number_of_pass, low, high + 1)[positions[mine] - low]
        return samples


def _apportion(weights: Sequence[float], total: int) -> list[int]:
    """Return integers with a given sum, in proportion to the weights (largest remainder)."""
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [int(value) for value in exact]
    # `sorted` is stable: equal remainders go to the first datasets, on every rank.
    by_remainder = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts
