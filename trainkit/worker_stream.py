"""A stream that a worker process reads, and where it is with each window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.reading import unchanged
from trainkit.rng import rng_state, set_rng_state


class Place(NamedTuple):
    """Where a stream is: its dataset's own state, and the generators that it may draw from."""

    dataset: dict[str, Any]
    generators: dict[str, Any]


class WorkerStream(Iterator[Any]):
    """Gives a stream's samples in order, read ahead by a worker process under a seed.

    worker        a b c d (place after d) e f g h (place after h) ...
    this process  a b c d      place      e f g h      place      ...

    Args:
        dataset: An iterable dataset.
        seed: Of python, numpy and torch in the worker.
        every: The place is told after so many samples; `None`: the dataset tells of none.
        begins_at: The generators as they were where the stream goes on from.

    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        seed: int,
        every: int | None = None,
        begins_at: dict[str, Any] | None = None,
    ) -> None:
        self.place: Place | None = None
        """After the last sample with which one was told."""
        self._tells = every is not None
        loader: DataLoader[Any] = DataLoader(
            dataset if every is None else _Telling(dataset, every, begins_at),  # type: ignore[arg-type] # it is iterable
            batch_size=None,
            num_workers=1,
            collate_fn=unchanged,
            generator=torch.Generator().manual_seed(seed),
        )
        self._items = iter(loader)  # starts the worker, with the dataset as it is now

    def __next__(self) -> Any:
        """Return the next sample."""
        item = next(self._items)
        if not self._tells:
            return item
        sample, place = item
        if place is not None:
            self.place = place
        return sample


class _Telling(IterableDataset[Any]):
    """What runs in the worker."""

    def __init__(self, dataset: Any, every: int, begins_at: dict[str, Any] | None) -> None:
        self._dataset, self._every, self._begins_at = dataset, every, begins_at

    def __iter__(self) -> Iterator[Any]:
        if self._begins_at is not None:
            set_rng_state(self._begins_at)
        for count, sample in enumerate(self._dataset, start=1):
            place = None
            if count % self._every == 0:
                # A copy: the sample travels while the dataset goes on.
                place = Place(deepcopy(dict(self._dataset.state_dict())), rng_state(devices=False))
            yield sample, place
