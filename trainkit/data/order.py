"""The order of samples, a pure function of (seed, epoch), and the shard of it that a rank reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from math import isqrt
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from trainkit.errors import UserError
from trainkit.rng import preserve_rng, seed_everything

_COMPARED = 1000
"""Indices of an epoch that are compared, to check that all ranks have the same order."""
_BLOCK = 1 << 14  # positions that are computed and kept together
_ROUNDS = 6  # 4 pass every randomness test that we know, at ten million samples and more
_ROUNDS_OF_SMALL = 24  # a shift among few rows or columns scatters little
_SMALL = 1 << 16  # positions: up to here _ROUNDS_OF_SMALL
_WORD = 0xFFFFFFFF
_LONG_WORD = 0xFFFFFFFFFFFFFFFF


class Order(Protocol):
    """The order of an epoch's samples: a pure function of the seed and the epoch."""

    num_samples: int

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Return the sample indices at positions `start`, `start + step`, ... below `stop`."""


class ShardSampler(DistributedSampler[Any]):
    """Gives rank r of W every W-th sample of each global batch; none is repeated or dropped.

        positions   0 1 2 3 | 4 5 6 7 | 8 9        batch_size 4, 10 samples, W = 2
        rank 0      0   2   | 4   6   | 8
        rank 1        1   3 |   5   7 |   9

    Over an epoch this equals PyTorch's `DistributedSampler`, if that neither pads nor drops samples.
    """

    def __init__(self, dataset: Sized, order: Order, *, rank: int, world_size: int) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank)  # type: ignore[arg-type] # only its len is used
        self.order = order

    def shard(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return this rank's sample indices among the positions from `start` to `stop` of the epoch's order."""
        return self.order.slice(epoch, start + self.rank, stop, self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices of the epoch given to `set_epoch`."""
        return iter(self.shard(self.epoch, 0, self.order.num_samples).tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self.order.num_samples, self.num_replicas))


class GlobalOrder:
    """The permutation of `num_samples` samples that each epoch follows.

    Rank r of W takes `slice(epoch, start + r, stop, W)` of the positions from start to stop.

    Up to `computed_above` samples the permutation is that of `torch.utils.data.DistributedSampler` with the same seed,
    and the one of the epoch in use is kept (8 bytes a sample). Above, each position is computed by itself from a keyed
    bijection, so memory stays below 1 MiB for any size and no epoch has a start-up cost.

    A slice of 256 positions costs about 3 us when the permutation is kept, and 10 us when it is computed, on one CPU
    core.
    """

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool = True, computed_above: int = 10_000_000) -> None:
        _check(num_samples, seed)
        self.num_samples, self.seed, self.shuffle = num_samples, seed, shuffle
        self._computed = _BlockCache(self._permuted, num_samples) if num_samples > computed_above else None
        self._cached: tuple[int, Tensor] | None = None

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Return the samples at positions `start, start + step, ...` below `stop` of the epoch.

        The result is int64 and a copy. Positions past the end of the epoch are ignored, as in a slice of a list.
        """
        positions = _positions(start, stop, step, self.num_samples)
        if not self.shuffle:
            return _arange(positions)
        if self._computed is not None:
            return self._computed.take(epoch, positions)
        cached = self._cached
        if cached is None or cached[0] != epoch:
            self._cached = None  # never two permutations in memory
            # The seed of DistributedSampler. A separate generator, so that the order draws nothing from the run's. On
            # the CPU also where torch.set_default_device chose a GPU, which has other permutations.
            generator = torch.Generator().manual_seed(self.seed + epoch)
            cached = self._cached = (epoch, torch.randperm(self.num_samples, generator=generator, device="cpu"))
        # A copy: a view sent to a worker process would take the whole permutation with it.
        return cached[1][positions.start : positions.stop : positions.step].clone()

    def _permuted(self, epoch: int, positions: Tensor) -> Tensor:
        """Walk each position along its cycle in the keyed bijection until it is a sample again."""
        rounds = _ROUNDS if self.num_samples > _SMALL else _ROUNDS_OF_SMALL
        keys = [_key(self.seed, epoch, round_) for round_ in range(rounds)]
        # The bijection is on rows x columns >= num_samples, less than one row too many: hardly any position walks on.
        rows = max(isqrt(max(self.num_samples - 1, 0)) + 1, 1)
        columns = max(-(-self.num_samples // rows), 1)
        samples = _feistel(positions, rows, columns, keys)
        outside = (samples >= self.num_samples).nonzero().flatten()
        while outside.numel():
            samples[outside] = _feistel(samples[outside], rows, columns, keys)
            outside = outside[samples[outside] >= self.num_samples]
        return samples


class WeightedOrder:
    """`num_samples` draws with replacement an epoch, in proportion to the weights.

    The draws are a pure function of (seed, epoch, position), so every slice costs the same, and only the cumulated
    weights are kept (8 bytes a sample). A sample of weight zero is never drawn.
    """

    def __init__(self, weights: Tensor | Sequence[float], num_samples: int, *, seed: int) -> None:
        tensor = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
        _check(num_samples, seed)
        self.num_samples, self.seed = num_samples, seed
        self._cumulated = (tensor / tensor.max()).cumsum(0)  # (samples); the division keeps huge weights finite
        self._last = int(tensor.nonzero()[-1])
        self._drawn = _BlockCache(self._draw, num_samples)

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Return the samples drawn for positions `start, start + step, ...` below `stop` of the epoch: int64."""
        return self._drawn.take(epoch, _positions(start, stop, step, self.num_samples))

    def _draw(self, epoch: int, positions: Tensor) -> Tensor:
        uniform = _uniform(positions, _key(self.seed, epoch, 0), _key(self.seed, epoch, 1))
        # `right`: a number that equals a sum belongs to the next sample, so that one of weight zero is never drawn.
        drawn = torch.searchsorted(self._cumulated, uniform * self._cumulated[-1], right=True)
        return drawn.clamp_(max=self._last)  # rounding may reach the sum itself


class LengthGroupedOrder:
    """Each sample once an epoch, with global batches of samples of similar length.

        shuffled      7 2 9 0 | 4 1 8 3 | 5 6        groups of batches, here of 4 samples
        by length     0 1 2 3 | 4 5 6 7 | 8 9        within a group
        batches       4 5 6 7 | 0 1 2 3 | 8 9        shuffled again; a short last batch stays the last

    The order is a function of (seed, epoch) alone. Memory: 8 bytes a sample for the lengths, and one group.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        batches_per_group: int = 50,
    ) -> None:
        self._lengths = torch.as_tensor(lengths, dtype=torch.int64)
        if self._lengths.dim() != 1:
            raise UserError(f"lengths must be one number for each sample, got shape {tuple(self._lengths.shape)}.")
        self.num_samples = len(self._lengths)
        self._order = GlobalOrder(self.num_samples, seed=seed, shuffle=shuffle)
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._group_size = batch_size * batches_per_group
        self._cached: tuple[int, int, Tensor] | None = None

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        stop = min(stop, self.num_samples)
        if start >= stop:
            return torch.empty(0, dtype=torch.int64)
        first, last = start // self._group_size, (stop - 1) // self._group_size
        groups = torch.cat([self._group(epoch, number) for number in range(first, last + 1)])
        offset = first * self._group_size
        return groups[start - offset : stop - offset : step].clone()

    def _group(self, epoch: int, number: int) -> Tensor:
        if self._cached is not None and self._cached[:2] == (epoch, number):
            return self._cached[2]
        start = number * self._group_size
        samples = self._order.slice(epoch, start, start + self._group_size)
        # Stable: samples of one length stay in their random order.
        samples = samples[torch.argsort(self._lengths[samples], stable=True)]
        batches = list(samples.split(self._batch_size))
        # The short batch stays the last: in between, all later batches would begin at other positions.
        short = [batches.pop()] if len(batches[-1]) < self._batch_size else []
        if self._shuffle and batches:
            # By the group, so that any group can be made alone, after a resume or on another rank.
            generator = torch.Generator().manual_seed(sample_seed(self._seed, epoch, number))
            batches = [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
        group = torch.cat([*batches, *short])
        self._cached = (epoch, number, group)
        return group


class SamplerOrder:
    """The order of a custom sampler, drawn again for each epoch under a seed from (seed, epoch).

    It is the same on every rank and after a resume if the sampler draws from the global generators of torch, python or
    numpy, or from its `generator` attribute. Another source of randomness is not seeded.
    """

    def __init__(self, sampler: Sampler[int], *, seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._epoch = -1
        self._indices = torch.empty(0, dtype=torch.int64)
        # A sampler's order cannot be computed by position, so an epoch of it is kept.
        self.num_samples = len(sampler)  # type: ignore[arg-type] # checked where the loader is read

    def slice(self, epoch: int, start: int, stop: int, step: int = 1) -> Tensor:
        if epoch != self._epoch:
            with self._drawing(epoch) as drawn:
                indices = [int(index) for index in drawn]
            if len(indices) != self.num_samples:
                raise UserError(
                    f"the sampler {type(self._sampler).__name__} gave {len(indices)} indices, but its __len__ is "
                    f"{self.num_samples}; return the same number."
                )
            self._indices, self._epoch = torch.tensor(indices, dtype=torch.int64), epoch
        return self._indices[start:stop:step]

    def first_indices(self) -> list[int]:
        """Return the first indices of epoch 0, drawn again at each call."""
        with self._drawing(0) as indices:
            return [int(index) for index in islice(indices, _COMPARED)]

    def check(self, of_ranks: Sequence[str]) -> str | None:
        """Return a warning if a resume would change the order, else `None`; raises UserError if ranks differ.

        `of_ranks` has the `fingerprint` of this order on each rank.
        """
        name = type(self._sampler).__name__
        if any(drawn != of_ranks[0] for drawn in of_ranks):
            raise UserError(
                f"the sampler {name} draws another order on each rank, so samples would be repeated and lost; let it "
                "draw from torch's, python's or numpy's global generator, or from an attribute `generator` "
                "(torch.Generator), which are seeded for each epoch."
            )
        if fingerprint(self) != of_ranks[0]:
            return (
                f"the sampler {name} draws from a generator that trainkit cannot seed: a resumed run would use "
                "another order. Let it draw from torch's, python's or numpy's global generator, or from an attribute "
                "`generator` (torch.Generator)."
            )
        return None

    @contextmanager
    def _drawing(self, epoch: int) -> Iterator[Iterator[int]]:
        """Yield the sampler's iterator of an epoch, under seeds that are the same on every rank."""
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        seed = sample_seed(self._seed, epoch, 0) % 2**63
        generator = getattr(self._sampler, "generator", None)
        with preserve_rng():
            seed_everything(seed)
            # It is not one of the global generators, which alone `seed_everything` seeds and `preserve_rng` restores.
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            yield iter(self._sampler)


def fingerprint(order: Order) -> str:
    """Return a digest of the first indices of epoch 0; a custom sampler draws them again at each call."""
    first = order.first_indices() if isinstance(order, SamplerOrder) else order.slice(0, 0, _COMPARED).tolist()
    return hashlib.sha256(repr(first).encode()).hexdigest()[:12]


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return 64 bits (0 <= s < 2**64) that depend on every bit of the three numbers, to seed one sample.

    The three are folded in one after the other with the finaliser of SplitMix64 (two xor-shift-multiply rounds), so
    within an epoch two samples never share a seed. `torch.Generator().manual_seed`, `random.Random` and
    `numpy.random.default_rng` take the number as it is. The function is fixed: a change would change results.
    """
    state = 0
    for number in (seed, epoch, index):
        state = _mix_long((state + 0x9E3779B97F4A7C15) & _LONG_WORD ^ number & _LONG_WORD)
    return state


def _check(num_samples: int, seed: int) -> None:
    if not 0 <= num_samples <= 1 << 62:
        raise ValueError(f"num_samples must be between 0 and 2**62, got {num_samples}")
    if not 0 <= seed < 1 << 63:  # with the epoch added torch still takes it
        raise ValueError(f"seed must be between 0 and 2**63 - 1, got {seed}")


class _BlockCache:
    """Computes positions in blocks, so that many small slices cost one tensor operation."""

    def __init__(self, compute: Callable[[int, Tensor], Tensor], num_samples: int) -> None:
        self._compute = compute
        self._num_samples = num_samples
        self._blocks: dict[tuple[int, int], Tensor] = {}

    def take(self, epoch: int, positions: range) -> Tensor:
        if len(positions) == 0:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        span = positions[-1] + 1 - positions.start
        # A rank with a large step needs little of a wide span: compute only its positions.
        if span >= _BLOCK // 2:
            return self._compute(epoch, _arange(positions))
        first, last = positions.start // _BLOCK, positions[-1] // _BLOCK
        blocks = [self._block(epoch, number) for number in range(first, last + 1)]
        block = blocks[0] if first == last else torch.cat(blocks)
        offset = first * _BLOCK
        return block[positions.start - offset : positions.stop - offset : positions.step].clone()

    def _block(self, epoch: int, number: int) -> Tensor:
        block = self._blocks.get((epoch, number))
        if block is None:
            start = number * _BLOCK
            block = self._compute(epoch, _arange(range(start, min(start + _BLOCK, self._num_samples))))
            # Two blocks, for slices that cross a border; a new dict, as another thread may be reading the old one.
            latest = list(self._blocks.items())[-1:]
            self._blocks = dict([*latest, ((epoch, number), block)])
        return block


def _positions(start: int, stop: int, step: int, num_samples: int) -> range:
    if start < 0 or stop < 0 or step < 1:
        raise ValueError(f"positions start at 0 and go up by at least 1, got slice({start}, {stop}, {step})")
    return range(min(start, num_samples), min(stop, num_samples), step)


def _arange(positions: range) -> Tensor:
    stop = max(positions.start, positions.stop)
    return torch.arange(positions.start, stop, positions.step, dtype=torch.int64, device="cpu")


def _feistel(positions: Tensor, rows: int, columns: int, keys: list[tuple[int, int]]) -> Tensor:
    """Return a keyed bijection of [0, rows * columns): in turn, each coordinate is shifted by a hash of the other.

    No product below exceeds 63 bits: words have 32 bits, multipliers 31, rows and columns at most 2**31.
    """
    row = torch.div(positions, columns, rounding_mode="trunc")
    column = positions - row * columns
    for key in keys:
        # A multiplication and a shift map 32 random bits to [0, rows) without a division.
        shift = _hash(column, key).mul_(rows).bitwise_right_shift_(32)
        row.add_(shift)
        # One subtraction, as the sum is below 2 * rows: a remainder would cost more.
        row.sub_((row >= rows).mul(rows))
        row, column, rows, columns = column, row, columns, rows
    # After an even number of rounds, as all are, each is in its own place again.
    return row.mul_(columns).add_(column)


def _uniform(positions: Tensor, *keys: tuple[int, int]) -> Tensor:
    """Return a float64 in [0, 1) of 53 random bits for each position and pair of keys."""
    words = []
    for key in keys:
        high = _hash(positions >> 32, (key[1], key[0]))
        words.append(_hash((positions & _WORD) ^ high, key))
    return ((words[0] >> 5 << 26) | (words[1] >> 6)).to(torch.float64).mul_(2.0**-53)


def _hash(words: Tensor, key: tuple[int, int]) -> Tensor:
    """Return 32 bits for each 32-bit word; multiplications by odd numbers below 2**31, so int64 never overflows."""
    # The multipliers are those of hash-prospector, a search for 32-bit hashes with little bias.
    mixed = words ^ key[0]
    mixed.bitwise_xor_(mixed >> 16).mul_(0x21F0AAAD).bitwise_and_(_WORD)
    mixed.bitwise_xor_(mixed >> 15).bitwise_xor_(key[1]).mul_(0x735A2D97).bitwise_and_(_WORD)
    return mixed.bitwise_xor_(mixed >> 15)


def _key(seed: int, epoch: int, round_: int) -> tuple[int, int]:
    mixed = sample_seed(seed, epoch, round_)
    return mixed >> 32, mixed & _WORD


def _mix_long(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _LONG_WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _LONG_WORD
    return number ^ number >> 31
