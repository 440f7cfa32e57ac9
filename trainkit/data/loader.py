"""The windows and evaluation batches that one rank reads."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from trainkit.data.batch import BatchPlan, MicroBatch, ShardsData, StepBatch
from trainkit.data.data import StageData
from trainkit.data.order import GlobalOrder, LengthGroupedOrder, WeightedOrder, sample_seed
from trainkit.data.readers import Request, WorkerPool, get_sample_of, make_reader, request_seed
from trainkit.data.sampler import Order, SamplerOrder
from trainkit.rng import preserve_rng, seed_everything
from trainkit.tree import num_rows, rows

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from trainkit.state import TrainState


class BatchLoader(ABC):
    """Reads one stage's data for one rank."""

    def __init__(self, source: StageData, strategy: ShardsData, *, seed: int, limit: int | None) -> None:
        self.source = source
        self.limit = limit
        self.seed = seed
        self.rank, self.world_size = strategy.comm.rank, strategy.comm.world_size
        self.seconds_waited = 0.0
        """How long `timed_batches` have kept the loop waiting."""

    @property
    @abstractmethod
    def num_steps(self) -> int | None:
        """Global batches of one epoch, all but for streams known beforehand."""

    @property
    @abstractmethod
    def epoch_length(self) -> int | None:
        """Items of one epoch (samples, or ready-made batches)."""

    @abstractmethod
    def step_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        """Yield this rank's windows of `epoch` from item `position` of the global order on."""

    @abstractmethod
    def batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's share of an evaluation: over all ranks each sample comes exactly once."""

    def timed_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        """Yield `step_batches`, counting the time until each of them is there; two looks at a clock for each."""
        step_batches, clock = self.step_batches(epoch, position), time.perf_counter
        while True:
            began = clock()
            step_batch = next(step_batches, None)
            self.seconds_waited += clock() - began
            if step_batch is None:
                return
            yield step_batch

    def check_order(self, strategy: ShardsData) -> str | None:
        """Return what a user's own sampler does not keep; raises UserError if ranks would draw apart. Collective."""
        sampler = self.source.sampler
        if sampler is None:
            return None
        order = SamplerOrder(sampler, seed=self.seed)
        return order.complaint(strategy.comm.all_gather_object(order.first()))

    def close(self) -> None:
        """Let worker processes end; may be called twice."""

    def example(self) -> MicroBatch | None:
        """Return this rank's first micro-batch, read apart from training; `None` for a stream, which is not read."""
        with preserve_rng():
            step_batch = next(self.step_batches(0, 0), None)
        return step_batch.micro_batches[0] if step_batch is not None and step_batch.micro_batches else None

    def _first_from(self, position: int) -> int:
        """Return how far after `position` this rank's next sample of an evaluation lies.

        Rank r has the samples r, r + W, r + 2W, ... of a whole evaluation, whatever sizes its batches have: so their
        predictions can be put in order again.
        """
        return (self.rank - position) % self.world_size

    def sample_indices(self, step: int, state: TrainState) -> list[int]:
        """Return the indices of the samples that this rank read for a step, where a dataset's order tells."""
        return []

    def read_step(self, step: int, state: TrainState) -> StepBatch | None:
        """Return this rank's window of an earlier step, read again; `None` for a stream. Draws from the generators."""
        return None

    def resplit(self, strategy: ShardsData) -> None:
        """Cut windows that are read from now on as the strategy plans it now."""

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return what a dataset that keeps its own position said when `position` items had been read."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give a dataset the position that it saved."""


class MapBatchLoader(BatchLoader):
    """A map-style dataset: global batch t takes the positions from t * batch_size to (t + 1) * batch_size."""

    def __init__(
        self, source: StageData, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        super().__init__(source, strategy, seed=seed, limit=limit)
        assert source.batch_size is not None
        self._batch_size = source.batch_size
        self._plan = strategy.plan(source.batch_size, even=source.stage == "train")
        self._repeat_first = repeat_first
        self._pool: WorkerPool | None = None
        self._reader = make_reader(source.dataset, source.collate, seed=seed)
        self._sampler = strategy.sampler(source.dataset, make_order(source, seed=seed))
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
        shares = (self._cut(epoch, start, min(start + self._batch_size, self._length)) for start in starts)
        for start, micro_batches in zip(starts, self._read_all(epoch, shares), strict=True):
            stop = min(start + self._batch_size, self._length)
            yield StepBatch(micro_batches, stop - start, stop - start, stop == self._length)

    def batches(self) -> Iterator[MicroBatch]:
        mine = self._sampler.share(0, 0, self._length)
        size = self._plan.micro_batch_size
        shares = ([chunk] for chunk in mine.split(size)) if len(mine) else iter(())
        for micro_batches in self._read_all(0, shares):
            yield from micro_batches

    def resplit(self, strategy: ShardsData) -> None:
        self._plan = strategy.plan(self._batch_size, even=self.source.stage == "train")

    def sample_indices(self, step: int, state: TrainState) -> list[int]:
        samples: list[int] = self._sampler.share(*self._place_of(step, state)).tolist()
        return samples

    def read_step(self, step: int, state: TrainState) -> StepBatch | None:
        epoch, start, stop = self._place_of(step, state)
        micro_batches = []
        for indices in self._cut(epoch, start, stop):
            if self.source.workers:
                seed_everything(request_seed(self.seed, epoch, int(indices[0])))  # as the worker was
            micro_batches.append(MicroBatch(self._reader.read(indices, epoch), len(indices)))
        return StepBatch(micro_batches, stop - start, stop - start, stop == self._length)

    def _place_of(self, step: int, state: TrainState) -> tuple[int, int, int]:
        """Return the epoch of an earlier step's global batch, and its positions there from the first to the last."""
        step_batches = state.epoch * self.num_steps + -(-state.position // self._batch_size)
        epoch, number = divmod(step_batches - (state.step - step) - 1, self.num_steps)
        start = number * self._batch_size
        return 0 if self._repeat_first else epoch, start, min(start + self._batch_size, self._length)

    def _used_length(self, num_samples: int) -> int:
        if self.limit is not None:
            num_samples = min(num_samples, self.limit * self._batch_size)
        if self.source.drop_last:
            num_samples -= num_samples % self._batch_size
        return num_samples

    def _cut(self, epoch: int, start: int, stop: int) -> list[Tensor]:
        """Return the indices of each of this rank's micro-batches of one global batch."""
        mine = self._sampler.share(epoch, start, stop)
        size = self._plan.micro_batch_size
        return [mine] if 0 < len(mine) <= size else list(mine.split(size)) if len(mine) else []

    def _read_all(self, epoch: int, shares: Iterator[list[Tensor]]) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each share, read here or ahead by worker processes."""
        if self.source.workers == 0:
            read = self._reader.read
            for share in shares:
                yield [MicroBatch(read(indices, epoch), len(indices)) for indices in share]
            return
        counts: deque[list[int]] = deque()  # of the shares that have been asked for and not been handed out

        def requests() -> Iterator[Request]:
            for share in shares:
                counts.append([len(indices) for indices in share])
                for indices in share:
                    yield Request(indices, request_seed(self.seed, epoch, int(indices[0])), epoch)

        yield from _grouped(self._workers().read(requests()), counts)

    def _workers(self) -> WorkerPool:
        if self._pool is None or not self.source.keep_workers:
            pin_memory = self.source.pin_memory and torch.cuda.is_available()
            workers, keep = self.source.workers, self.source.keep_workers
            self._pool = WorkerPool(self._reader, workers=workers, pin_memory=pin_memory, keep=keep)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _grouped(batches: Iterator[Any], counts: deque[list[int]]) -> Iterator[list[MicroBatch]]:
    """Yield consecutive batches as the micro-batches of their shares, whose numbers of samples are in `counts`."""
    micro_batches: list[MicroBatch] = []
    for batch in batches:
        while not counts[0]:  # a share before this batch in which this rank has no samples
            counts.popleft()
            yield []
        micro_batches.append(MicroBatch(batch, counts[0][len(micro_batches)]))
        if len(micro_batches) == len(counts[0]):
            counts.popleft()
            yield micro_batches
            micro_batches = []
    yield from ([] for _ in counts)


class PreBatchedLoader(BatchLoader):
    """Ready-made global batches: ranks take every W-th row, micro-batches take consecutive rows of those."""

    def __init__(
        self, source: StageData, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        super().__init__(source, strategy, seed=seed, limit=limit)
        self._order = make_order(source, seed=seed)
        self._plan_for: Callable[[int], BatchPlan] = partial(strategy.plan, even=False)
        self._repeat_first = repeat_first
        self._get_sample = get_sample_of(source.dataset)
        self._convert = None if source.collate is default_collate else source.collate
        self._converts_as_usual = self._convert is default_convert
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
            micro_batches = [MicroBatch(batch, count)] if self._undivided else self._cut(batch, count, first=self.rank)
            yield StepBatch(micro_batches, count, 1, offset == self._length)

    def batches(self) -> Iterator[MicroBatch]:
        position = 0
        for index in range(self._length):
            batch = self._item(index, 0)
            count = num_rows(batch)
            yield from self._cut(batch, count, first=self._first_from(position))
            position += count

    def read_step(self, step: int, state: TrainState) -> StepBatch | None:
        steps = state.epoch * self._length + state.position - (state.step - step) - 1
        epoch, position = divmod(steps, self._length)
        return next(self.step_batches(epoch, position))

    def _item(self, index: int, epoch: int) -> Any:
        if self._get_sample is None:
            item = self.source.dataset[index]
        else:
            item = self._get_sample(index, sample_seed(self.seed, epoch, index))
        if self._convert is None:
            return item
        if self._converts_as_usual and type(item) is list and all(type(part) is Tensor for part in item):
            return item  # a list of tensors is what the conversion would give
        return self._convert(item)

    def _cut(self, batch: Any, count: int, *, first: int) -> list[MicroBatch]:
        mine = rows(batch, slice(first, None, self.world_size), of=count)
        num_mine = len(range(first, count, self.world_size))
        size = self._plan_for(count).micro_batch_size
        return [
            MicroBatch(rows(mine, slice(start, start + size), of=num_mine), min(size, num_mine - start))
            for start in range(0, num_mine, size)
        ]


def make_order(source: StageData, *, seed: int) -> Order:
    """Return the order of an epoch of a source's samples, or of its ready-made batches."""
    if source.sampler is not None:
        return SamplerOrder(source.sampler, seed=seed)
    assert source.num_items is not None
    if source.lengths is not None and source.batch_size is not None:
        return LengthGroupedOrder(source.lengths, batch_size=source.batch_size, seed=seed, shuffle=source.shuffle)
    if source.weights is not None:
        return WeightedOrder(source.weights, source.num_items, seed=seed)
    own = getattr(source.dataset, "order", None)
    if own is not None and source.stage == "train":
        order: Order = own(seed=seed, shuffle=source.shuffle)
        return order
    return GlobalOrder(source.num_items, seed=seed, shuffle=source.shuffle)
