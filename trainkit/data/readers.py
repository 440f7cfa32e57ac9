"""Readers: sample indices to a collated batch, in this process or in worker processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils import worker

from trainkit.data.order import sample_seed
from trainkit.errors import UserError
from trainkit.files import reason
from trainkit.rng import DrawSeeds, seed_cpu, seed_everything

BEFORE_FIRST = -1
"""The position that seeds the beginning of an iteration, before the first sample."""
_PIPES = 4  # files that the pipes of a worker hold open, and those of all workers together

Collate = Callable[[list[Any]], Any]
StartWorker = Callable[[int], None]
"""Takes the number of a worker process, when it starts."""
GetSample = Callable[[int, int], Any]
"""Takes an index and the seed for the randomness of that sample; returns the sample."""
Reader = Callable[[Tensor, int], Any]
"""Takes indices (int64, one dimension) and the epoch; returns the batch of the samples at these indices.

The indices may have a second row: their positions in the epoch, which seed samples that can come twice in it.
"""


def make_reader(dataset: Any, collate_fn: Collate, *, seed: int = 0, seed_samples: bool = True) -> Reader:
    """Return the fastest reader whose batches equal those of `collate_fn` over single samples.

    A dataset's `get_sample` is preferred to its `__getitems__`, and that to its `__getitem__`. `seed` is the run's.
    """
    if collate_fn is default_collate and get_sample_of(dataset) is None:
        # Not for a subclass, which may define `__getitem__`.
        if type(dataset) is TensorDataset:
            return partial(read_rows, dataset.tensors, None)
        if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
            return partial(read_rows, dataset.dataset.tensors, torch.as_tensor(dataset.indices, dtype=torch.int64))
    return SampleReader(dataset, collate_fn, seed=seed, seed_samples=seed_samples)


def get_sample_of(dataset: Any) -> GetSample | None:
    """Return the `get_sample` method of a dataset, or of the dataset below a Subset; `None` if there is none."""
    if type(dataset) is Subset:
        of_full_dataset = get_sample_of(dataset.dataset)
        return None if of_full_dataset is None else partial(_get_from_subset, of_full_dataset, dataset.indices)
    get_sample: GetSample | None = getattr(dataset, "get_sample", None)
    return get_sample


def _get_from_subset(get_sample: GetSample, indices: Sequence[int], index: int, seed: int) -> Any:
    return get_sample(indices[index], seed)  # the seed is that of the index in the subset


def read_rows(tensors: Sequence[Tensor], subset: Tensor | None, indices: Tensor, epoch: int) -> list[Tensor]:
    """Gather the rows of each tensor in one operation; return a list, as `default_collate` makes of tuples."""
    if indices.dim() == 2:
        indices = indices[0]
    if subset is not None:
        indices = subset[indices]
    return [tensor.index_select(0, indices) for tensor in tensors]


class SampleReader:
    """Reads samples and collates them; what they draw depends only on the run's seed, the epoch and the index.

    Before each sample it seeds the global generators that reading draws from, and again before the collate function.
    The draws of the process itself do not depend on what is read.
    """

    def __init__(self, dataset: Any, collate_fn: Collate, *, seed: int, seed_samples: bool = True) -> None:
        self._dataset, self._collate_fn, self._seed = dataset, collate_fn, seed
        self._get_sample = get_sample_of(dataset)
        self._getitems = None if self._get_sample else getattr(dataset, "__getitems__", None)
        self._gives_samples = True  # of `__getitems__`: one for each index
        self._draws_nothing = type(dataset) in (list, tuple) and collate_fn in (default_collate, _item, _converted_item)
        self._finds_draws = seed_samples
        self._draws = DrawSeeds()

    def __call__(self, indices: Tensor, epoch: int) -> Any:
        """Return the batch of the samples at `indices`."""
        rows = indices.tolist()
        wanted, numbers = rows if indices.dim() == 2 else (rows, rows)
        return self.read(wanted, numbers, epoch)

    def read(self, indices: list[int], numbers: list[int], epoch: int) -> Any:
        """Return the batch of the samples at `indices`, of which the numbers give the seeds."""
        if self._draws_nothing:  # without the calls below, which a step of a small task would notice
            return collate(self._collate_fn, [self._dataset[index] for index in indices])
        if self._finds_draws:
            return self._draws.call(self._read, indices, numbers, epoch)
        return self._read(indices, numbers, epoch)

    def _read(self, indices: list[int], numbers: list[int], epoch: int) -> Any:
        samples = self._samples(indices, numbers, epoch)
        if self._draws.drawn:
            self._draws.seed(sample_seed(self._seed, epoch, ~numbers[0]))  # a number that no sample has
        return collate(self._collate_fn, samples)

    def _samples(self, indices: list[int], numbers: list[int], epoch: int) -> Any:
        is_drawing = bool(self._draws.drawn)
        if self._getitems is not None and not (is_drawing and self._gives_samples):
            # One seed for the batch, as a `__getitems__` reads it at once; replaced by single samples if it draws.
            self._draws.seed(sample_seed(self._seed, epoch, numbers[0]))
            samples = self._getitems(indices)
            self._gives_samples = isinstance(samples, Sequence) and len(samples) == len(indices)
            return samples
        if self._get_sample is None and not is_drawing:
            return [self._dataset[index] for index in indices]
        seeds = [sample_seed(self._seed, epoch, number) for number in numbers]
        return [self._sample(index, seed) for index, seed in zip(indices, seeds, strict=True)]

    def _sample(self, index: int, seed: int) -> Any:
        self._draws.seed(seed)
        if self._get_sample is not None:
            return self._get_sample(index, seed)
        return self._dataset[index] if self._getitems is None else self._getitems([index])[0]


def of_item(convert: Collate) -> Collate:
    """Return the collate function of a pre-batched dataset, whose items are read one by one."""
    if convert is default_collate:
        return _item
    return _converted_item if convert is default_convert else partial(_only, convert)


def _item(items: list[Any]) -> Any:
    return items[0]


def _converted_item(items: list[Any]) -> Any:
    item = items[0]
    if type(item) is list and all(type(element) is Tensor for element in item):
        return item  # the conversion would return an equal list
    return default_convert(item)


def _only(convert: Collate, items: list[Any]) -> Any:
    return convert(items[0])


def collate(collate_fn: Collate, samples: list[Any]) -> Any:
    """Return samples as a batch; raises UserError for samples that the default function cannot stack."""
    try:
        return collate_fn(samples)
    except (RuntimeError, TypeError) as error:
        # By words of its messages: torch has no exception type for them.
        if collate_fn is not default_collate or not any(word in str(error) for word in ("equal size", "collate")):
            raise
        raise UserError(
            f"the samples cannot be made a batch: {error}. Pass Data(collate_fn=function), where the function takes a "
            "list of samples and returns a batch, for example with torch.nn.utils.rnn.pad_sequence; or wrap sequences "
            "of tokens in trainkit.Packed, which joins them to rows of one length."
        ) from None


def start_worker(number: int, *, dataset: Any = None, worker_init_fn: StartWorker | None = None) -> None:
    """Prepare a worker process, and call a DataLoader's `worker_init_fn`; `get_worker_info` then has its dataset."""
    gc.freeze()  # what is inherited is never collected: the end of a process group waits for threads that no worker has
    if worker_init_fn is not None:
        info = get_worker_info()
        assert info is not None  # in a worker
        # Private, as torch has no public way to change it. The worker's own dataset has requests, not the user's
        # samples.
        worker._worker_info = worker.WorkerInfo(
            id=number, num_workers=info.num_workers, seed=info.seed, dataset=dataset
        )
        worker_init_fn(number)


class Request(NamedTuple):
    """The samples of one micro-batch, for a worker to read."""

    indices: Tensor
    """As a `Reader` takes them."""
    seed: int
    """Seed of python, numpy and torch in the worker while it reads."""
    epoch: int = 0


class WorkerPool:
    """Worker processes that read ahead; persistent ones stay alive between epochs, until the pool is deleted.

    Each request is read under its own seed, so random augmentation depends neither on the number of workers nor on the
    step at which a run is resumed.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        num_workers: int,
        pin_memory: bool,
        persistent: bool,
        start: StartWorker = start_worker,
    ) -> None:
        self._requests = _Requests()
        self._loader: DataLoader[Any] = DataLoader(
            _RequestDataset(reader),
            batch_sampler=self._requests,  # type: ignore[arg-type] # to the loader a request is the indices of one batch
            num_workers=num_workers,
            collate_fn=_no_collate,
            pin_memory=pin_memory,
            persistent_workers=persistent,
            worker_init_fn=start,
            # A separate generator: the loader would otherwise draw from the global one and change the run's randomness.
            generator=torch.Generator(),
        )

    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield the batch of each request; unread requests of an earlier call are dropped."""
        self._requests.pending = iter(requests)
        return _WorkerItems(self._loader)


class _Requests:
    """The batch sampler of the loader; its batches of indices are requests."""

    def __init__(self) -> None:
        self.pending: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.pending


def request_seed(seed: int, epoch: int, position: int) -> int:
    """Return the seed under which the samples that start at `position` are read."""
    return sample_seed(seed, epoch, position) % 2**63


class _RequestDataset(Dataset[Any]):
    """The dataset in a worker; reads one request as one batch."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitems__(self, request: Request) -> Any:
        # In the worker: its generators are used for nothing else, and each request begins with its own seed.
        seed_everything(request.seed)
        return self._reader(request.indices, request.epoch)


def state_of(dataset: Any) -> dict[str, Any]:
    """Return a copy of a dataset's state, which stays as it is while the dataset continues."""
    return deepcopy(dict(dataset.state_dict()))


class WorkerIterator(Iterator[Any]):
    """Yields the items of an iterable dataset in order, read by one worker process, at most `ahead` items ahead."""

    def __init__(
        self, dataset: IterableDataset[Any], *, seed: int, ahead: int = 2, start: StartWorker = start_worker
    ) -> None:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            num_workers=1,
            prefetch_factor=ahead,
            collate_fn=_no_collate,
            worker_init_fn=start,
            # The loader draws the base seed of its worker from this generator, and nothing from the run's.
            generator=torch.Generator().manual_seed(seed),
        )
        self._items = _WorkerItems(loader)  # starts the worker, with the dataset as it is now

    def __next__(self) -> Any:
        return next(self._items)


class StreamInWorker(Iterator[Any]):
    """Yields the samples of an iterable dataset that a worker reads ahead, from the state `begins_at` if it is given.

    worker        a b c d (state after d) e f g h (state after h) ...
    this process  a b c d      state      e f g h      state      ...

    The samples of each global batch of `batch_size` are read under the seed that `seed_at` has for its position; the
    first one has `position`. With `reports_state` the state after each global batch is sent.
    """

    def __init__(
        self,
        dataset: Any,
        seed_at: Callable[[int], int],
        *,
        position: int,
        batch_size: int,
        begins_at: dict[str, Any] | None,
        reports_state: bool,
        start: StartWorker = start_worker,
    ) -> None:
        self.state: dict[str, Any] = {}
        """The state after the last sample; empty within a global batch."""
        stream = _SeededStream(dataset, seed_at, position, batch_size, begins_at, reports_state)
        self._items = WorkerIterator(stream, seed=seed_at(position), start=start)

    def __next__(self) -> Any:
        sample, state = next(self._items)
        self.state = state or {}
        return sample


@dataclass
class _SeededStream(IterableDataset[Any]):
    """The dataset in the worker; yields pairs of a sample and a state or `None`."""

    dataset: Any
    seed_at: Callable[[int], int]
    position: int
    batch_size: int
    begins_at: dict[str, Any] | None
    reports_state: bool

    def __iter__(self) -> Iterator[Any]:
        seed_cpu(self.seed_at(BEFORE_FIRST))
        if self.begins_at is not None:
            self.dataset.load_state_dict(self.begins_at)
        samples = iter(self.dataset)
        for position in count(self.position, self.batch_size):
            # The generators of a worker are used for nothing else, and each global batch begins with its own seed.
            seed_cpu(self.seed_at(position))
            number = 0
            for number, sample in enumerate(islice(samples, self.batch_size), start=1):
                is_last = number == self.batch_size and self.reports_state
                yield sample, state_of(self.dataset) if is_last else None
            if number < self.batch_size:
                return


class _WorkerItems(Iterator[Any]):
    """The items of a DataLoader, whose workers end at once if this iterator is dropped, even in a reference cycle.

    The garbage collector would end the threads of their queues before the DataLoader tells them to end, and then waits
    5 seconds for each.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        _check_open_files(loader.num_workers)
        # In a list, which the finalizer can clear without holding this object.
        self._iterator = [iter(loader)]
        finalize(self, self._iterator.clear).atexit = False  # it holds the list: no cycle has the queues alone

    def __next__(self) -> Any:
        return next(self._iterator[0])


def _check_open_files(num_workers: int) -> None:
    """Raise UserError if the process may not open the pipes of that many workers: half of them could not be ended."""
    with ExitStack() as opened:
        try:
            for _ in range(_PIPES * (num_workers + 1)):
                opened.enter_context(open(os.devnull))
        except OSError as error:
            raise UserError(f"{num_workers} data workers cannot be started: {reason(error)}.") from error


def _no_collate(item: Any) -> Any:
    return item
