"""Shards of an iterable dataset: the order of their samples, and the shards that a rank and its workers read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from math import gcd
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from trainkit.data.order import sample_seed
from trainkit.data.readers import BEFORE_FIRST, StartWorker, WorkerIterator, start_worker
from trainkit.distributed.collectives import Collectives
from trainkit.errors import UserError
from trainkit.rng import SavedGenerators

Lengths = list[int | None]
"""Samples of each shard; `None` where that is not known yet."""


def num_shards_of(dataset: Any) -> int | None:
    """Return the number of shards of an iterable dataset; `None` if it has no `shard` method, or a single shard."""
    # `n_shards` is the name in older versions of Hugging Face datasets.
    number = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return number if callable(getattr(dataset, "shard", None)) and isinstance(number, int) and number > 1 else None


def lengths_of_shards(dataset: Any, *, epoch: int) -> Lengths:
    """Return the length of each shard in an epoch, `None` for shards without one."""
    num_shards = num_shards_of(dataset) or 1
    try:
        with SavedGenerators():
            return [len(open_shard(dataset, num_shards, index, epoch)) for index in range(num_shards)]
    # A shard without `__len__`, or with that of an abstract class.
    except (TypeError, NotImplementedError):
        return [None] * num_shards


def open_shard(dataset: Any, num_shards: int, index: int, epoch: int) -> Any:
    """Return one shard of a dataset, at its first sample of the epoch."""
    set_epoch(dataset, epoch)
    shard = dataset.shard(num_shards=num_shards, index=index)
    set_epoch(shard, epoch)  # a new dataset, which need not know the epoch of the whole one
    return shard


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call the `set_epoch` of a dataset that has one."""
    if (of_dataset := getattr(dataset, "set_epoch", None)) is not None:
        of_dataset(epoch)


def can_seek(dataset: Any) -> bool:
    """Return True if a dataset's `state_dict` holds its exact position."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    # That of a shuffle buffer of Hugging Face datasets leaves out the samples in the buffer.
    # Private, as Hugging Face datasets have no public way to look for a shuffle buffer.
    source = getattr(dataset, "_ex_iterable", None)
    while source is not None:
        if type(source).__name__ == "BufferShuffledExamplesIterable":
            return False
        source = getattr(source, "ex_iterable", None)
    return True


# ---- The order


class Place(NamedTuple):
    """A place in the order of an epoch: the next sample is `shard`'s, of a round that takes one sample of each."""

    round: int
    shard: int

    def taken(self, shard: int, lengths: Lengths) -> int:
        """Return the number of samples of a shard that come before this place."""
        taken, length = self.round + (shard < self.shard), lengths[shard]
        return taken if length is None else min(taken, length)


def next_shards(position: Place, count: int, lengths: Lengths) -> tuple[list[int], Place]:
    """Return the shards of the next `count` samples, and the place after them; fewer at the end of the epoch.

        shard 0   0 3 6 8         an exhausted shard is left out
        shard 1   1 4             of the rounds that follow
        shard 2   2 5 7 9 10

    A shard without a known length counts as endless.
    """
    shards: list[int] = []
    number, first = position
    while len(shards) < count:
        left = [shard for shard in range(first, len(lengths)) if (length := lengths[shard]) is None or length > number]
        # A round from its first shard on in which no shard has samples: the epoch is over.
        if not left and first == 0:
            break
        room = count - len(shards)
        shards += left[:room]
        if len(left) > room:
            return shards, Place(number, left[room])
        number, first = number + 1, 0
    return shards, Place(number, first)


def num_readers(num_shards: int, world_size: int, batch_size: int | None) -> int:
    """Return into how many disjoint sets of shards the ranks divide a dataset; `batch_size=None` if it is evaluated.

    Rank r reads the shards s = r modulo this number. If it is `world_size`, each sample is read once.
    """
    # Divides batch_size too, so that each set has equally many samples of a global batch. gcd(n, 0) is n.
    return gcd(num_shards, world_size, batch_size or 0)


# ---- Reading


class ShardStart(NamedTuple):
    """Where the reading of a shard begins."""

    taken: int = 0
    """Samples that are skipped."""
    read: int = 0
    """Samples that come before the position in `state`."""
    state: dict[str, Any] | None = None


class Chunk(NamedTuple):
    """Consecutive samples of a shard."""

    shard: int
    samples: list[Any]
    read: int
    """Samples of the shard up to the end of this chunk."""
    state: dict[str, Any] | None
    """The state of the shard after this chunk, if it can seek."""
    is_last: bool


class ShardChunks(IterableDataset[Chunk]):
    """Yields the chunks of some shards of a dataset, one of each in turn.

    Python, numpy and torch are seeded for each chunk by the seed, the epoch, the shard and the number of the chunk:
    what a dataset draws from them does not depend on who reads it.
    """

    def __init__(
        self,
        dataset: Any,
        starts: Mapping[int, ShardStart],
        *,
        lengths: Lengths,
        chunk_size: int,
        seed: int,
        epoch: int,
    ) -> None:
        self._dataset, self._starts, self._lengths = dataset, starts, lengths
        self._chunk_size, self._seed, self._epoch = chunk_size, seed, epoch
        self._generators = SavedGenerators()

    def __iter__(self) -> Iterator[Chunk]:
        shards = {shard: self._chunks(shard, start) for shard, start in self._starts.items()}
        while shards:
            # A copy of the items, since shards that end are removed in the loop.
            for shard, chunks in list(shards.items()):
                chunk = next(chunks)
                if chunk.is_last:
                    del shards[shard]
                yield chunk

    def _chunks(self, shard: int, start: ShardStart) -> Iterator[Chunk]:
        seed = sample_seed(self._seed, self._epoch, shard)
        with self._generators.seeded(sample_seed(seed, 0, BEFORE_FIRST) % 2**63):
            dataset = open_shard(self._dataset, len(self._lengths), shard, self._epoch)
            if start.state is not None:
                dataset.load_state_dict(start.state)
        seeks, read = can_seek(dataset), start.read
        samples: Iterator[Any] | None = None
        length, is_last = self._lengths[shard], False
        while not is_last:
            # Chunks begin at fixed samples, so that a resume in a chunk reads it under the same seed.
            number = read // self._chunk_size
            stop = (number + 1) * self._chunk_size
            with self._generators.seeded(sample_seed(seed, 0, number) % 2**63), _without_worker_info():
                samples = iter(dataset) if samples is None else samples
                chunk = list(islice(samples, stop - read))
                first, read = read, read + len(chunk)
                # At the stated length one more sample is asked for: it would be lost if `__len__` is too small.
                is_last = read < stop or (read == length and not list(islice(samples, 1)))
            if length is not None and (is_last != (read == length)):
                raise UserError(
                    f"shard {shard} of the {type(self._dataset).__name__} has a length of {length}, but gave "
                    f"{f'only {read}' if read < length else 'more'} samples; correct its __len__, or remove it."
                )
            # A copy: the dataset may go on changing the state that it returned.
            state = None if is_last or not seeks else deepcopy(dict(dataset.state_dict()))
            chunk = chunk[max(start.taken - first, 0) :]
            if chunk or is_last:
                yield Chunk(shard, chunk, read, state, is_last)


@contextmanager
def _without_worker_info() -> Iterator[None]:
    """Hide from a dataset that a DataLoader worker reads it: a shard must be the same wherever it is read.

    In a worker, Hugging Face datasets would shuffle in another order.
    """
    # Private, as torch has no public way to hide it.
    from torch.utils.data._utils import worker

    hidden, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = hidden


class ShardReader:
    """Reads some shards of a dataset in this process, or ahead in worker processes that divide them."""

    def __init__(
        self,
        dataset: Any,
        starts: Mapping[int, ShardStart],
        *,
        num_workers: int,
        start: StartWorker = start_worker,
        seed: int,
        **settings: Any,
    ) -> None:
        self.shards = list(starts)
        self.ended: dict[int, int] = {}
        """The length of each shard whose end has been read."""
        self.can_seek = True
        """False once a chunk has come without a state, before the end of its shard."""
        self._samples: dict[int, deque[Any]] = {shard: deque() for shard in starts}
        self._starts = {shard: [start] for shard, start in starts.items()}  # of the samples not taken yet
        self._chunks: dict[int, Iterator[Chunk]] = {}
        for worker in range(min(max(num_workers, 1), len(starts))):
            # Every n-th shard, so that workers have equally many, give or take one.
            shards = self.shards[worker :: max(num_workers, 1)]
            chunks = ShardChunks(dataset, {shard: starts[shard] for shard in shards}, seed=seed, **settings)
            # The worker reads one chunk of each of its shards ahead.
            opened = WorkerIterator(chunks, seed=seed, ahead=len(shards), start=start) if num_workers else iter(chunks)
            self._chunks.update(dict.fromkeys(shards, opened))

    def fill(self, shard: int, count: int) -> bool:
        """Read until `count` samples of a shard can be taken; return False if it ends before."""
        while len(self._samples[shard]) < count and shard not in self.ended:
            chunk = next(self._chunks[shard])
            self._samples[chunk.shard].extend(chunk.samples)
            self.can_seek &= chunk.is_last or chunk.state is not None
            if chunk.is_last:
                self.ended[chunk.shard] = chunk.read
            if chunk.state is not None:
                self._starts[chunk.shard].append(ShardStart(read=chunk.read, state=chunk.state))
        return len(self._samples[shard]) >= count

    def take(self, shard: int) -> Any:
        """Return the next sample of a shard, which `fill` has read."""
        return self._samples[shard].popleft()

    def start_after(self, shard: int, taken: int) -> ShardStart:
        """Return where to begin to read a shard of which `taken` samples are taken."""
        starts = self._starts[shard]
        # The last position before the samples that are not taken: what was read ahead is read again after a resume.
        while len(starts) > 1 and starts[1].read <= taken:
            del starts[0]
        return starts[0]._replace(taken=taken)


def read_shards(dataset: Any, shards: Sequence[int], *, chunk_size: int, **settings: Any) -> Iterator[Any]:
    """Yield the samples of some shards, one of each in turn."""
    lengths: Lengths = [None] * (num_shards_of(dataset) or 1)
    starts = dict.fromkeys(shards, ShardStart())
    reader, left = ShardReader(dataset, starts, lengths=lengths, chunk_size=chunk_size, **settings), list(shards)
    while left:
        left = [shard for shard in left if reader.fill(shard, 1)]
        for shard in left:
            yield reader.take(shard)


class Taken(NamedTuple):
    """The samples of a global batch that a rank keeps."""

    mine: list[Any]
    num_items: int
    """Samples, or batches of a pre-batched dataset, over all ranks."""
    is_even: bool = True
    """Whether rank r has the samples r, r + W, ..."""


class ShardedSamples:
    """The samples of an iterable dataset with shards, one of each shard in turn; a rank reads only its own shards.

        shards 0 1 2 3, batch_size 6, W = 2

        order    0 1 2 3 0 1 | 2 3 0 1 2 3
        rank 0   0   2   0   | 2   0   2
        rank 1     1   3   1 |   3   1   3

    If lengths are unknown, ranks exchange with each global batch which shards have ended. Where shards have unequal
    lengths, the last global batches have more samples of some ranks than of others.
    """

    def __init__(
        self,
        dataset: Any,
        comm: Collectives,
        *,
        batch_size: int,
        num_workers: int,
        start: StartWorker = start_worker,
        seed: int,
        epoch: int,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        num_shards = num_shards_of(dataset) or 1
        readers = num_readers(num_shards, comm.world_size, batch_size)
        self._comm = comm
        self._own = range(comm.rank % readers, num_shards, readers)
        self._kept = slice(comm.rank // readers, None, comm.world_size // readers)  # of the samples of these shards
        self._place = Place(0, 0)
        self._lengths = lengths_of_shards(dataset, epoch=epoch)
        # The same on every rank, as lengths are: all enter the exchange or none, or they would wait for each other
        # forever.
        self._exchanges = readers > 1 and None in self._lengths
        settings: dict[str, Any] = {"lengths": list(self._lengths), "chunk_size": -(-batch_size // num_shards)}
        states: Mapping[int, tuple[int, dict[str, Any]]] = {}
        if saved is not None:
            self._place, self._lengths, states = Place(*saved["place"]), list(saved["lengths"]), saved["shards"]
        starts = {}
        for shard in self._own:
            taken = self._place.taken(shard, self._lengths)
            # A shard that has ended is not opened again.
            if taken != self._lengths[shard]:
                starts[shard] = ShardStart(taken, *states.get(shard, (0, None)))
        settings |= {"num_workers": num_workers, "start": start, "seed": seed, "epoch": epoch}
        self._reader = ShardReader(dataset, starts, **settings)

    def take(self, count: int) -> Taken:
        """Return this rank's samples among the next `count` of all; collective."""
        while True:
            shards, next_place = next_shards(self._place, count, self._lengths)
            # A shard that ends early changes the order of what follows, on all ranks, so it is made again with its
            # length.
            local_shards = [shard for shard in shards if shard in self._own]
            for shard, needed in Counter(local_shards).items():
                self._reader.fill(shard, needed)
            if not self._learn_lengths():
                break
        self._place, readers = next_place, self._own.step
        is_even = all((index - shard) % readers == 0 for index, shard in enumerate(shards))
        return Taken([self._reader.take(shard) for shard in local_shards][self._kept], len(shards), is_even)

    @property
    def can_seek(self) -> bool:
        """False if a shard that has been read has no exact position."""
        return self._reader.can_seek

    def _learn_lengths(self) -> bool:
        """Return True if any rank has found the end of a shard."""
        ended = {shard: length for shard, length in self._reader.ended.items() if self._lengths[shard] is None}
        # Every rank gets the same lengths, and so makes the same order.
        for of_rank in self._comm.all_gather_object(ended) if self._exchanges and None in self._lengths else [ended]:
            ended.update(of_rank)
        for shard, length in ended.items():
            self._lengths[shard] = length
        return bool(ended)

    def state(self) -> dict[str, Any]:
        """Return the place, and the states of the shards that this rank reads."""
        shards = {
            shard: (start.read, start.state)
            for shard in self._reader.shards
            if (start := self._reader.start_after(shard, self._place.taken(shard, self._lengths))).state is not None
        }
        return {"place": list(self._place), "lengths": list(self._lengths), "shards": shards}
