"""From sample indices to a batch, in this process or in worker processes."""

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
"""Returns the sample at an index; the second number is the seed of the sample's own randomness."""


class Reader(Protocol):
    """Reads the samples at given indices as one batch."""

    def read(self, indices: Tensor, epoch: int = 0) -> Any:
        """Return the batch of the samples at `indices` (int64, one dimension), as they are in `epoch`."""


def make_reader(dataset: Any, collate: Collate, *, seed: int = 0) -> Reader:
    """Return the quickest reader that gives what the dataset and `collate` give sample by sample."""
    get_sample = get_sample_of(dataset)
    if get_sample is not None:
        return SeededReader(get_sample, collate, seed=seed)
    if collate is default_collate:
        if type(dataset) is TensorDataset:
            return TensorReader(dataset.tensors)
        if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
            return TensorReader(dataset.dataset.tensors, torch.as_tensor(dataset.indices, dtype=torch.int64))
    return SampleReader(dataset, collate)


def get_sample_of(dataset: Any) -> GetSample | None:
    """Return the method of a dataset that asks for the seed of each sample, also of one that a Subset is taken of."""
    if type(dataset) is Subset:
        whole = get_sample_of(dataset.dataset)
        return None if whole is None else _SubsetSamples(whole, dataset.indices)
    get_sample: GetSample | None = getattr(dataset, "get_sample", None)
    return get_sample


class TensorReader:
    """Gathers each tensor's rows at once; the batch is a list, as `default_collate` makes it of tuples."""

    def __init__(self, tensors: Sequence[Tensor], subset: Tensor | None = None) -> None:
        self._tensors = tensors
        self._subset = subset

    def read(self, indices: Tensor, epoch: int = 0) -> list[Tensor]:
        """Return `[rows of each tensor]`."""
        if self._subset is not None:
            indices = self._subset[indices]
        return [tensor.index_select(0, indices) for tensor in self._tensors]


class SampleReader:
    """Asks the dataset for all samples at once if it has `__getitems__`, else for one after the other."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._at_once = getattr(dataset, "__getitems__", None)

    def read(self, indices: Tensor, epoch: int = 0) -> Any:
        """Return the collated samples."""
        wanted = indices.tolist()
        samples = self._at_once(wanted) if self._at_once else [self._dataset[index] for index in wanted]
        return self._collate(samples)


class SeededReader:
    """Gives the dataset a seed for each sample that depends on nothing but the run's seed, the epoch and the index."""

    def __init__(self, get_sample: GetSample, collate: Collate, *, seed: int) -> None:
        self._get_sample = get_sample
        self._collate = collate
        self._seed = seed

    def read(self, indices: Tensor, epoch: int = 0) -> Any:
        """Return the collated samples."""
        return self._collate([self._get_sample(i, sample_seed(self._seed, epoch, i)) for i in indices.tolist()])


class _SubsetSamples:
    """Asks the whole dataset for the sample that has an index in the subset, with the seed of that index."""

    def __init__(self, get_sample: GetSample, indices: Sequence[int]) -> None:
        self._get_sample = get_sample
        self._indices = indices

    def __call__(self, index: int, seed: int) -> Any:
        return self._get_sample(self._indices[index], seed)


class Request(NamedTuple):
    """What a worker is asked for."""

    indices: Tensor
    seed: int
    """Of python, numpy and torch in the worker, while it reads."""
    epoch: int = 0


class WorkerPool:
    """Worker processes that read ahead, and stay alive from one epoch to the next if they are to be kept.

    Each request is read under its seed of python, numpy and torch, so that random augmentation does not depend
    on how many workers there are, nor on where a resumed run starts.
    """

    def __init__(self, reader: Reader, *, workers: int, pin_memory: bool, keep: bool) -> None:
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = DataLoader(
            _RequestDataset(reader),
            batch_sampler=self._requests,  # type: ignore[arg-type] # to the loader a request is the indices of one batch
            num_workers=workers,
            collate_fn=no_collate,
            pin_memory=pin_memory,
            persistent_workers=keep,
            # Its own generator: the loader would otherwise draw from the global one and change the run's randomness.
            generator=torch.Generator(),
        )

    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield the batch of each request; what is left of an earlier call is given up."""
        assert self._loader is not None
        self._requests.pending = iter(requests)
        return iter(self._loader)

    def close(self) -> None:
        """Let the workers end; may be called twice."""
        self._loader = None


def read_in_workers(reader: Reader, requests: Iterable[Request], *, workers: int, pin_memory: bool) -> Iterator[Any]:
    """Yield the batch of each request, read ahead by `workers` processes that end with the last one."""
    return WorkerPool(reader, workers=workers, pin_memory=pin_memory, keep=False).read(requests)


class _Requests:
    """What a loader takes for the indices of its batches."""

    def __init__(self) -> None:
        self.pending: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.pending


def request_seed(seed: int, epoch: int, position: int) -> int:
    """Return the seed under which a worker reads the samples that start at `position`."""
    return sample_seed(seed, epoch, position) % 2**63


class _RequestDataset(Dataset[Any]):
    """What runs in a worker: a request is for one micro-batch."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("samples are read by __getitems__")

    def __getitems__(self, request: Request) -> Any:
        seed_everything(request.seed)
        return self._reader.read(request.indices, request.epoch)


def no_collate(item: Any) -> Any:
    """Return what is given: samples are put together elsewhere, or not at all."""
    return item
