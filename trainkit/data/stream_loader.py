"""IterableBatchLoader: the step batches of one rank from an iterable dataset, in its own order."""

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

logger = logging.getLogger(__name__)

_STATES_KEPT = 4


class StreamPosition(NamedTuple):
    """A position in an iterable dataset: its `state_dict`, and the state of the random generators."""

    dataset: dict[str, Any]
    generators: dict[str, Any]


class WorkerIterator(Iterator[Any]):
    """Yields the samples of an iterable dataset in order, read ahead by one worker process.

    worker        a b c d (position after d) e f g h (position after h) ...
    this process  a b c d      position      e f g h      position      ...

    Args:
        dataset: An iterable dataset.
        seed: Of python, numpy and torch in the worker.
        every: Samples between two reported positions; `None` if the dataset has no `state_dict`.
        generator_state: State of the random generators at the start of the iteration, after a resume.

    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        seed: int,
        every: int | None = None,
        generator_state: dict[str, Any] | None = None,
    ) -> None:
        self.position: StreamPosition | None = None
        """The last reported position."""
        self._reports_position = every is not None
        loader: DataLoader[Any] = DataLoader(
            dataset if every is None else _PositionReporting(dataset, every, generator_state),  # type: ignore[arg-type] # it is iterable
            batch_size=None,
            num_workers=1,
            collate_fn=no_collate,
            generator=torch.Generator().manual_seed(seed),
        )
        self._items = iter(loader)  # starts the worker, with the dataset as it is now

    def __next__(self) -> Any:
        """Return the next sample."""
        item = next(self._items)
        if not self._reports_position:
            return item
        sample, position = item
        if position is not None:
            self.position = position
        return sample


class _PositionReporting(IterableDataset[Any]):
    """The dataset in the worker; yields pairs of a sample and a position or `None`."""

    def __init__(self, dataset: Any, every: int, generator_state: dict[str, Any] | None) -> None:
        self._dataset, self._every, self._begins_at = dataset, every, generator_state

    def __iter__(self) -> Iterator[Any]:
        if self._begins_at is not None:
            set_rng_state(self._begins_at)
        for number, sample in enumerate(self._dataset, start=1):
            position = None
            if number % self._every == 0:
                # A copy: the sample is sent while the dataset continues.
                position = StreamPosition(deepcopy(dict(self._dataset.state_dict())), rng_state(devices=False))
            yield sample, position


class IterableBatchLoader(BatchLoader):
    """Reads an iterable dataset in its own order: a rank reads all samples, and keeps every W-th of a global batch."""

    def __init__(
        self, stage_data: StageData, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        super().__init__(stage_data, strategy, seed=seed, limit=limit, repeat_first=repeat_first)
        assert stage_data.batch_size is not None
        self._batch_size = stage_data.batch_size
        self._plan = strategy.plan(stage_data.batch_size, even=stage_data.stage == "train")
        self._states: dict[int, dict[str, Any]] = {}  # position -> state of the dataset for a checkpoint
        self._restored: dict[str, Any] = {}
        self._keeps_position = hasattr(stage_data.dataset, "state_dict")
        # A worker has a copy of the dataset: every epoch starts from the state of the dataset in this process.
        self._continues_over_epochs = self._keeps_position and stage_data.num_workers == 0

    @property
    def num_steps(self) -> int | None:
        length = self.epoch_length
        return None if length is None else -(-length // self._batch_size)

    @property
    def epoch_length(self) -> int | None:
        length = self.stage_data.num_items
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
            # The next step batch is read before this one is yielded, to know whether this one ends the epoch.
            following = [] if steps_left == 0 else self._take(samples, position)
            self._remember(position, state)
            if not following and steps_left != 0 and self._continues_over_epochs:
                self._remember(0, self._state_after(samples))  # the end, from which the next epoch continues
            mine = self._micro_batches(step_batch[self.rank :: self.world_size])
            yield StepBatch(mine, len(step_batch), len(step_batch), not following)

    def batches(self) -> Iterator[MicroBatch]:
        samples = self._samples(0, 0)
        for number in range(self.limit) if self.limit is not None else count():
            step_batch = self._take(samples, number)
            if not step_batch:
                return
            first = self._first_from(number * self._batch_size)
            yield from self._micro_batches(step_batch[first :: self.world_size])

    def first_micro_batch(self) -> MicroBatch | None:
        return None

    def resplit(self, strategy: ShardsData) -> None:
        self._plan = strategy.plan(self._batch_size, even=self.stage_data.stage == "train")

    def state_dict(self, position: int) -> dict[str, Any]:
        return {"position": position, **self._states[position]} if position in self._states else {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._restored = saved

    def _state_after(self, samples: Iterator[Any]) -> dict[str, Any]:
        """Return the state of the dataset after the samples that were read, for a checkpoint."""
        if isinstance(samples, WorkerIterator):
            return {} if samples.position is None else samples.position._asdict()
        return {"dataset": dict(self.stage_data.dataset.state_dict())} if self._keeps_position else {}

    def _remember(self, position: int, state: dict[str, Any]) -> None:
        """Keep the states of the last step batches, as batches may be read ahead of the one that is trained on."""
        if state:
            self._states[position] = state
            for old in sorted(self._states.keys() - {0})[:-_STATES_KEPT]:
                del self._states[old]

    def _from(self, epoch: int, position: int) -> Iterator[Any]:
        """Return the samples from `position` on, by the dataset's saved state or by reading and skipping."""
        dataset = self.stage_data.dataset
        restored, self._restored = self._restored, {}
        has_state = self._keeps_position and restored.get("position") == position
        if position == 0:
            has_state = has_state and self._continues_over_epochs
        if has_state and position == 0:
            dataset.load_state_dict(restored["dataset"])  # before set_epoch, as in a run without a resume
        set_epoch = getattr(dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        if has_state and position:
            return self._from_state(restored, epoch, position)
        samples = self._samples(epoch, 0)
        if has_state:
            return self._continued(samples, epoch)
        if position:
            logger.warning(self._reread_warning(), position)
            deque(islice(samples, position), maxlen=0)
        return samples

    def _from_state(self, restored: dict[str, Any], epoch: int, position: int) -> Iterator[Any]:
        """Return the samples from a saved state; the dataset here stays unchanged if a worker reads."""
        dataset = self.stage_data.dataset
        initial = None if self._continues_over_epochs else deepcopy(dataset.state_dict())
        dataset.load_state_dict(restored["dataset"])
        samples = self._samples(epoch, position, generator_state=restored.get("generators"))
        if initial is not None:
            dataset.load_state_dict(initial)
        return samples

    def _samples(self, epoch: int, position: int, *, generator_state: dict[str, Any] | None = None) -> Iterator[Any]:
        """Return an iterator over the dataset from its current state, read here or ahead by a worker process."""
        stage_data = self.stage_data
        if stage_data.num_workers == 0:
            return iter(stage_data.dataset)
        seed = request_seed(self.seed, epoch, position)
        every = self._batch_size if self._keeps_position and stage_data.stage == "train" else None
        return WorkerIterator(stage_data.dataset, seed=seed, every=every, generator_state=generator_state)

    def _continued(self, samples: Iterator[Any], epoch: int) -> Iterator[Any]:
        """Return the samples of an epoch that continues from the end of the previous one.

        A dataset that was saved at its end may yield nothing at first; it is then iterated again.
        """
        first = list(islice(samples, 1))
        return chain(first, samples) if first else self._samples(epoch, 0)

    def _reread_warning(self) -> str:
        if self._keeps_position:
            reason = "has no saved position (state_dict) at this step"
        else:
            reason = "has no state_dict and load_state_dict"
        random = "" if self.stage_data.num_workers else "; random numbers that it draws are not restored"
        return f"the iterable training dataset {reason}: its first %d samples are read again and skipped{random}."

    def _take(self, samples: Iterator[Any], taken: int) -> list[Any]:
        """Return the samples of the next global batch, after `taken` ones; raises UserError if the dataset is empty."""
        step_batch = list(islice(samples, self._batch_size))
        if not step_batch and taken == 0:
            raise UserError(
                f"the {self.stage_data.stage} IterableDataset gave no sample; check where its samples come from."
            )
        return [] if self.stage_data.drop_last and len(step_batch) < self._batch_size else step_batch

    def _micro_batches(self, mine: list[Any]) -> list[MicroBatch]:
        size = self._plan.micro_batch_size
        chunks = [mine[start : start + size] for start in range(0, len(mine), size)]
        return [MicroBatch(self.stage_data.collate_fn(chunk), len(chunk)) for chunk in chunks]
