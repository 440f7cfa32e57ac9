"""The windows and evaluation batches that one rank reads."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from trainkit.batches import num_rows, rows
from trainkit.data import Source
from trainkit.errors import UserError
from trainkit.length_groups import LengthGroupedOrder
from trainkit.order import GlobalOrder, sample_seed
from trainkit.reading import Request, WorkerPool, get_sample_of, make_reader, request_seed, stream
from trainkit.rng import rng_untouched
from trainkit.sampling import Order, SamplerOrder
from trainkit.window import MicroBatch, Window

if TYPE_CHECKING:
    from trainkit.state import TrainState
    from trainkit.strategy import BatchPlan, Strategy

logger = logging.getLogger(__name__)

_STATES_KEPT = 4


class Feed(ABC):
    """Reads one stage's data for one rank."""

    def __init__(self, source: Source, strategy: Strategy, *, seed: int, limit: int | None) -> None:
        self.source = source
        self.limit = limit
        self.seed = seed
        self.rank, self.world_size = strategy.rank, strategy.world_size
        self.seconds_waited = 0.0
        """How long `timed_windows` have kept the loop waiting."""

    @property
    @abstractmethod
    def num_steps(self) -> int | None:
        """Global batches of one epoch, all but for streams known beforehand."""

    @property
    @abstractmethod
    def epoch_length(self) -> int | None:
        """Items of one epoch (samples, or ready-made batches)."""

    @abstractmethod
    def windows(self, epoch: int, position: int) -> Iterator[Window]:
        """Yield this rank's windows of `epoch` from item `position` of the global order on."""

    @abstractmethod
    def batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's share of an evaluation: over all ranks each sample comes exactly once."""

    def timed_windows(self, epoch: int, position: int) -> Iterator[Window]:
        """Yield `windows`, counting the time until each of them is there; two looks at a clock for each."""
        windows, clock = self.windows(epoch, position), time.perf_counter
        while True:
            began = clock()
            window = next(windows, None)
            self.seconds_waited += clock() - began
            if window is None:
                return
            yield window

    def close(self) -> None:
        """Let worker processes end; may be called twice."""

    def example(self) -> MicroBatch | None:
        """Return this rank's first micro-batch, read apart from training; `None` for a stream, which is not read."""
        with rng_untouched():
            window = next(self.windows(0, 0), None)
        return window.micro_batches[0] if window is not None and window.micro_batches else None

    def _first_from(self, position: int) -> int:
        """Return how far after `position` this rank's next sample of an evaluation lies.

        Rank r has the samples r, r + W, r + 2W, ... of a whole evaluation, whatever sizes its batches have: so their
        predictions can be put in order again.
        """
        return (self.rank - position) % self.world_size

    def samples_of(self, step: int, state: TrainState) -> list[int]:
        """Return the indices of the samples that this rank read for a step, where a dataset's order tells."""
        return []

    def cut_anew(self, strategy: Strategy) -> None:
        """Cut windows that are read from now on as the strategy plans it now."""

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return what a dataset that keeps its own position said when `position` items had been read."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give a dataset the position that it saved."""


def make_feed(
    source: Source, strategy: Strategy, *, seed: int, limit: int | None = None, repeat_first: bool = False
) -> Feed:
    """Return the feed for a source; `limit` global batches at most make an epoch.

    With `repeat_first` every epoch is the first one again: overfitting on the same few batches.
    """
    if source.is_stream:
        return StreamFeed(source, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
    if source.batch_size is None:
        return ReadyFeed(source, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
    return SampleFeed(source, strategy, seed=seed, limit=limit, repeat_first=repeat_first)


def _order(source: Source, *, seed: int) -> Order:
    if source.sampler is not None:
        return SamplerOrder(source.sampler, seed=seed)
    assert source.num_items is not None
    if source.lengths is not None and source.batch_size is not None:
        return LengthGroupedOrder(source.lengths, batch_size=source.batch_size, seed=seed, shuffle=source.shuffle)
    own = getattr(source.dataset, "order", None)
    if own is not None and source.stage == "train":
        order: Order = own(seed=seed, shuffle=source.shuffle)
        return order
    return GlobalOrder(source.num_items, seed=seed, shuffle=source.shuffle)


class SampleFeed(Feed):
    """A map-style dataset: global batch t takes the positions from t * batch_size to (t + 1) * batch_size."""

    def __init__(self, source: Source, strategy: Strategy, *, seed: int, limit: int | None, repeat_first: bool) -> None:
        super().__init__(source, strategy, seed=seed, limit=limit)
        assert source.batch_size is not None
        self._batch_size = source.batch_size
        self._plan = strategy.plan(source.batch_size, even=source.stage == "train")
        self._repeat_first = repeat_first
        self._pool: WorkerPool | None = None
        self._reader = make_reader(source.dataset, source.collate, seed=seed)
        self._sampler = strategy.sampler(source.dataset, _order(source, seed=seed))
        self._length = self._used_length(self._sampler.order.num_samples)

    @property
    def num_steps(self) -> int:
        return -(-self._length // self._batch_size)

    @property
    def epoch_length(self) -> int:
        return self._length

    def windows(self, epoch: int, position: int) -> Iterator[Window]:
        if self._repeat_first:
            epoch = 0
        starts = range(position, self._length, self._batch_size)
        shares = (self._cut(epoch, start, min(start + self._batch_size, self._length)) for start in starts)
        for start, micro_batches in zip(starts, self._read_all(epoch, shares), strict=True):
            stop = min(start + self._batch_size, self._length)
            yield Window(micro_batches, stop - start, stop - start, stop == self._length)

    def batches(self) -> Iterator[MicroBatch]:
        mine = self._sampler.share(0, 0, self._length)
        size = self._plan.micro_batch_size
        shares = ([chunk] for chunk in mine.split(size)) if len(mine) else iter(())
        for micro_batches in self._read_all(0, shares):
            yield from micro_batches

    def cut_anew(self, strategy: Strategy) -> None:
        self._plan = strategy.plan(self._batch_size, even=self.source.stage == "train")

    def samples_of(self, step: int, state: TrainState) -> list[int]:
        windows = state.epoch * self.num_steps + -(-state.position // self._batch_size)
        epoch, number = divmod(windows - (state.step - step) - 1, self.num_steps)
        start = number * self._batch_size
        stop = min(start + self._batch_size, self._length)
        samples: list[int] = self._sampler.share(0 if self._repeat_first else epoch, start, stop).tolist()
        return samples

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


class ReadyFeed(Feed):
    """Ready-made global batches: ranks take every W-th row, micro-batches take consecutive rows of those."""

    def __init__(self, source: Source, strategy: Strategy, *, seed: int, limit: int | None, repeat_first: bool) -> None:
        super().__init__(source, strategy, seed=seed, limit=limit)
        self._order = _order(source, seed=seed)
        self._plan_for: Callable[[int], BatchPlan] = partial(strategy.plan, even=False)
        self._repeat_first = repeat_first
        self._get_sample = get_sample_of(source.dataset)
        self._convert = None if source.collate is default_collate else source.collate
        self._converts_as_usual = self._convert is default_convert
        self._length = min(self._order.num_samples, limit or self._order.num_samples)
        self._undivided = strategy.world_size == 1 and strategy.micro_batches_of_a_step == 1

    @property
    def num_steps(self) -> int:
        return self._length

    @property
    def epoch_length(self) -> int:
        return self._length

    def windows(self, epoch: int, position: int) -> Iterator[Window]:
        if self._repeat_first:
            epoch = 0
        indices = self._order.slice(epoch, position, self._length).tolist()
        for offset, index in enumerate(indices, start=position + 1):
            batch = self._item(index, epoch)
            count = num_rows(batch)
            micro_batches = [MicroBatch(batch, count)] if self._undivided else self._cut(batch, count, first=self.rank)
            yield Window(micro_batches, count, 1, offset == self._length)

    def batches(self) -> Iterator[MicroBatch]:
        position = 0
        for index in range(self._length):
            batch = self._item(index, 0)
            count = num_rows(batch)
            yield from self._cut(batch, count, first=self._first_from(position))
            position += count

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


class StreamFeed(Feed):
    """An iterable dataset, read in its own order by every rank: of each global batch a rank keeps every W-th sample."""

    def __init__(self, source: Source, strategy: Strategy, *, seed: int, limit: int | None, repeat_first: bool) -> None:
        super().__init__(source, strategy, seed=seed, limit=limit)
        assert source.batch_size is not None
        self._batch_size = source.batch_size
        self._plan = strategy.plan(source.batch_size, even=source.stage == "train")
        self._repeat_first = repeat_first
        self._states: dict[int, dict[str, Any]] = {}  # position -> the dataset's own state there
        self._restored: dict[str, Any] = {}
        self._keeps_position = source.workers == 0 and hasattr(source.dataset, "state_dict")

    @property
    def num_steps(self) -> int | None:
        length = self.epoch_length
        return None if length is None else -(-length // self._batch_size)

    @property
    def epoch_length(self) -> int | None:
        length = self.source.num_items
        most = None if self.limit is None else self.limit * self._batch_size
        return most if length is None else min(length, most or length)

    def windows(self, epoch: int, position: int) -> Iterator[Window]:
        set_epoch = getattr(self.source.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(0 if self._repeat_first else epoch)
        self._states.clear()
        samples = self._from(position)
        steps_before = position // self._batch_size
        steps_left = None if self.limit is None else self.limit - steps_before
        following = self._take(samples, position)
        while following:
            window, state = following, self._dataset_state()
            position += len(window)
            if steps_left is not None:
                steps_left -= 1
            # The next window is read before this one is handed out, to know whether this one ends the epoch.
            following = [] if steps_left == 0 else self._take(samples, position)
            self._remember(position, state)
            mine = self._micro_batches(window[self.rank :: self.world_size])
            yield Window(mine, len(window), len(window), not following)

    def batches(self) -> Iterator[MicroBatch]:
        samples = stream(self.source.dataset, workers=self.source.workers)
        for number in range(self.limit) if self.limit is not None else count():
            window = self._take(samples, number)
            if not window:
                return
            first = self._first_from(number * self._batch_size)
            yield from self._micro_batches(window[first :: self.world_size])

    def example(self) -> MicroBatch | None:
        return None

    def cut_anew(self, strategy: Strategy) -> None:
        self._plan = strategy.plan(self._batch_size, even=self.source.stage == "train")

    def state_dict(self, position: int) -> dict[str, Any]:
        return {"position": position, "dataset": self._states[position]} if position in self._states else {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._restored = saved

    def _dataset_state(self) -> dict[str, Any]:
        return dict(self.source.dataset.state_dict()) if self._keeps_position else {}

    def _remember(self, position: int, state: dict[str, Any]) -> None:
        """Keep the states of the last windows: windows may be read ahead of the one that is trained on."""
        if self._keeps_position:
            self._states[position] = state
            for old in sorted(self._states)[:-_STATES_KEPT]:
                del self._states[old]

    def _from(self, position: int) -> Iterator[Any]:
        """Return the stream from item `position` on: by the dataset's own state, else by reading up to it."""
        restored, self._restored = self._restored, {}
        if position and restored.get("position") == position:
            self.source.dataset.load_state_dict(restored["dataset"])
            return stream(self.source.dataset, workers=self.source.workers)
        samples = stream(self.source.dataset, workers=self.source.workers)
        if position:
            logger.warning(
                "the training stream keeps no position of its own (state_dict and load_state_dict): its first %d "
                "samples are read again and skipped; random numbers that it draws are not restored.",
                position,
            )
            deque(islice(samples, position), maxlen=0)
        return samples

    def _take(self, samples: Iterator[Any], taken: int) -> list[Any]:
        """Return the samples of the next global batch; raises UserError for a stream from which none was `taken`."""
        window = list(islice(samples, self._batch_size))
        if not window and taken == 0:
            raise UserError(f"the {self.source.stage} stream gave no sample; check where its samples come from.")
        return [] if self.source.drop_last and len(window) < self._batch_size else window

    def _micro_batches(self, mine: list[Any]) -> list[MicroBatch]:
        size = self._plan.micro_batch_size
        chunks = [mine[start : start + size] for start in range(0, len(mine), size)]
        return [MicroBatch(self.source.collate(chunk), len(chunk)) for chunk in chunks]
