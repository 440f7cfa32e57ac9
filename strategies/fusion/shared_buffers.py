"""Fusion buffers in memory that all ranks of one host share: a server reads its part of every rank's buffer.

Counters, waiting and errors are those of `ddp`'s shared memory; what is different is what a server does with its part:
it may read and write the short number format in which gradients travel, and with a sharded optimizer it keeps the sum
and later writes the new weights of its part into every rank's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..ddp.failure import FailureBoard
from ..ddp.shared_memory import SharedBucket, SharedMemoryTransport
from ..ddp.transport import Reduction
from .part_transport import BufferSettings, PartTransport, sum_in_order


class SharedBuffers(SharedMemoryTransport, PartTransport):
    """Sums and shares in the memory of the ranks themselves."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        board: FailureBoard,
        timeout_seconds: float,
        settings: BufferSettings,
        num_gradients: Callable[[], list[int]],
    ) -> None:
        super().__init__(group, board=board, timeout_seconds=timeout_seconds)
        self.settings, self.num_gradients = settings, num_gradients
        self.weights: list[Tensor] = []
        self._flats: list[Tensor] = []  # what the Reducer fills; on the wire if the format is the same

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return one flat tensor of zeros for each (elements, dtype). Collective."""
        wires = [(numel, self.wire_type_of(dtype)) for numel, dtype in sizes]
        weights = list(sizes) if self.settings.sharded else []
        shared = super().allocate([*wires, *weights])
        self.weights = shared[len(sizes) :]
        self._flats = []
        for index, (numel, dtype) in enumerate(sizes):
            wire = shared[index]
            flat = wire if wire.dtype == dtype else torch.zeros(numel, dtype=dtype)
            self._flats.append(flat)
            limit = self.num_gradients()[index] if self.settings.sharded else None
            self.buckets[index] = _SummedBuffer(self.buckets[index], flat, rank=self.rank, kept_up_to=limit)
        for index in range(len(self.weights)):
            spans = [_span(chunk[self.rank]) for chunk in self.buckets[index].chunks]
            place = len(sizes) + index
            self.buckets[place] = _SharedWeights(self.buckets[place], spans, rank=self.rank)
        return self._flats

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Reduction:
        """Let the others know that this rank's gradients are in, and sum what is already complete."""
        flat, wire = self._flats[bucket], self.buckets[bucket].flat
        if wire is flat:
            return super().start(bucket, where=where, timed=timed)
        wire.copy_(flat)
        begin = self.num_gradients()[bucket] if self.settings.sharded else 0
        return _Read(super().start(bucket, where=where, timed=timed), wire[begin:], flat[begin:])

    def own_parts(self, buffer: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the gradient elements of a buffer that this rank sums."""
        bucket, limit = self.buckets[buffer], self.num_gradients()[buffer]
        spans = [_span(chunk[self.rank]) for chunk in bucket.chunks]
        return [(start, min(stop, limit)) for start, stop in spans if start < limit]

    def share(self, buffer: int, *, where: str) -> Reduction:
        """Start to write this rank's parts of the weights to all ranks."""
        return super().start(len(self._flats) + buffer, where=where)

    @property
    def bytes_a_step(self) -> int:
        """Bytes that this rank reads from and writes to the memory of others in one step."""
        total = 0
        for bucket in self.buckets:
            own = sum(chunk[self.rank].nbytes for chunk in bucket.chunks) * (self.world_size - 1)
            reads = not isinstance(bucket, _SharedWeights)
            writes = not (self.settings.sharded and reads)
            total += own * (reads + writes)
        return total

    def close(self) -> None:
        """Let go of the memory; tensors that still point to it keep it alive."""
        super().close()
        self.weights, self._flats = [], []


class _SummedBuffer(SharedBucket):
    """A buffer whose parts are summed by their servers, and then written to all, or kept up to an element."""

    __slots__ = ("kept_up_to", "rank", "result")

    def __init__(self, bucket: SharedBucket, result: Tensor, *, rank: int, kept_up_to: int | None) -> None:
        super().__init__(bucket.number, bucket.flat, bucket.chunks)
        self.result, self.rank, self.kept_up_to = result, rank, kept_up_to

    def add_shard(self) -> None:
        with torch.no_grad():
            for chunk in self.chunks:
                if self.flat.dtype.itemsize < 4:
                    total = sum_in_order(chunk)
                else:
                    total = chunk[0]  # nobody else reads this part of rank 0's buffer, so it may hold the sum
                    for other in chunk[1:]:
                        total.add_(other)
                self._put(total, chunk)

    def _put(self, total: Tensor, chunk: list[Tensor]) -> None:
        """Keep what this server keeps of a sum, and write the rest to all."""
        start, stop = _span(chunk[self.rank])
        kept = 0 if self.kept_up_to is None else max(0, min(stop, self.kept_up_to) - start)
        if kept:
            _copy(total[:kept], self.result[start : start + kept])
        if start + kept < stop:
            for part in chunk:
                _copy(total[kept:], part[kept:])


class _SharedWeights(SharedBucket):
    """Weights of which each rank writes its part to all others."""

    __slots__ = ("rank",)

    def __init__(self, bucket: SharedBucket, spans: Sequence[tuple[int, int]], *, rank: int) -> None:
        # Parts begin at cache lines, which hold another number of gradients where those travel in a short format.
        chunks = [[part.as_strided((stop - start,), (1,), start) for part in bucket.chunks[0]] for start, stop in spans]
        super().__init__(bucket.number, bucket.flat, chunks)
        self.rank = rank

    def add_shard(self) -> None:
        with torch.no_grad():
            for chunk in self.chunks:
                for rank, part in enumerate(chunk):
                    if rank != self.rank:
                        part.copy_(chunk[self.rank])


class _Read:
    """A reduction whose result is copied from the wire once it is there."""

    def __init__(self, reduction: Reduction, wire: Tensor, flat: Tensor) -> None:
        self.reduction, self.wire, self.flat = reduction, wire, flat

    @property
    def finished_at(self) -> float | None:
        """When the sum was on the wire, where that is known."""
        return self.reduction.finished_at

    @finished_at.setter
    def finished_at(self, moment: float | None) -> None:
        self.reduction.finished_at = moment

    def wait(self) -> None:
        """Return once the flat tensor holds the result."""
        self.reduction.wait()
        self.flat.copy_(self.wire)


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _span(part: Tensor) -> tuple[int, int]:
    """Return where a part begins and ends in its buffer."""
    start = int(part.storage_offset())
    return start, start + part.numel()
