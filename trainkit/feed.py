"""The windows and evaluation batches that one rank reads."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainkit.data import Source
from trainkit.length_groups import LengthGroupedOrder
from trainkit.order import GlobalOrder, WeightedOrder
from trainkit.rng import preserve_rng
from trainkit.sampling import Order, SamplerOrder
from trainkit.window import MicroBatch, ShardsData, Window

if TYPE_CHECKING:
    from trainkit.state import TrainState


class Feed(ABC):
    """Reads one stage's data for one rank."""

    def __init__(self, source: Source, strategy: ShardsData, *, seed: int, limit: int | None) -> None:
        self.source = source
        self.limit = limit
        self.seed = seed
        self.rank, self.world_size = strategy.comm.rank, strategy.comm.world_size
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

    def window_of(self, step: int, state: TrainState) -> Window | None:
        """Return this rank's window of an earlier step, read again; `None` for a stream. Draws from the generators."""
        return None

    def cut_anew(self, strategy: ShardsData) -> None:
        """Cut windows that are read from now on as the strategy plans it now."""

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return what a dataset that keeps its own position said when `position` items had been read."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give a dataset the position that it saved."""


def make_feed(
    source: Source, strategy: ShardsData, *, seed: int, limit: int | None = None, repeat_first: bool = False
) -> Feed:
    """Return the feed for a source; `limit` global batches at most make an epoch.

    With `repeat_first` every epoch is the first one again: overfitting on the same few batches.
    """
    from trainkit.ready_feed import ReadyFeed
    from trainkit.sample_feed import SampleFeed
    from trainkit.stream_feed import StreamFeed

    if source.is_stream:
        return StreamFeed(source, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
    if source.batch_size is None:
        return ReadyFeed(source, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
    return SampleFeed(source, strategy, seed=seed, limit=limit, repeat_first=repeat_first)


def order_of(source: Source, *, seed: int) -> Order:
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
