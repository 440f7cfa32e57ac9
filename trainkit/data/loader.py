"""Loaders: the step batches and evaluation batches that one rank reads."""

from __future__ import annotations

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainkit.data.batch import MicroBatch, ShardsData, StepBatch
from trainkit.data.data import StageData
from trainkit.data.dataset_shards import (
    ShardedSamples,
    Taken,
    can_seek,
    num_readers,
    num_shards_of,
    read_shards,
    set_epoch,
)
from trainkit.data.opened_shards import with_state
from trainkit.data.order import (
    GlobalOrder,
    LengthGroupedOrder,
    Order,
    SamplerOrder,
    WeightedOrder,
    fingerprint,
)
from trainkit.data.readers import (
    BEFORE_FIRST,
    Request,
    SampleReader,
    StreamInWorker,
    WorkerPool,
    collate,
    make_reader,
    of_item,
    request_seed,
    state_of,
)
from trainkit.devices import has_streams
from trainkit.distributed.collectives import Collectives
from trainkit.errors import UserError
from trainkit.rng import SavedGenerators, preserve_rng
from trainkit.state import TrainState
from trainkit.tree import num_rows, rows, tree_leaves

logger = logging.getLogger(__name__)

_STATES_KEPT = 4  # a prefetch is one step ahead, for which two are enough
_SET_EPOCH = BEFORE_FIRST - 1  # the position that seeds `set_epoch`
_CANNOT_SEEK = "has no state_dict and load_state_dict with an exact position"


def open_loader(
    stage_data: StageData, strategy: ShardsData, *, seed: int, limit: int | None = None, repeat_first: bool = False
) -> BatchLoader:
    """Return the loader of a dataset; an epoch has at most `limit` global batches.

    With `repeat_first` every epoch repeats the first one, to overfit on a few batches.
    """
    kind: type[BatchLoader] = MapBatchLoader
    if stage_data.is_iterable:
        kind = IterableBatchLoader
        if stage_data.batch_size is None:
            kind = PreBatchedIterableLoader
        elif num_shards_of(stage_data.dataset) is not None:
            kind = ShardedBatchLoader
    elif stage_data.batch_size is None:
        kind = PreBatchedLoader
    return kind(stage_data, strategy, seed=seed, limit=limit, repeat_first=repeat_first)


def check_same_data(loaders: Mapping[str, BatchLoader], comm: Collectives) -> str | None:
    """Return a warning if a resume would change the order of the training data, else `None`; one collective.

    `loaders` are all that this rank reads, by name. Raises UserError on every rank if the ranks' data differ in names,
    lengths, batch sizes or orders.
    """
    facts: dict[str, Any] = {}
    # One process has nothing to compare; only its samplers are drawn again.
    if comm.num_processes > 1:
        for name, loader in loaders.items():
            facts.update({f"{what} of the {name} data": value for what, value in loader.description().items()})
    samplers = {name: loader.order for name, loader in loaders.items() if isinstance(loader.order, SamplerOrder)}
    # The first of two draws: `order.check` draws again, and so finds a sampler that cannot be seeded.
    drawn = {name: fingerprint(order) for name, order in samplers.items()}
    if not facts and not samplers:
        return None
    # Everything in one collective, before any check: every rank then sees the same difference and raises, or none does.
    of_ranks = comm.all_gather_object((facts, drawn))
    first = of_ranks[0][0]
    for rank, (theirs, _) in enumerate(of_ranks):
        for what in {**first, **theirs}:
            if first.get(what) != theirs.get(what):
                raise UserError(
                    f"the ranks do not have the same data: {what} is {first.get(what, 'missing')} on rank 0, but "
                    f"{theirs.get(what, 'missing')} on rank {rank}. "
                    "Pass the same datasets and settings on every rank: the strategy decides which rank reads which "
                    "samples."
                )
    warnings = {name: order.check([drawn[name] for _, drawn in of_ranks]) for name, order in samplers.items()}
    return warnings.get("train")


class BatchLoader(ABC):
    """Reads one stage's data for one rank; made by `open_loader`."""

    epoch_length: int | None
    """Samples (or pre-batched items) of one epoch; `None` for an iterable dataset without a length."""
    order: Order | None = None
    """The order of the dataset's samples; `None` for an iterable dataset."""

    def __init__(
        self, stage_data: StageData, strategy: ShardsData, *, seed: int, limit: int | None, repeat_first: bool
    ) -> None:
        self.stage_data = stage_data
        self.num_items = stage_data.num_items
        """Samples (or pre-batched items) of the dataset, of an epoch with a sampler; `None` if unknown."""
        self.limit = limit
        self.seed = seed
        self.rank, self.world_size = strategy.comm.rank, strategy.comm.world_size
        self.seconds_waited = 0.0
        """Seconds that the loop has waited for `timed_batches`."""
        self._repeat_first = repeat_first
        self._device = strategy.device
        self._step_items = stage_data.batch_size or 1  # of the epoch; a pre-batched item is a step
        self.resplit(strategy)

    @property
    def num_steps(self) -> int | None:
        """Global batches of one epoch; `None` for an iterable dataset without a length."""
        return None if self.epoch_length is None else -(-self.epoch_length // self._step_items)

    @abstractmethod
    def step_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        """Yield this rank's step batches of `epoch`, from `position` of the global order on."""

    @abstractmethod
    def batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's shard of an evaluation; over all ranks each sample comes exactly once.

        Rank r has the samples r, r + W, r + 2W, ..., independent of batch sizes, so that predictions can be put back in
        order.
        """

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

    def description(self) -> dict[str, Any]:
        """Return the facts in which all ranks must agree, by name."""
        order: str | None = None
        if self.order is not None:
            # Of a sampler only the class: `check_same_data` compares what it draws, with a message of its own.
            sampler = self.stage_data.sampler
            order = fingerprint(self.order) if sampler is None else f"that of a {type(sampler).__name__}"
        return {
            "the length": self.num_items,
            "the length of an epoch": self.epoch_length,
            "the batch_size": self.stage_data.batch_size,
            "the order": order,
        }

    def resplit(self, strategy: ShardsData) -> None:
        """Split the step batches that are read from now on by the strategy's current plan."""
        # A pre-batched item has a size of its own, which `RowSplitter` plans for when it is read.
        if self.stage_data.batch_size is not None:
            self._plan = strategy.plan(self.stage_data.batch_size, even=self.stage_data.stage == "train")

    def first_micro_batch(self) -> MicroBatch | None:
        """Return this rank's first micro-batch, read separately from training; `None` for an iterable dataset."""
        # Samples may draw, and training must not depend on whether a batch was looked at before it.
        with preserve_rng():
            step_batch = next(self.step_batches(0, 0), None)
        return step_batch.micro_batches[0] if step_batch is not None and step_batch.micro_batches else None

    def sample_indices(self, step: int, state: TrainState) -> list[int]:
        """Return the indices of the samples that this rank read for a step; empty if the order does not define them."""
        return []

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return the saved state of an iterable dataset after `position` items; empty if it has none."""
        return {}

    def first_state(self) -> dict[str, Any]:
        """Return the state of an iterable dataset before it is read; empty if it has none."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume an iterable dataset from a `state_dict`."""

    def close(self) -> None:
        """End worker processes; may be called twice."""


class MapBatchLoader(BatchLoader):
    """Reads a map-style dataset: global batch t takes positions t * batch_size to (t + 1) * batch_size."""

    epoch_length: int
    order: Order

    def __init__(self, stage_data: StageData, strategy: ShardsData, **settings: Any) -> None:
        super().__init__(stage_data, strategy, **settings)
        self._pool: WorkerPool | None = None
        if self.rank == 0 and stage_data.stage == "train" and hasattr(stage_data.dataset, "load_state_dict"):
            logger.warning(
                "the training dataset %s has a state_dict, which checkpoints do not hold: it has __getitem__, so a "
                "resumed run reads it by index alone.",
                type(stage_data.dataset).__name__,
            )
        self._reader = make_reader(
            stage_data.dataset, stage_data.collate_fn, seed=self.seed, seed_samples=stage_data.seed_samples
        )
        self.order: Order = make_order(stage_data, seed=self.seed)
        self._repeats_samples = not isinstance(self.order, GlobalOrder | LengthGroupedOrder)  # within an epoch
        self._sampler = strategy.sampler(stage_data.dataset, self.order)
        length = self.order.num_samples
        if self.limit is not None:
            length = min(length, self.limit * self._step_items)
        self.epoch_length = length - length % self._step_items if stage_data.drop_last else length

    def step_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        if self._repeat_first:
            epoch = 0
        length, size = self.epoch_length, self._step_items
        starts = range(position, length, size)
        steps = (self._split(self._samples(epoch, start, min(start + size, length))) for start in starts)
        # `steps` is lazy: without workers a step is read when it is asked for, with workers some steps before.
        for start, micro_batches in zip(starts, self._read(epoch, steps), strict=True):
            stop = min(start + size, length)
            yield StepBatch(micro_batches, stop - start, stop - start, stop == length)

    def batches(self) -> Iterator[MicroBatch]:
        chunks = self._split(self._samples(0, 0, self.epoch_length))
        for micro_batches in self._read(0, ([chunk] for chunk in chunks)):
            yield from micro_batches

    def sample_indices(self, step: int, state: TrainState) -> list[int]:
        # Both divisions round up: the last step of an epoch may have fewer samples.
        size, num_steps = self._step_items, -(-self.epoch_length // self._step_items)
        steps = state.epoch * num_steps + -(-state.position // size)
        epoch, number = divmod(steps - (state.step - step) - 1, num_steps)
        start, stop = number * size, min((number + 1) * size, self.epoch_length)
        samples: list[int] = self._sampler.shard(0 if self._repeat_first else epoch, start, stop).tolist()
        return samples

    def close(self) -> None:
        # The workers of a pool end when nothing refers to it.
        self._pool = None

    def _samples(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return this rank's indices, in a first row of two if they can repeat: the second has their positions."""
        indices = self._sampler.shard(epoch, start, stop)
        # An index that comes once in an epoch is its own seed, and needs no second row.
        if not self._repeats_samples:
            return indices
        return torch.stack([indices, torch.arange(start + self.rank, stop, self.world_size)])

    def _split(self, indices: Tensor) -> list[Tensor]:
        """Return the indices of each micro-batch."""
        size, count = self._plan.micro_batch_size, indices.shape[-1]
        return [indices] if 0 < count <= size else list(indices.split(size, dim=-1)) if count else []

    def _read(self, epoch: int, steps: Iterator[list[Tensor]]) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step, given their indices; read here or ahead by worker processes."""
        if self.stage_data.num_workers == 0:
            read = self._reader
            for step in steps:
                yield [MicroBatch(read(indices, epoch), indices.shape[-1]) for indices in step]
            return
        sizes: deque[list[int]] = deque()  # samples of each micro-batch, for steps that are requested but not yielded

        # Called by the pool in this process, so `sizes` needs no lock. A step's sizes come before its first request.
        def requests() -> Iterator[Request]:
            for step in steps:
                sizes.append([indices.shape[-1] for indices in step])
                for indices in step:
                    yield Request(indices, request_seed(self.seed, epoch, int(indices.flatten()[0])), epoch)

        micro_batches: list[MicroBatch] = []
        for batch in self._workers().read(requests()):
            while not sizes[0]:  # a step before this batch in which this rank has no samples
                sizes.popleft()
                yield []
            micro_batches.append(MicroBatch(batch, sizes[0][len(micro_batches)]))
            if len(micro_batches) == len(sizes[0]):
                sizes.popleft()
                yield micro_batches
                micro_batches = []
        # The last steps, if this rank has no samples in them: it still takes part in their collectives.
        yield from ([] for _ in sizes)

    def _workers(self) -> WorkerPool:
        if self._pool is None or not self.stage_data.persistent_workers:
            self._pool = WorkerPool(
                self._reader,
                num_workers=self.stage_data.num_workers,
                # A run on the CPU of a machine with a GPU would pin memory there, and take some of it.
                pin_memory=self.stage_data.pin_memory and has_streams(self._device),
                persistent=self.stage_data.persistent_workers,
                start=self.stage_data.start_worker,
            )
        return self._pool


class PreBatchedLoader(BatchLoader):
    """Reads a pre-batched dataset: ranks take every W-th row, and micro-batches consecutive rows of those."""

    epoch_length: int
    order: Order

    def __init__(self, stage_data: StageData, strategy: ShardsData, **settings: Any) -> None:
        super().__init__(stage_data, strategy, **settings)
        self.order: Order = make_order(stage_data, seed=self.seed)
        self._rows = RowSplitter(strategy)
        self._reader = SampleReader(
            stage_data.dataset, of_item(stage_data.collate_fn), seed=self.seed, seed_samples=stage_data.seed_samples
        )
        self.epoch_length = min(self.order.num_samples, self.limit or self.order.num_samples)

    def step_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        if self._repeat_first:
            epoch = 0
        indices = self.order.slice(epoch, position, self.epoch_length).tolist()
        for offset, index in enumerate(indices, start=position + 1):
            batch = self._item(index, epoch)
            yield self._rows.step_batch(batch, ends_epoch=offset == self.epoch_length)

    def batches(self) -> Iterator[MicroBatch]:
        yield from self._rows.batches(self._item(index, 0) for index in range(self.epoch_length))

    def _item(self, index: int, epoch: int) -> Any:
        return self._reader.read([index], [index], epoch)


class RowSplitter:
    """Splits global batches by rows over ranks and micro-batches."""

    def __init__(self, strategy: ShardsData) -> None:
        self._strategy = strategy
        self._rank, self._world_size = strategy.comm.rank, strategy.comm.world_size
        self._undivided = self._world_size == 1 and strategy.num_micro_batches == 1

    def step_batch(self, batch: Any, *, ends_epoch: bool) -> StepBatch:
        """Return this rank's rows of a training batch."""
        count = num_rows(batch)
        local_rows = [MicroBatch(batch, count)] if self._undivided else self._split(batch, count, first=self._rank)
        # A position counts items of a pre-batched dataset, not rows: the step moves it by 1.
        return StepBatch(local_rows, count, 1, ends_epoch)

    def batches(self, batches: Iterable[Any]) -> Iterator[MicroBatch]:
        """Yield this rank's rows of an evaluation: r, r + W, ... over all batches."""
        position = 0
        for batch in batches:
            count = num_rows(batch)
            # Rows are numbered over all batches, whose sizes need not be multiples of the ranks.
            yield from self._split(batch, count, first=(self._rank - position) % self._world_size)
            position += count

    def _split(self, batch: Any, count: int, *, first: int) -> list[MicroBatch]:
        local_rows = rows(batch, slice(first, None, self._world_size), of=count)
        num_rows_here = len(range(first, count, self._world_size))
        size = self._strategy.plan(count, even=False).micro_batch_size
        return [
            MicroBatch(rows(local_rows, slice(start, start + size), of=num_rows_here), min(size, num_rows_here - start))
            for start in range(0, num_rows_here, size)
        ]


class IterableBatchLoader(BatchLoader):
    """Reads an iterable dataset in its own order: a rank reads all samples, and keeps every W-th of a global batch.

    Python, numpy and torch are seeded for each global batch by the seed, the epoch and the position: ranks and workers
    read the same samples, and so does a resumed run.
    """

    def __init__(self, stage_data: StageData, strategy: ShardsData, **settings: Any) -> None:
        super().__init__(stage_data, strategy, **settings)
        self._states: dict[int, dict[str, Any]] = {}  # position -> state of the dataset for a checkpoint
        self._next_items: dict[int, list[Any]] = {}  # position -> the first item after it, if any
        self._generators = SavedGenerators()
        self._restored: dict[str, Any] = {}
        self._dataset = with_state(stage_data.dataset)
        self._keeps_position = can_seek(self._dataset)
        self._comm = strategy.comm
        self._is_checked = stage_data.stage != "train"
        self._first_item = ""
        """A digest of the first item that this rank has read; empty if ranks read different ones."""
        # A worker has a copy of the dataset: every epoch starts from the state of the dataset in this process.
        self._continues_over_epochs = self._keeps_position and stage_data.num_workers == 0
        bounds = (stage_data.num_items, None if self.limit is None else self.limit * self._step_items)
        self.epoch_length = min((bound for bound in bounds if bound is not None), default=None)
        self._told_of_length = False

    def step_batches(self, epoch: int, position: int) -> Iterator[StepBatch]:
        epoch = 0 if self._repeat_first else epoch
        # The state of position 0 was saved at the end of the epoch before: a save before the first step still needs it.
        self._states = {0: self._states[0]} if 0 in self._states and position == 0 else {}
        # Used once: a later epoch must not begin from the position of the resume.
        restored, self._restored = self._restored, {}
        samples = self._from(restored, epoch, position)
        steps_left = None if self.limit is None else self.limit - position // self._step_items
        self._next_items = {}
        following = self._take(samples, epoch, position)
        self._check_resumed(restored, epoch, position)
        # Collective, so all ranks come here after the first global batch, before any of them computes.
        if not self._is_checked:
            self._is_checked = True
            self._check_first(samples, is_full=following.num_items == self._step_items, skipped=position)
        while following.num_items:
            # The state is read before the next step batch is, which moves the dataset on.
            taken, state = following, self._state_after(samples)
            position += taken.num_items
            if steps_left is not None:
                steps_left -= 1
            # The next step batch is read before this one is yielded, to know whether this one ends the epoch.
            following = Taken([], 0) if steps_left == 0 else self._take(samples, epoch, position)
            self._remember(position, state)
            if steps_left != 0:
                self._check_length(position, is_end=not following.num_items)
            if not following.num_items:
                self._next_items.pop(0, None)  # that of the next epoch is not known
            if not following.num_items and self._continues_over_epochs:
                # The end, from which the next epoch continues or not: what the dataset does when it is iterated again.
                if steps_left != 0:
                    self._remember(0, self._state_after(samples))
                elif not self._repeat_first:
                    self._remember(0, self._state_at_limit(position, taken))
            yield self._step_batch(taken, ends_epoch=not following.num_items)

    def batches(self) -> Iterator[MicroBatch]:
        for number, step_batch in enumerate(self._global_batches()):
            # Samples are numbered over all batches: predictions are put back in order by r, r + W, ...
            first = (self.rank - number * self._step_items) % self.world_size
            yield from self._micro_batches(step_batch[first :: self.world_size])

    def _global_batches(self) -> Iterator[list[Any]]:
        """Yield the samples of each global batch of an evaluation."""
        samples = self._samples(0, 0)
        for number in range(self.limit) if self.limit is not None else count():
            step_batch = self._read(samples, 0, number * self._step_items)
            if not step_batch:
                return
            yield step_batch

    def first_micro_batch(self) -> MicroBatch | None:
        # To read one would move the dataset on, and not every dataset can go back.
        return None

    def state_dict(self, position: int) -> dict[str, Any]:
        if position not in self._states:
            return {}
        return {"position": position, **self._states[position], **self._next_item(position)}

    def first_state(self) -> dict[str, Any]:
        with suppress(Exception):  # a dataset may have a state only while it is read
            return {"dataset": state_of(self._dataset)} if self._keeps_position else {}
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._restored = saved

    def _state_after(self, samples: Any) -> dict[str, Any]:
        """Return the state of the dataset after the samples that were read, for a checkpoint."""
        if isinstance(samples, StreamInWorker):
            saved = samples.state
        else:
            saved = state_of(self._dataset) if self._keeps_position else {}
        return {"dataset": saved} if saved else {}

    def _check_first(self, samples: Any, *, is_full: bool, skipped: int) -> None:
        """Warn, after the first global batch, if a resume reads samples again or if ranks read others; collective."""
        # Without an item to compare, as with shards, no rank gathers.
        first_items = (
            self._comm.all_gather_object(self._first_item) if self._first_item and self.world_size > 1 else [""]
        )
        if self.rank != 0:
            return
        # A worker reports no position in a batch that is not full, and a resume that skips has warned already.
        if is_full and not skipped and not self._can_resume(samples):
            logger.warning(
                "the iterable training dataset %s: a resumed run reads its first samples again and skips them. "
                "Define both to continue at the exact sample.",
                _CANNOT_SEEK,
            )
        if len({*first_items}) > 1:
            logger.warning(
                "the first item of the iterable training dataset is not the same on all ranks, but each rank must read "
                "all items in the same order: of W ranks, each keeps every W-th. If the dataset divides its items by "
                "rank, some are lost: let it yield all, or define num_shards and shard(num_shards, index). If it "
                "shuffles, seed its generator in set_epoch."
            )

    def _next_item(self, position: int) -> dict[str, Any]:
        """Return what `_check_resumed` compares; empty at the end of an epoch."""
        next_item = self._next_items.get(position)
        return {"next": _digest(next_item[0])} if next_item else {}

    def _check_resumed(self, restored: dict[str, Any], epoch: int, position: int) -> None:
        """Warn if the first item of a resumed run is not the one that followed in the run before."""
        is_here = self.rank == 0 and restored.get("position") == position
        if not is_here or restored.get("next") in (None, self._next_item(position).get("next")):
            return
        logger.warning(
            "the resumed run reads other data: item %d of epoch %d of the iterable training dataset is not the one of "
            "the run before. %s",
            position,
            epoch,
            "Its state_dict must have all that decides on its next samples, as an order that __iter__ draws."
            if "dataset" in restored or "shards" in restored
            else "Seed generators of its own in set_epoch.",
        )

    def _state_at_limit(self, position: int, last: Taken) -> dict[str, Any]:
        """Return the state before the last step of an epoch that the limit ended, and the items to read from there."""
        # Not the state after it: loaded, it might continue where an iteration that was left would begin again.
        first = position - last.num_items
        return {**self._states.get(first, {}), "rest": [first, last.num_items]}

    def _can_resume(self, samples: Any) -> bool:
        """Return True if the dataset has a state after the first global batch."""
        return bool(self._state_after(samples))

    def _remember(self, position: int, state: dict[str, Any]) -> None:
        """Keep the states of the last step batches, as batches may be read ahead of the one that is trained on."""
        self._states[position] = state
        # Position 0 is that of the next epoch, and smaller than all others although it is the latest.
        for old in sorted(self._states.keys() - {0})[:-_STATES_KEPT]:
            del self._states[old]
            self._next_items.pop(old, None)

    def _from(self, restored: dict[str, Any], epoch: int, position: int) -> Any:
        """Return an iterator over the samples from `position` on, by a saved state or by reading and skipping."""
        has_state = self._keeps_position and restored.get("position") == position
        if position == 0 and has_state:
            has_state = self._continues_over_epochs
            if has_state and "rest" in restored:
                self._end_epoch(restored, epoch - 1)
                has_state = False
            elif has_state:
                self._dataset.load_state_dict(restored["dataset"])  # before set_epoch, as in a run without a resume
        self._set_epoch(epoch)
        if has_state and position and "dataset" in restored:
            self._states[position] = {"dataset": restored["dataset"]}
            return self._samples(epoch, position, begins_at=restored["dataset"])
        samples = self._samples(epoch, 0)
        if position:
            reason = "has no saved position (state_dict) at this step" if self._keeps_position else _CANNOT_SEEK
            self._warn_of_skipping(reason, position)
            for start in range(0, position, self._step_items):
                self._read(samples, epoch, start)
        return self._some_of(samples) if has_state else samples

    def _some_of(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the samples of an iteration, or of a second one if it has none."""
        is_empty = True
        for sample in samples:
            is_empty = False
            yield sample
        # A dataset that was saved at its end may yield nothing at first.
        if is_empty:
            yield from self._dataset

    def _check_length(self, position: int, *, is_end: bool) -> None:
        """Warn, once, if an epoch of training has another number of samples than the dataset's length says."""
        length = self.stage_data.num_items
        if length is None or self._told_of_length or self.stage_data.stage != "train":
            return
        is_shorter = is_end and position + self._step_items <= length  # `drop_last` drops less than a batch
        if is_shorter or (not is_end and position >= length):
            self._told_of_length = True
            logger.warning(
                "the iterable training dataset has %s %d samples in an epoch, and a length (__len__) of %d, by which "
                "epochs and steps of the run are counted. Return the number of samples from __len__, or remove it.",
                "only" if is_end else "more than",
                position,
                length,
            )

    def _set_epoch(self, epoch: int) -> None:
        with self._seeded(epoch, _SET_EPOCH):
            set_epoch(self._dataset, epoch)

    def _seeded(self, epoch: int, position: int) -> AbstractContextManager[None]:
        """Seed the generators in the block, at whose end they are what training has left."""
        if not self.stage_data.seed_samples:
            return nullcontext()
        return self._generators.seeded(request_seed(self.seed, epoch, position))

    def _warn_of_skipping(self, reason: str, position: int) -> None:
        what = "samples" if self.stage_data.batch_size else "batches"
        logger.warning(
            "the iterable training dataset %s: its first %d %s are read again and skipped.", reason, position, what
        )

    def _end_epoch(self, restored: dict[str, Any], epoch: int) -> None:
        """Read the last step of an epoch that the limit ended, so that the dataset is as it was after it."""
        if "dataset" not in restored:
            logger.warning(
                "the iterable training dataset has no saved position at the end of an epoch of one step: the resumed "
                "run begins it again. Set trainer.limit_train_batches to 2 or more."
            )
            return
        self._set_epoch(epoch)
        first, num_items = restored["rest"]
        with preserve_rng():  # also without seeds: the generators are already those after the step
            samples = self._samples(epoch, first, begins_at=restored["dataset"])
            with self._seeded(epoch, first):
                deque(islice(samples, num_items), maxlen=0)

    def _samples(self, epoch: int, position: int, *, begins_at: dict[str, Any] | None = None) -> Iterator[Any]:
        """Return an iterator over the dataset, which is read here or ahead by a worker process.

        It begins at the state `begins_at` of that position, by default at the current one.
        """
        stage_data = self.stage_data
        if stage_data.num_workers == 0:
            with self._seeded(epoch, BEFORE_FIRST):
                if begins_at is not None:
                    self._dataset.load_state_dict(begins_at)
                return iter(self._dataset)
        # Not loaded here: the state of this process is the one that every epoch's worker starts from.
        return StreamInWorker(
            self._dataset,
            partial(request_seed, self.seed, epoch),
            position=position,
            batch_size=self._step_items,
            begins_at=begins_at,
            # After steps of training alone, since it takes a copy.
            reports_state=self._keeps_position and stage_data.stage == "train",
            start=stage_data.start_worker,
        )

    def _take(self, samples: Any, epoch: int, position: int) -> Taken:
        """Return this rank's samples of the global batch at a position; of no items at the end."""
        step_batch = self._read(samples, epoch, position)
        self._next_items[position] = step_batch[:1]
        return Taken(step_batch[self.rank :: self.world_size], len(step_batch))

    def _read(self, samples: Iterator[Any], epoch: int, position: int) -> list[Any]:
        """Return the samples of the global batch at a position; raises UserError if the dataset is empty."""
        # A worker has seeded its own generators.
        with nullcontext() if self.stage_data.num_workers else self._seeded(epoch, position):
            step_batch = list(islice(samples, self._step_items))
        self._check_not_empty(position + len(step_batch))
        if not self._is_checked:
            self._first_item = _digest(step_batch[0])
        return [] if self.stage_data.drop_last and len(step_batch) < self._step_items else step_batch

    def _check_not_empty(self, num_samples: int) -> None:
        if num_samples == 0:
            raise UserError(
                f"the {self.stage_data.stage} IterableDataset gave no sample; check where its samples come from."
            )

    def _step_batch(self, taken: Taken, *, ends_epoch: bool) -> StepBatch:
        count = taken.num_items
        return StepBatch(self._micro_batches(taken.mine), count, count, ends_epoch, is_even=taken.is_even)

    def _micro_batches(self, samples: list[Any]) -> list[MicroBatch]:
        size = self._plan.micro_batch_size
        chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
        return [MicroBatch(collate(self.stage_data.collate_fn, chunk), len(chunk)) for chunk in chunks]


class PreBatchedIterableLoader(IterableBatchLoader):
    """Reads a pre-batched iterable dataset, whose items are global batches; each rank reads all, and keeps its rows."""

    def __init__(self, stage_data: StageData, strategy: ShardsData, **settings: Any) -> None:
        super().__init__(stage_data, strategy, **settings)
        self._rows = RowSplitter(strategy)

    def batches(self) -> Iterator[MicroBatch]:
        yield from self._rows.batches(self._converted(item) for [item] in self._global_batches())

    def _take(self, samples: Any, epoch: int, position: int) -> Taken:
        self._next_items[position] = step_batch = self._read(samples, epoch, position)
        return Taken(step_batch, len(step_batch))

    def _step_batch(self, taken: Taken, *, ends_epoch: bool) -> StepBatch:
        return self._rows.step_batch(self._converted(taken.mine[0]), ends_epoch=ends_epoch)

    def _converted(self, item: Any) -> Any:
        # The default function takes a list of samples, and this item is a batch already.
        convert = self.stage_data.collate_fn
        return item if convert is default_collate else convert(item)


class ShardedBatchLoader(IterableBatchLoader):
    """Reads an iterable dataset with shards, one sample of each in turn: a rank reads only the shards it keeps.

    Every epoch starts from the dataset as it was given. An evaluation of a limited number of batches, and predictions,
    follow the dataset's own order, with one worker at most.
    """

    def __init__(self, stage_data: StageData, strategy: ShardsData, **settings: Any) -> None:
        super().__init__(stage_data, strategy, **settings)
        # Shards are opened again in every epoch.
        self._continues_over_epochs = False
        self._num_shards = num_shards_of(stage_data.dataset) or 1
        readers = num_readers(self._num_shards, self.world_size, self._step_items)
        if stage_data.stage == "train" and readers < self.world_size:
            logger.warning(
                "the iterable training dataset has %d shards: with %d ranks and batch_size=%d, each sample is read by "
                "%d ranks. If the number of shards and batch_size are multiples of the ranks, each is read once.",
                self._num_shards,
                self.world_size,
                self._step_items,
                self.world_size // readers,
            )

    def description(self) -> dict[str, Any]:
        return {**super().description(), "the number of shards": self._num_shards}

    def batches(self) -> Iterator[MicroBatch]:
        if self.limit is not None or self.stage_data.stage == "predict":
            yield from super().batches()
            return
        readers = num_readers(self._num_shards, self.world_size, None)
        local_shards = range(self.rank % readers, self._num_shards, readers)
        chunk_size = -(-self._step_items // self._num_shards)
        samples = read_shards(self.stage_data.dataset, local_shards, chunk_size=chunk_size, **self._settings(0))
        size = self._plan.micro_batch_size
        # Ranks that read the same shards take their samples in turn.
        local_samples = islice(samples, self.rank // readers, None, self.world_size // readers)
        chunk = list(islice(local_samples, size))
        # With several sets of shards one of them may be empty, and the dataset is not.
        if readers == 1 and self.rank == 0:
            self._check_not_empty(len(chunk))
        while chunk:
            yield from self._micro_batches(chunk)
            chunk = list(islice(local_samples, size))

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return the place in the order and the states of all shards; collective."""
        # All ranks remember the same positions, so all of them gather or none does.
        if position not in self._states:
            return {}
        saved = dict(self._states[position])
        of_ranks = self._comm.all_gather_object((saved["shards"], self._next_item(position)))
        saved["shards"] = {shard: state for shards, _ in of_ranks for shard, state in shards.items()}
        return {"position": position, **saved, **of_ranks[0][1]}

    def _state_after(self, samples: ShardedSamples) -> dict[str, Any]:
        return samples.state()

    def _can_resume(self, samples: ShardedSamples) -> bool:
        return samples.can_seek

    def _next_item(self, position: int) -> dict[str, Any]:
        return {**super()._next_item(position), "ranks": self.world_size}

    def _check_resumed(self, restored: dict[str, Any], epoch: int, position: int) -> None:
        # With another number of ranks the first one keeps other items.
        if restored.get("ranks") == self.world_size:
            super()._check_resumed(restored, epoch, position)

    def _from(self, restored: dict[str, Any], epoch: int, position: int) -> ShardedSamples:
        # The state of another number of shards does not say where to begin in these.
        if restored.get("position") != position or len(restored.get("lengths", ())) != self._num_shards:
            restored = {}
        stream = ShardedSamples(
            self.stage_data.dataset,
            self._comm,
            batch_size=self._step_items,
            saved=restored or None,
            **self._settings(epoch),
        )
        if position and not restored:
            self._warn_of_skipping("has no saved position (state_dict) at this step", position)
            # One global batch at a time: a single take would hold all skipped samples in memory.
            for start in range(0, position, self._step_items):
                stream.take(min(self._step_items, position - start))
        elif position and not restored["shards"]:
            self._warn_of_skipping(_CANNOT_SEEK, position)
        return stream

    def _settings(self, epoch: int) -> dict[str, Any]:
        start = self.stage_data.start_worker
        return {"num_workers": self.stage_data.num_workers, "start": start, "seed": self.seed, "epoch": epoch}

    def _take(self, samples: ShardedSamples, epoch: int, position: int) -> Taken:
        step_batch = samples.take(self._step_items)
        self._next_items[position] = step_batch.mine[:1]
        self._check_not_empty(position + step_batch.num_items)
        is_dropped = self.stage_data.drop_last and step_batch.num_items < self._step_items
        return Taken([], 0) if is_dropped else step_batch


def _digest(item: Any) -> str:
    """Return a hash of the numbers and texts in an item."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(item):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            # As bytes, since an item may be a whole batch; numpy does not know every dtype.
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            continue
        value = leaf.tolist() if hasattr(leaf, "tolist") else leaf
        # The `repr` of other objects may contain an address, which differs between ranks that read the same item.
        if isinstance(value, (bool, int, float, complex, str, bytes, list)):
            digest.update(repr(value).encode())
    return digest.hexdigest()


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
    # Callable, as a dataset may have a list of this name. An evaluation reads each sample once, in the dataset's order.
    if callable(order_of_dataset) and stage_data.stage == "train":
        order: Order = order_of_dataset(seed=seed, shuffle=shuffle)
        return order
    return GlobalOrder(stage_data.num_items, seed=seed, shuffle=shuffle)
