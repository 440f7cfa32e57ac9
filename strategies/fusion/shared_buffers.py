"""Fusion buffers in memory that the ranks of a host share; between hosts the servers exchange what they have summed.

    host 0   rank 0   [ part 0 | part 1 ]    1  server 0 adds up part 0 of its host's buffers, server 1 part 1
             rank 1   [ part 0 | part 1 ]    2  servers 0 of all hosts exchange part 0, servers 1 part 1
    host 1   rank 2   [ part 0 | part 1 ]    3  and write the result into all buffers of their host
             rank 3   [ part 0 | part 1 ]

With one server a host that is rank 0, whose part is the whole buffer; on a single host there is no second stage.
Counters, waiting and errors are those of `ddp`'s shared memory. With a sharded optimizer sums stay with their server,
which writes the new weights of its part into every rank's weights instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore

from ..ddp.shared_memory import CHUNK_ELEMENTS, LINE_BYTES, BucketWork, SharedBucket, SharedMemoryTransport
from .exchange import GlooExchange
from .host_copy import HostCopier, HostCopy
from .transport import FusionSettings, ShardTransport, ShardWork, ordered_sum


class InFlightBucket(SharedBucket):
    """A bucket and how far it has come in its latest round."""

    __slots__ = ("is_taken", "is_told", "travels", "where")

    where: str
    is_told: bool  # the others know that it is filled
    is_taken: bool  # this rank has done its part of the host's work
    travels: ShardWork | None  # between hosts

    def is_on_host(self) -> bool:
        """Whether other ranks may read it."""
        return True


class GradientBuffer(InFlightBucket):
    """Gradients of which each server sums its part."""

    __slots__ = ("copy", "copy_back", "flag_views", "owner", "result", "span", "sums", "wire")

    def __init__(
        self, owner: SharedBuffers, number: int, flats: list[Tensor], result: Tensor, *, span: tuple[int, int]
    ) -> None:
        self.wire, self.owner, self.result, self.span = flats[owner.rank], owner, result, span
        parts = [flat[slice(*span)].split(CHUNK_ELEMENTS) for flat in flats]
        super().__init__(number, self.wire, [list(chunk) for chunk in zip(*parts, strict=True)])
        self.flag_views = [flat[owner.num_gradients()[number] :] for flat in flats]
        self.copy: HostCopy | None = None
        self.copy_back: HostCopy | None = None
        self.sums = self._place_of_sums()

    def _place_of_sums(self) -> Tensor:
        """Return host memory for the sum of this rank's part, in at least float32."""
        part = slice(*self.span)
        if self.wire.element_size() >= 4:
            return self.wire[part]
        if self.owner.settings.sharded and self.result.device.type == "cpu":
            return self.result[part]
        return torch.zeros(self.span[1] - self.span[0], dtype=torch.float32)

    def is_on_host(self) -> bool:
        if self.copy is not None and self.copy.is_done():
            self.copy = None
        return self.copy is None

    def add_shard(self) -> None:
        """Leave the sum of this rank's part where it is kept; on a single host also in all buffers, while in cache."""
        writes = not self.owner.settings.sharded and self.owner.between is None
        with torch.no_grad():
            for chunk, total in zip(self.chunks, self.sums.split(CHUNK_ELEMENTS), strict=True):
                _add_up(chunk, total)
                if writes:
                    _write(total, chunk)

    def write(self) -> None:
        """Leave the sum of this rank's part in all buffers of the host."""
        with torch.no_grad():
            for chunk, total in zip(self.chunks, self.sums.split(CHUNK_ELEMENTS), strict=True):
                _write(total, chunk)

    def used(self) -> Tensor:
        """Return 1 for each parameter for which a rank of this host had a gradient, else 0.

        Right also while another server already writes the answer here: it is made of the same flags.
        """
        return torch.stack(self.flag_views).amax(0).clamp_(max=1)

    def write_flags(self, used: Tensor, *, leader: bool) -> None:
        """Let this rank's flags, and the leader those of ranks that are no servers, say what all ranks used."""
        servers = self.owner.num_servers
        for view in [self.flag_views[self.owner.rank], *(self.flag_views[servers:] if leader else [])]:
            view.copy_(used)

    def take_back(self) -> None:
        """Start to copy the result to where the gradients are, if they are elsewhere."""
        if self.wire is not self.result:
            begin = len(self.wire) - len(self.flag_views[0]) if self.owner.settings.sharded else 0
            self.copy_back = self.owner.staging.to_device(self.wire[begin:], self.result[begin:])
            self.copy_back.order_current_stream()


class WeightBuffer(InFlightBucket):
    """Weights of which each server writes its part to all others."""

    __slots__ = ("others", "own")

    def __init__(self, number: int, flats: list[Tensor], *, rank: int, span: tuple[int, int]) -> None:
        super().__init__(number, flats[rank], [])
        self.own = flats[rank][slice(*span)]
        self.others = [flat[slice(*span)] for other, flat in enumerate(flats) if other != rank]

    def add_shard(self) -> None:
        """Leave all as it is: there is nothing to add."""

    def write(self) -> None:
        """Leave this rank's part in the weights of all ranks of the host."""
        with torch.no_grad():
            for other in self.others:
                other.copy_(self.own)


def _add_up(chunk: list[Tensor], total: Tensor) -> None:
    """Leave in `total`, which may be one of them, the sum of a chunk's tensors, added in the order of ranks."""
    first, *others = chunk
    if first.dtype.itemsize < 4:
        total.copy_(ordered_sum(chunk))
    elif others:
        for other in others[:-1]:
            first.add_(other)  # nobody else reads this part of the first rank's buffer
        torch.add(first, others[-1], out=total)
    elif first.data_ptr() != total.data_ptr():
        total.copy_(first)


def _write(total: Tensor, chunk: list[Tensor]) -> None:
    for part in chunk:
        if part.data_ptr() != total.data_ptr():
            part.copy_(total)


class SharedBuffers(SharedMemoryTransport, ShardTransport):
    """Sums and shares in the memory of the ranks of a host.

    Args:
        group: The ranks of this host.
        names: What they are called in messages: their ranks in the whole world.
        between: How this rank exchanges its part with the same server of other hosts; `None` if there is no other host,
            or this rank is no server.
        num_servers: How many of the host's ranks are servers, the first ones.
        device: Where the gradients are.
        staging: How they are copied to and from the host's memory.
        board: Where failures are told.
        timeout_seconds: How long to wait for another rank.
        settings: How buffers are summed.
        num_gradients: Gradient elements of each buffer.

    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        names: Sequence[int],
        between: GlooExchange | None,
        num_servers: int,
        device: torch.device,
        staging: HostCopier,
        failure_store: FailureStore,
        timeout_seconds: float,
        settings: FusionSettings,
        num_gradients: Callable[[], list[int]],
    ) -> None:
        super().__init__(group, failure_store=failure_store, timeout_seconds=timeout_seconds)
        self.names, self.between, self.num_servers = names, between, num_servers
        self.device, self.staging, self.settings, self.num_gradients = device, staging, settings, num_gradients
        self.weight_sets = []
        self._sizes: list[tuple[int, torch.dtype]] = []
        self._gradients: list[GradientBuffer] = []
        self._weights: list[list[WeightBuffer]] = []
        self._ready: dict[int, Any] = {}  # by buffer: the moment at which it was filled

    # ---- Memory

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return one flat tensor of zeros for each (elements, dtype). Collective."""
        self._sizes = list(sizes)
        wires = [(numel, self.wire_type_of(dtype)) for numel, dtype in sizes]
        sets = (1 + self.settings.second_weights) * self.settings.sharded
        self.live = 0
        super().allocate([*wires, *(self._sizes * sets)])
        for peer, name in zip(self.peers, self.names, strict=True):
            peer.rank = name
        if self.device.type != "cpu":  # in one piece: neighbouring buffers share pages
            self.staging.adopt(torch.frombuffer(self.peers[self.rank].region, dtype=torch.uint8))
        self.weight_sets = [[weights.flat for weights in of_set] for of_set in self._weights]
        if self.between is not None:
            self._adopt(self.between)
        return [bucket.result for bucket in self._gradients]

    def make_bucket(self, number: int, flats: list[Tensor]) -> SharedBucket:
        """Return gradients or, behind all of them, weights."""
        count = len(self._sizes)
        if number < count:
            numel, dtype = self._sizes[number]
            same = self.device.type == "cpu" and flats[self.rank].dtype == dtype
            result = flats[self.rank] if same else torch.zeros(numel, dtype=dtype, device=self.device)
            limit = self.num_gradients()[number] if self.settings.sharded else numel
            gradients = GradientBuffer(self, number, flats, result, span=self._span(limit, flats[0].element_size()))
            self._gradients.append(gradients)
            return gradients
        which, buffer = divmod(number - count, count)
        if not buffer:
            self._weights.append([])
        weights = WeightBuffer(number, flats, rank=self.rank, span=self._gradients[buffer].span)
        self._weights[which].append(weights)
        return weights

    def _span(self, numel: int, element_bytes: int) -> tuple[int, int]:
        """Return (start, stop) of this rank's part of a buffer; parts begin at lines of the processor's cache.

        That of a rank that is no server is empty.
        """
        line = LINE_BYTES // element_bytes
        part = -(-numel // self.num_servers // line) * line
        return min(self.rank * part, numel), min((self.rank + 1) * part, numel)

    def _adopt(self, between: GlooExchange) -> None:
        """Let the exchange with other hosts take place in this rank's parts."""
        flags = [torch.zeros(len(g.flag_views[0]), dtype=g.flag_views[0].dtype) for g in self._gradients]
        between.adopt(
            [g.sums for g in self._gradients],
            summed=[len(g.sums) for g in self._gradients],
            flags=flags,
            weight_sets=[
                [w.flat[slice(*g.span)] for w, g in zip(of_set, self._gradients, strict=True)]
                for of_set in self._weights
            ],
        )

    # ---- A buffer's way

    def mark_ready(self, buffer: int) -> None:
        """Note that what is on the current stream fills the buffer."""
        self._ready[buffer] = self.staging.mark()

    def order_current_stream(self, buffer: int) -> None:
        """Let what comes on the current stream see a buffer that has landed."""
        copy = self._gradients[buffer].copy_back
        if copy is not None:
            copy.order_current_stream()

    def start(self, bucket: int, *, where: str, timed: bool = False) -> ShardWork:
        """Let the others know that this rank's gradients are in, and sum what is already complete."""
        gradients = self._gradients[bucket]
        if gradients.wire is not gradients.result:
            ready = self._ready.pop(bucket, None) or self.staging.mark()
            gradients.copy = self.staging.to_host(gradients.result, gradients.wire, after=ready)
        return self._begin(gradients, where)

    def share(self, buffer: int, *, where: str) -> ShardWork:
        """Start to write this rank's parts of the next weights to all ranks."""
        return self._begin(self._weights[self.next][buffer], where)

    def _begin(self, bucket: GradientBuffer | WeightBuffer, where: str) -> ShardWork:
        bucket.round += 1
        bucket.where, bucket.travels, bucket.is_told, bucket.is_taken = where, None, False, False
        self.under_way.append(bucket)
        self.progress()
        return SharedBufferWork(self, bucket, where)

    def progress(self) -> None:
        """Sum, exchange and write what can be, in the order of buffers, without waiting."""
        if self.between is not None:
            self.between.progress()
        if self.under_way:
            self._take_up()
            self.under_way = [bucket for bucket in self.under_way if not self._is_finished_now(bucket)]

    def _take_up(self) -> None:
        """Add up the parts of buffers that the whole host has filled: between hosts their order must be the same."""
        for bucket in self.under_way:
            assert isinstance(bucket, (GradientBuffer, WeightBuffer))
            if not bucket.is_told and bucket.is_on_host():
                bucket.is_told = True
                self.raise_counter(2 * bucket.number, bucket.round)
            if not bucket.is_told or not (bucket.is_taken or self.is_filled(bucket)):
                break
            if not bucket.is_taken:
                bucket.is_taken = True
                bucket.add_shard()
                bucket.travels = self._sent(bucket)

    def _sent(self, bucket: GradientBuffer | WeightBuffer) -> ShardWork | None:
        """Return this part's exchange with other hosts, if there are any."""
        between = self.between
        if between is None:
            return None
        between.on_summed, between.live = self.on_summed, self.live
        if isinstance(bucket, WeightBuffer):
            return between.share((bucket.number - len(self._sizes)) % len(self._sizes), where=bucket.where)
        between.flags[bucket.number].copy_(bucket.used())
        return between.start(bucket.number, where=bucket.where)

    def _is_finished_now(self, bucket: SharedBucket) -> bool:
        """Write a part that is ready to the host's other ranks, and return whether it is written."""
        assert isinstance(bucket, (GradientBuffer, WeightBuffer))
        if not bucket.is_taken or not (bucket.travels is None or bucket.travels.is_done()):
            return False
        if bucket.travels is not None:
            bucket.travels.wait()
        if isinstance(bucket, WeightBuffer):
            bucket.write()
        else:
            self._finish(bucket)
        self.raise_summed(bucket)
        return True

    def _finish(self, gradients: GradientBuffer) -> None:
        if not self.settings.sharded:
            if self.between is not None:
                gradients.write()
            return
        if self.rank < self.num_servers:
            gradients.write_flags(self.used(gradients.number), leader=self.rank == 0)
        if self.on_summed is not None:
            if self.between is None:
                self.on_summed(gradients.number)
            self._weights[self.next][gradients.number].write()

    def own_parts(self, buffer: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the gradient elements of a buffer that this rank sums."""
        begin, end = self._gradients[buffer].span
        if self.between is None:
            return [(begin, end)] if begin < end else []
        return [(begin + start, begin + stop) for start, stop in self.between.own_parts(buffer)]

    def used(self, buffer: int) -> Tensor:
        """Return for each parameter of a summed buffer a number above 0 if any rank had a gradient."""
        return self._gradients[buffer].used() if self.between is None else self.between.used(buffer)

    @property
    def bytes_a_step(self) -> int:
        """Bytes that this rank reads from and writes to the memory of others, or sends to other hosts, in one step."""
        total = 0 if self.between is None else self.between.bytes_a_step
        for buffer, gradients in enumerate(self._gradients):
            start, stop = gradients.span
            wire = gradients.wire.element_size()
            written = self._weights[0][buffer].flat.element_size() if self._weights else wire
            total += (stop - start) * (self.world_size - 1) * (wire + written)
        return total

    def close(self) -> None:
        """Let go of the memory; tensors that still point to it keep it alive."""
        super().close()
        self.staging.close()
        if self.between is not None:
            self.between.close()
        self.weight_sets, self._gradients, self._weights = [], [], []
        self._ready = {}


class SharedBufferWork(BucketWork):
    """The reduction of one buffer, whose result is taken to the gradients once it is there."""

    __slots__ = ()

    def wait(self) -> None:
        """Return once the gradients hold the result."""
        super().wait()
        if isinstance(self.bucket, GradientBuffer):
            self.bucket.take_back()
