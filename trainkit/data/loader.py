"""BatchLoader: the step batches and evaluation batches that one rank reads."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from trainkit.data.batch import BatchPlan, MicroBatch, ShardsData, StepBatch
from trainkit.data.data import StageData
from trainkit.data.order import GlobalOrder, LengthGroupedOrder, WeightedOrder, sample_seed
from trainkit.data.readers import Request, WorkerPool, get_sample_of, make_reader, request_seed
from trainkit.data.sampler import Order, SamplerOrder
from trainkit.rng import preserve_rng, seed_everything
from trainkit.state import TrainState
from trainkit.tree import num_rows, rows


class BatchLoader(ABC):
    """Reads one stage's data for one rank; `limit` global batches at most make an epoch.

    With `repeat_first` every epoch reads the samples of epoch 0.
    """

    def __init__(
        self, stage_data: StageData, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        self.stage_data = stage_data
        self.limit = limit
        self.seed = seed
        self._repeat_first = repeat_first
        self.rank, self.world_size = strategy.comm.rank, strategy.comm.world_size
        self.seconds_waited = 0.0
        """Seconds that the loop has waited for `timed_batches`."""

    @property
    @abstractmethod
    def num_steps(self) -> int | None:
        """Global batches of one epoch; `None` for an iterable dataset without a length."""

    @property
    @abstractmethod
    def epoch_length(self) -> int | None:
        """Samples (or pre-batched items) of one epoch; `None` for an iterable dataset without a length."""

    @abstractmethod
    def step_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        """Yield this rank's step batches of `epoch`, from `position` of the global order on."""

    @abstractmethod
    def batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's shard of an evaluation; over all ranks each sample comes exactly once."""

    def timed_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        """Yield `step_batches` and add the time of each read to `seconds_waited`; two clock reads per step."""
        step_batches, clock = self.step_batches(epoch, position), time.perf_counter
        while True:
            began = clock()
            step_batch = next(step_batches, None)
            self.seconds_waited += clock() - began
            if step_batch is None:
                return
            yield step_batch

    def check_order(self, strategy: ShardsData) -> str | None:
        """Return a warning if a resume would change the order of a custom sampler, else `None`; collective.

        Raises UserError if the ranks' orders differ.
        """
        sampler = self.stage_data.sampler
        if sampler is None:
            return None
        order = SamplerOrder(sampler, seed=self.seed)
        return order.check(strategy.comm.all_gather_object(order.first_indices()))

    def close(self) -> None:
        """End worker processes; may be called twice."""

    def first_micro_batch(self) -> MicroBatch | None:
        """Return this rank's first micro-batch, read separately from training; `None` for an iterable dataset."""
        with preserve_rng():
            step_batch = next(self.step_batches(0, 0), None)
        return step_batch.micro_batches[0] if step_batch is not None and step_batch.micro_batches else None

    def _first_from(self, position: int) -> int:
        """Return the distance from `position` to this rank's next sample of an evaluation.

        Rank r has the samples r, r + W, r + 2W, ... of the evaluation, independent of batch sizes, so that predictions
        can be put back in order.
        """
        return (self.rank - position) % self.world_size

    def sample_indices(self, step: int, state: TrainState) -> list[int]:
        """Return the indices of the samples that this rank read for a step; empty if the order does not define them."""
        return []

    def read_step(self, step: int, state: TrainState) -> StepBatch | None:
        """Read this rank's batch of an earlier step again; `None` for an iterable dataset. Changes the RNG state."""
        return None

    def resplit(self, strategy: ShardsData) -> None:
        """Split the step batches that are read from now on by the strategy's current plan."""

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return the saved state of an iterable dataset after `position` items; empty if it has none."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume an iterable dataset from a `state_dict`."""


class MapBatchLoader(BatchLoader):
    """Reads a map-style dataset: global batch t takes positions t * batch_size to (t + 1) * batch_size."""

    def __init__(
        self, stage_data: StageData, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        super().__init__(stage_data, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
        assert stage_data.batch_size is not None
        self._batch_size = stage_data.batch_size
        self._plan = strategy.plan(stage_data.batch_size, even=stage_data.stage == "train")
        self._pool: WorkerPool | None = None
        self._reader = make_reader(stage_data.dataset, stage_data.collate_fn, seed=seed)
        self._sampler = strategy.sampler(stage_data.dataset, make_order(stage_data, seed=seed))
        self._length = self._used_length(self._sampler.order.num_samples)

    @property
    def num_steps(self) -> int:
        return -(-self._length // self._batch_size)

    @property
    def epoch_length(self) -> int:
        return self._length

    def step_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        if self._repeat_first:
            epoch = 0
        starts = range(position, self._length, self._batch_size)
        steps = (self._indices(epoch, start, min(start + self._batch_size, self._length)) for start in starts)
        for start, micro_batches in zip(starts, self._read(epoch, steps), strict=True):
            stop = min(start + self._batch_size, self._length)
            yield StepBatch(micro_batches, stop - start, stop - start, stop == self._length)

    def batches(self) -> Iterator[MicroBatch]:
        chunks = self._split(self._sampler.shard(0, 0, self._length))
        for micro_batches in self._read(0, ([chunk] for chunk in chunks)):
            yield from micro_batches

    def resplit(self, strategy: ShardsData) -> None:
        self._plan = strategy.plan(self._batch_size, even=self.stage_data.stage == "train")

    def sample_indices(self, step: int, state: TrainState) -> list[int]:
        samples: list[int] = self._sampler.shard(*self._step_range(step, state)).tolist()
        return samples

    def read_step(self, step: int, state: TrainState) -> StepBatch | None:
        epoch, start, stop = self._step_range(step, state)
        micro_batches = []
        for indices in self._indices(epoch, start, stop):
            if self.stage_data.num_workers:
                seed_everything(request_seed(self.seed, epoch, int(indices[0])))  # as in the worker
            micro_batches.append(MicroBatch(self._reader.read(indices, epoch), len(indices)))
        return StepBatch(micro_batches, stop - start, stop - start, stop == self._length)

    def _step_range(self, step: int, state: TrainState) -> tuple[int, int, int]:
        """Return the epoch of an earlier step, and the start and stop positions of its global batch."""
        steps = state.epoch * self.num_steps + -(-state.position // self._batch_size)
        epoch, number = divmod(steps - (state.step - step) - 1, self.num_steps)
        start = number * self._batch_size
        return 0 if self._repeat_first else epoch, start, min(start + self._batch_size, self._length)

    def _used_length(self, num_samples: int) -> int:
        if self.limit is not None:
            num_samples = min(num_samples, self.limit * self._batch_size)
        if self.stage_data.drop_last:
            num_samples -= num_samples % self._batch_size
        return num_samples

    def _indices(self, epoch: int, start: int, stop: int) -> list[Tensor]:
        """Return the indices of each of this rank's micro-batches of one global batch."""
        return self._split(self._sampler.shard(epoch, start, stop))

    def _split(self, indices: Tensor) -> list[Tensor]:
        size = self._plan.micro_batch_size
        return [indices] if 0 < len(indices) <= size else list(indices.split(size)) if len(indices) else []

    def _read(self, epoch: int, steps: Iterator[list[Tensor]]) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step, given their indices; read here or ahead by worker processes."""
        if self.stage_data.num_workers == 0:
            read = self._reader.read
            for step in steps:
                yield [MicroBatch(read(indices, epoch), len(indices)) for indices in step]
            return
        sizes: deque[list[int]] = deque()  # samples of each micro-batch, for steps that are requested but not yielded

        def requests() -> Iterator[Request]:
            for step in steps:
                sizes.append([len(indices) for indices in step])
                for indices in step:
                    yield Request(indices, request_seed(self.seed, epoch, int(indices[0])), epoch)

        yield from _grouped(self._workers().read(requests()), sizes)

    def _workers(self) -> WorkerPool:
        if self._pool is None or not self.stage_data.persistent_workers:
            self._pool = WorkerPool(
                self._reader,
                num_workers=self.stage_data.num_workers,
                pin_memory=self.stage_data.pin_memory and torch.cuda.is_available(),
                persistent=self.stage_data.persistent_workers,
            )
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _grouped(batches: Iterator[Any], sizes: deque[list[int]]) -> Iterator[list[MicroBatch]]:
    """Yield consecutive batches as the micro-batches of each step; `sizes` has their numbers of samples."""
    micro_batches: list[MicroBatch] = []
    for batch in batches:
        while not sizes[0]:  # a step before this batch in which this rank has no samples
            sizes.popleft()
            yield []
        micro_batches.append(MicroBatch(batch, sizes[0][len(micro_batches)]))
        if len(micro_batches) == len(sizes[0]):
            sizes.popleft()
            yield micro_batches
            micro_batches = []
    yield from ([] for _ in sizes)


class PreBatchedLoader(BatchLoader):
    """Reads a pre-batched dataset: ranks take every W-th row, and micro-batches consecutive rows of those."""

    def __init__(
        self, stage_data: StageData, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        super().__init__(stage_data, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
        self._order = make_order(stage_data, seed=seed)
        self._plan_for: Callable[[int], BatchPlan] = partial(strategy.plan, even=False)
        self._get_sample = get_sample_of(stage_data.dataset)
        self._convert = None if stage_data.collate_fn is default_collate else stage_data.collate_fn
        self._is_default_convert = self._convert is default_convert
        self._length = min(self._order.num_samples, limit or self._order.num_samples)
        self._undivided = strategy.comm.world_size == 1 and strategy.num_micro_batches == 1

    @property
    def num_steps(self) -> int:
        return self._length

    @property
    def epoch_length(self) -> int:
        return self._length

    def step_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        if self._repeat_first:
            epoch = 0
        indices = self._order.slice(epoch, position, self._length).tolist()
        for offset, index in enumerate(indices, start=position + 1):
            batch = self._item(index, epoch)
            count = num_rows(batch)
            micro_batches = (
                [MicroBatch(batch, count)] if self._undivided else self._split(batch, count, first=self.rank)
            )
            yield StepBatch(micro_batches, count, 1, offset == self._length)

    def batches(self) -> Iterator[MicroBatch]:
        position = 0
        for index in range(self._length):
            batch = self._item(index, 0)
            count = num_rows(batch)
            yield from self._split(batch, count, first=self._first_from(position))
            position += count

    def read_step(self, step: int, state: TrainState) -> StepBatch | None:
        steps = state.epoch * self._length + state.position - (state.step - step) - 1
        epoch, position = divmod(steps, self._length)
        return next(self.step_batches(epoch, position))

    def _item(self, index: int, epoch: int) -> Any:
        if self._get_sample is None:
            item = self.stage_data.dataset[index]
        else:
            item = self._get_sample(index, sample_seed(self.seed, epoch, index))
        if self._convert is None:
            return item
        if self._is_default_convert and type(item) is list and all(type(element) is Tensor for element in item):
            return item  # the conversion would return an equal list
        return self._convert(item)

    def _split(self, batch: Any, count: int, *, first: int) -> list[MicroBatch]:
        mine = rows(batch, slice(first, None, self.world_size), of=count)
        num_mine = len(range(first, count, self.world_size))
        size = self._plan_for(count).micro_batch_size
        return [
            MicroBatch(rows(mine, slice(start, start + size), of=num_mine), min(size, num_mine - start))
            for start in range(0, num_mine, size)
        ]


def make_order(stage_data: StageData, *, seed: int) -> Order:
    """Return the order of a dataset's samples, or of its pre-batched items."""
    if stage_data.sampler is not None:
        return SamplerOrder(stage_data.sampler, seed=seed)
    assert stage_data.num_items is not None
    shuffle = stage_data.shuffle
    if stage_data.lengths is not None and stage_data.batch_size is not None:
        return LengthGroupedOrder(stage_data.lengths, batch_size=stage_data.batch_size, seed=seed, shuffle=shuffle)
    if stage_data.sample_weights is not None:
        return WeightedOrder(stage_data.sample_weights, stage_data.num_items, seed=seed)
    order_of_dataset = getattr(stage_data.dataset, "order", None)
    if order_of_dataset is not None and stage_data.stage == "train":
        order: Order = order_of_dataset(seed=seed, shuffle=shuffle)
        return order
    return GlobalOrder(stage_data.num_items, seed=seed, shuffle=shuffle)
