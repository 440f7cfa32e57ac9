"""Readers: sample indices to a collated batch, in this process or in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from trainkit.data.order import sample_seed
from trainkit.rng import seed_everything

Collate = Callable[[list[Any]], Any]
GetSample = Callable[[int, int], Any]
"""Takes an index and the seed for the randomness of that sample; returns the sample."""


class Reader(Protocol):
    """Reads the samples at given indices as one batch."""

    def read(self, indices: Tensor, epoch: int = 0) -> Any:
        """Return the batch of the samples at `indices` (int64, one dimension), as they are in `epoch`."""


def make_reader(dataset: Any, collate_fn: Collate, *, seed: int = 0) -> Reader:
    """Return the fastest reader whose batches equal those of `collate_fn` over single samples."""
    get_sample = get_sample_of(dataset)
    if get_sample is not None:
        return SeededReader(get_sample, collate_fn, seed=seed)
    if collate_fn is default_collate:
        if type(dataset) is TensorDataset:
            return TensorReader(dataset.tensors)
        if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
            return TensorReader(dataset.dataset.tensors, torch.as_tensor(dataset.indices, dtype=torch.int64))
    return SampleReader(dataset, collate_fn)


def get_sample_of(dataset: Any) -> GetSample | None:
    """Return the `get_sample` method of a dataset, or of the dataset below a Subset; `None` if there is none."""
    if type(dataset) is Subset:
        of_full_dataset = get_sample_of(dataset.dataset)
        return None if of_full_dataset is None else _SubsetSamples(of_full_dataset, dataset.indices)
    get_sample: GetSample | None = getattr(dataset, "get_sample", None)
    return get_sample


class TensorReader:
    """Gathers the rows of each tensor in one operation; the batch is a list, as `default_collate` makes of tuples."""

    def __init__(self, tensors: Sequence[Tensor], subset: Tensor | None = None) -> None:
        self._tensors = tensors
        self._subset = subset

    def read(self, indices: Tensor, epoch: int = 0) -> list[Tensor]:
        """Return `[rows of each tensor]`."""
        if self._subset is not None:
            indices = self._subset[indices]
        return [tensor.index_select(0, indices) for tensor in self._tensors]


class SampleReader:
    """Reads by the dataset's `__getitems__` if it has one, else sample by sample."""

    def __init__(self, dataset: Any, collate_fn: Collate) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._getitems = getattr(dataset, "__getitems__", None)

    def read(self, indices: Tensor, epoch: int = 0) -> Any:
        """Return the collated samples."""
        wanted = indices.tolist()
        samples = self._getitems(wanted) if self._getitems else [self._dataset[index] for index in wanted]
        return self._collate_fn(samples)


class SeededReader:
    """Reads by `get_sample`, with a seed that depends only on the run's seed, the epoch and the index."""

    def __init__(self, get_sample: GetSample, collate_fn: Collate, *, seed: int) -> None:
        self._get_sample = get_sample
        self._collate_fn = collate_fn
        self._seed = seed

    def read(self, indices: Tensor, epoch: int = 0) -> Any:
        """Return the collated samples."""
        return self._collate_fn([self._get_sample(i, sample_seed(self._seed, epoch, i)) for i in indices.tolist()])


class _SubsetSamples:
    """`get_sample` of a Subset; the seed is that of the index in the subset."""

    def __init__(self, get_sample: GetSample, indices: Sequence[int]) -> None:
        self._get_sample = get_sample
        self._indices = indices

    def __call__(self, index: int, seed: int) -> Any:
        return self._get_sample(self._indices[index], seed)


class Request(NamedTuple):
    """The samples of one micro-batch, for a worker to read."""

    indices: Tensor
    seed: int
    """Seed of python, numpy and torch in the worker while it reads."""
    epoch: int = 0


class WorkerPool:
    """Worker processes that read ahead; persistent ones stay alive between epochs.

    Each request is read under its own seed, so random augmentation depends neither on the number of workers nor on the
    step at which a run is resumed.
    """

    def __init__(self, reader: Reader, *, num_workers: int, pin_memory: bool, persistent: bool) -> None:
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = DataLoader(
            _RequestDataset(reader),
            batch_sampler=self._requests,  # type: ignore[arg-type] # to the loader a request is the indices of one batch
            num_workers=num_workers,
            collate_fn=no_collate,
            pin_memory=pin_memory,
            persistent_workers=persistent,
            # A separate generator: the loader would otherwise draw from the global one and change the run's randomness.
            generator=torch.Generator(),
        )

    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield the batch of each request; unread requests of an earlier call are dropped."""
        assert self._loader is not None
        self._requests.pending = iter(requests)
        return iter(self._loader)

    def close(self) -> None:
        """End the workers; may be called twice."""
        self._loader = None


class _Requests:
    """The batch sampler of the loader; its batches of indices are requests."""

    def __init__(self) -> None:
        self.pending: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.pending


def request_seed(seed: int, epoch: int, position: int) -> int:
    """Return the seed under which a worker reads the samples that start at `position`."""
    return sample_seed(seed, epoch, position) % 2**63


class _RequestDataset(Dataset[Any]):
    """The dataset in a worker; reads one request as one batch."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("samples are read by __getitems__")

    def __getitems__(self, request: Request) -> Any:
        seed_everything(request.seed)
        return self._reader.read(request.indices, request.epoch)


def no_collate(item: Any) -> Any:
    """Return the item unchanged."""
    return item
