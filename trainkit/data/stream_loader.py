"""Reading a stream of samples, in its own order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.data.batch import MicroBatch, ShardsData, StepBatch
from trainkit.data.data import StageData
from trainkit.data.loader import BatchLoader
from trainkit.data.readers import no_collate, request_seed
from trainkit.errors import UserError
from trainkit.rng import rng_state, set_rng_state


class StreamPosition(NamedTuple):
    """Where a stream is: its dataset's own state, and the generators that it may draw from."""

    dataset: dict[str, Any]
    generators: dict[str, Any]


class WorkerIterator(Iterator[Any]):
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
        self.place: StreamPosition | None = None
        """After the last sample with which one was told."""
        self._tells = every is not None
        loader: DataLoader[Any] = DataLoader(
            dataset if every is None else _PositionReporting(dataset, every, begins_at),  # type: ignore[arg-type] # it is iterable
            batch_size=None,
            num_workers=1,
            collate_fn=no_collate,
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


class _PositionReporting(IterableDataset[Any]):
    """What runs in the worker."""

    def __init__(self, dataset: Any, every: int, begins_at: dict[str, Any] | None) -> None:
        self._dataset, self._every, self._begins_at = dataset, every, begins_at

    def __iter__(self) -> Iterator[Any]:
        if self._begins_at is not None:
            set_rng_state(self._begins_at)
        for number, sample in enumerate(self._dataset, start=1):
            place = None
            if number % self._every == 0:
                # A copy: the sample travels while the dataset goes on.
                place = StreamPosition(deepcopy(dict(self._dataset.state_dict())), rng_state(devices=False))
            yield sample, place


logger = logging.getLogger(__name__)

_STATES_KEPT = 4


class IterableBatchLoader(BatchLoader):
    """An iterable dataset, read in its own order by every rank: of each global batch a rank keeps every W-th sample."""

    def __init__(
        self, source: StageData, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        super().__init__(source, strategy, seed=seed, limit=limit)
        assert source.batch_size is not None
        self._batch_size = source.batch_size
        self._plan = strategy.plan(source.batch_size, even=source.stage == "train")
        self._repeat_first = repeat_first
        self._states: dict[int, dict[str, Any]] = {}  # position -> what a checkpoint keeps of the dataset there
        self._restored: dict[str, Any] = {}
        self._keeps_position = hasattr(source.dataset, "state_dict")
        # A worker has a copy of the dataset, so that every epoch begins with it as it is in this process.
        self._outlives_epochs = self._keeps_position and source.workers == 0

    @property
    def num_steps(self) -> int | None:
        length = self.epoch_length
        return None if length is None else -(-length // self._batch_size)

    @property
    def epoch_length(self) -> int | None:
        length = self.source.num_items
        most = None if self.limit is None else self.limit * self._batch_size
        return most if length is None else min(length, most or length)

    def step_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        epoch = 0 if self._repeat_first else epoch
        self._states = {0: self._states[0]} if 0 in self._states and position == 0 else {}
        samples = self._from(epoch, position)
        steps_before = position // self._batch_size
        steps_left = None if self.limit is None else self.limit - steps_before
        following = self._take(samples, position)
        while following:
            step_batch, state = following, self._state_after(samples)
            position += len(step_batch)
            if steps_left is not None:
                steps_left -= 1
            # The next window is read before this one is handed out, to know whether this one ends the epoch.
            following = [] if steps_left == 0 else self._take(samples, position)
            self._remember(position, state)
            if not following and steps_left != 0 and self._outlives_epochs:
                self._remember(0, self._state_after(samples))  # read to its end, from which the next epoch begins
            mine = self._micro_batches(step_batch[self.rank :: self.world_size])
            yield StepBatch(mine, len(step_batch), len(step_batch), not following)

    def batches(self) -> Iterator[MicroBatch]:
        samples = self._stream(0, 0)
        for number in range(self.limit) if self.limit is not None else count():
            step_batch = self._take(samples, number)
            if not step_batch:
                return
            first = self._first_from(number * self._batch_size)
            yield from self._micro_batches(step_batch[first :: self.world_size])

    def example(self) -> MicroBatch | None:
        return None

    def resplit(self, strategy: ShardsData) -> None:
        self._plan = strategy.plan(self._batch_size, even=self.source.stage == "train")

    def state_dict(self, position: int) -> dict[str, Any]:
        return {"position": position, **self._states[position]} if position in self._states else {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._restored = saved

    def _state_after(self, samples: Iterator[Any]) -> dict[str, Any]:
        """Return what a checkpoint keeps of the dataset, after the samples that were taken."""
        if isinstance(samples, WorkerIterator):
            return {} if samples.place is None else samples.place._asdict()
        return {"dataset": dict(self.source.dataset.state_dict())} if self._keeps_position else {}

    def _remember(self, position: int, state: dict[str, Any]) -> None:
        """Keep the states of the last windows: windows may be read ahead of the one that is trained on."""
        if state:
            self._states[position] = state
            for old in sorted(self._states.keys() - {0})[:-_STATES_KEPT]:
                del self._states[old]

    def _from(self, epoch: int, position: int) -> Iterator[Any]:
        """Return the stream from item `position` on: by the dataset's own state, else by reading up to it."""
        dataset = self.source.dataset
        restored, self._restored = self._restored, {}
        has_state = self._keeps_position and restored.get("position") == position
        if position == 0:
            has_state = has_state and self._outlives_epochs
        if has_state and position == 0:
            dataset.load_state_dict(restored["dataset"])  # before it is told of the epoch, as where it was not resumed
        set_epoch = getattr(dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        if has_state and position:
            return self._from_state(restored, epoch, position)
        samples = self._stream(epoch, 0)
        if has_state:
            return self._begun_anew(samples, epoch)
        if position:
            logger.warning(self._why_read_again(), position)
            deque(islice(samples, position), maxlen=0)
        return samples

    def _from_state(self, restored: dict[str, Any], epoch: int, position: int) -> Iterator[Any]:
        """Return the stream from where its dataset was; after an epoch in a worker this process has it as before."""
        dataset = self.source.dataset
        before = None if self._outlives_epochs else deepcopy(dataset.state_dict())
        dataset.load_state_dict(restored["dataset"])
        samples = self._stream(epoch, position, begins_at=restored.get("generators"))
        if before is not None:
            dataset.load_state_dict(before)
        return samples

    def _stream(self, epoch: int, position: int, *, begins_at: dict[str, Any] | None = None) -> Iterator[Any]:
        """Return the stream as its dataset is now, read here or ahead by a worker process."""
        source = self.source
        if source.workers == 0:
            return iter(source.dataset)
        seed = request_seed(self.seed, epoch, position)
        every = self._batch_size if self._keeps_position and source.stage == "train" else None
        return WorkerIterator(source.dataset, seed=seed, every=every, begins_at=begins_at)

    def _begun_anew(self, samples: Iterator[Any], epoch: int) -> Iterator[Any]:
        """Yield an epoch that begins from the end of the one before, where a dataset may first say that it is at it."""
        first = list(islice(samples, 1))
        return chain(first, samples) if first else self._stream(epoch, 0)

    def _why_read_again(self) -> str:
        if self._keeps_position:
            why = "was saved without the position of its dataset (state_dict) here"
        else:
            why = "keeps no position of its own (state_dict and load_state_dict)"
        drawn = "" if self.source.workers else "; random numbers that it draws are not restored"
        return f"the training stream {why}: its first %d samples are read again and skipped{drawn}."

    def _take(self, samples: Iterator[Any], taken: int) -> list[Any]:
        """Return the samples of the next global batch; raises UserError for a stream from which none was `taken`."""
        step_batch = list(islice(samples, self._batch_size))
        if not step_batch and taken == 0:
            raise UserError(f"the {self.source.stage} stream gave no sample; check where its samples come from.")
        return [] if self.source.drop_last and len(step_batch) < self._batch_size else step_batch

    def _micro_batches(self, mine: list[Any]) -> list[MicroBatch]:
        size = self._plan.micro_batch_size
        chunks = [mine[start : start + size] for start in range(0, len(mine), size)]
        return [MicroBatch(self.source.collate(chunk), len(chunk)) for chunk in chunks]
