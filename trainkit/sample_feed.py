"""Reading a dataset of samples: who reads which of a global batch, here or in worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.data import Source
from trainkit.feed import Feed, order_of
from trainkit.reading import Request, WorkerPool, make_reader, request_seed
from trainkit.rng import seed_everything
from trainkit.window import MicroBatch, ShardsData, Window

if TYPE_CHECKING:
    from trainkit.state import TrainState


class SampleFeed(Feed):
    """A map-style dataset: global batch t takes the positions from t * batch_size to (t + 1) * batch_size."""

    def __init__(
        self, source: Source, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        super().__init__(source, strategy, seed=seed, limit=limit)
        assert source.batch_size is not None
        self._batch_size = source.batch_size
        self._plan = strategy.plan(source.batch_size, even=source.stage == "train")
        self._repeat_first = repeat_first
        self._pool: WorkerPool | None = None
        self._reader = make_reader(source.dataset, source.collate, seed=seed)
        self._sampler = strategy.sampler(source.dataset, order_of(source, seed=seed))
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

    def cut_anew(self, strategy: ShardsData) -> None:
        self._plan = strategy.plan(self._batch_size, even=self.source.stage == "train")

    def samples_of(self, step: int, state: TrainState) -> list[int]:
        samples: list[int] = self._sampler.share(*self._place_of(step, state)).tolist()
        return samples

    def window_of(self, step: int, state: TrainState) -> Window | None:
        epoch, start, stop = self._place_of(step, state)
        micro_batches = []
        for indices in self._cut(epoch, start, stop):
            if self.source.workers:
                seed_everything(request_seed(self.seed, epoch, int(indices[0])))  # as the worker was
            micro_batches.append(MicroBatch(self._reader.read(indices, epoch), len(indices)))
        return Window(micro_batches, stop - start, stop - start, stop == self._length)

    def _place_of(self, step: int, state: TrainState) -> tuple[int, int, int]:
        """Return the epoch of an earlier step's global batch, and its positions there from the first to the last."""
        windows = state.epoch * self.num_steps + -(-state.position // self._batch_size)
        epoch, number = divmod(windows - (state.step - step) - 1, self.num_steps)
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
