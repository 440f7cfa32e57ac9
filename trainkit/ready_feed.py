"""Reading a dataset whose items are global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import default_collate, default_convert

from trainkit.batches import num_rows, rows
from trainkit.data import Source
from trainkit.feed import Feed, order_of
from trainkit.order import sample_seed
from trainkit.reading import get_sample_of
from trainkit.window import BatchPlan, MicroBatch, ShardsData, Window

if TYPE_CHECKING:
    from trainkit.state import TrainState


class ReadyFeed(Feed):
    """Ready-made global batches: ranks take every W-th row, micro-batches take consecutive rows of those."""

    def __init__(
        self, source: Source, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        super().__init__(source, strategy, seed=seed, limit=limit)
        self._order = order_of(source, seed=seed)
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

    def window_of(self, step: int, state: TrainState) -> Window | None:
        steps = state.epoch * self._length + state.position - (state.step - step) - 1
        epoch, position = divmod(steps, self._length)
        return next(self.windows(epoch, position))

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
