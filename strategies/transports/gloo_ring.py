"""Fusion buffers sent through gloo: the shards of each chunk go round the ring of servers.

    hop          0               1               2               3
    server 0     sends c0        sends b2+b0     sends a         sends c
    server 1     sends a1        sends c0+c1     sends b         sends a
    server 2     sends b2        sends a1+a2     sends c         sends b

Each server sends to the next one, and sums what it receives with its own: shard i (above a, b, c) is complete on server
i, and then goes round once more (Patarasuk & Yuan, 2009, "Bandwidth optimal all-reduce algorithms"). So no two servers
send to the same one, where they would wait for each other, and every link is busy in both directions. gloo's all-reduce
does this for a whole chunk. The hops are made here for a sharded optimizer, which updates its shard of the weights from
the sum between the two rounds: the second one carries weights.

    gradients in order of arrival       | w3 |b3|      w2      |b2| w1 |
    chunks of a buffer                  |     0     |     1     |   2   |
    shards, one for each server         | 0 | 1 | 2 | 0 | 1 | 2 |0 |1 |2|

Shards ignore where parameters begin and end, so every server handles the same number of bytes. Chunks are launched in
the same order on every server, at most `max_in_flight` at a time; the others wait in their buffers, so backward never
waits for a chunk. Transfers advance only in calls to `progress`.

gloo sends data only after the receiver has announced the receive, over the connection that carries its own data to the
sender. In gloo's all-to-all a rank sends before it announces: the later of two ranks sends all of its data first, and
the link carries one direction at a time. Here the launch of a ring announces all that the chunk will receive, before
anything of it is sent, and both directions are busy:

    rank 0   announce  |=== to 1 ===|        rank 0   |=== to 1 ===|
    rank 1   announce  |=== to 0 ===|        rank 1                |=== to 0 ===|     gloo's all-to-all
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, count, pairwise
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore

from .host_copy import Event, open_host_copier
from .process_group import WaitableWork, WatchedWork
from .sharded import FusionSettings, ServerGroups, ShardTransport, ShardWork, ordered_sum

_SUM, _WEIGHTS = range(2)  # kinds of messages
_NUM_TAGS = 2**20  # of a kind; far more than are under way at once


class GlooExchange(ShardTransport):
    """Sums chunks of flat buffers on the servers in `groups`; device buffers are copied to host memory first."""

    name = "exchange"

    def __init__(
        self,
        groups: ServerGroups,
        *,
        failure_store: FailureStore,
        device: torch.device,
        timeout_seconds: float,
        settings: FusionSettings,
        num_gradients: Callable[[], list[int]],
    ) -> None:
        self.groups, self.failure_store, self.device = groups, failure_store, device
        self.timeout_seconds, self.settings, self.num_gradients = timeout_seconds, settings, num_gradients
        self.copier, self.rank, self.world_size = open_host_copier(device), groups.rank, groups.world_size
        self.flats: list[Tensor] = []
        self.flags: list[Tensor] = []
        self.weight_sets, self.copies_back = [], {}
        self._chunks: list[list[tuple[int, int]]] = []
        self._queued: deque[ChunkTransfer] = deque()
        self._in_flight: list[ChunkTransfer] = []
        self._works: deque[TransferWork] = deque()
        self._gathers: list[GatherWork] = []
        self.changed: threading.Event = threading.Event()
        self.arrivals, self.known_flags = (MessageThread(self.changed) for _ in range(2))
        self.numbers = {kind: count() for kind in (_SUM, _WEIGHTS)}  # of transfers, the same on every rank

    # ---- Memory

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        flats = [torch.zeros(numel, dtype=dtype, device=self.device) for numel, dtype in sizes]
        gradients, sharded = self.num_gradients(), self.settings.sharded
        num_sets = (1 + self.settings.second_weights) * sharded
        self.bind(
            flats,
            summed=gradients if sharded else [numel for numel, _ in sizes],
            flags=[flat[numel:] for flat, numel in zip(flats, gradients, strict=True)],
            weight_sets=[[torch.zeros_like(flat) for flat in flats] for _ in range(num_sets)],
        )
        return flats

    def bind(
        self, flats: list[Tensor], *, summed: Sequence[int], flags: list[Tensor], weight_sets: list[list[Tensor]]
    ) -> None:
        """Use these flat tensors as buffers; the first `summed` elements of each are summed."""
        self.flats, self.flags, self.weight_sets, self.active_set = flats, flags, weight_sets, 0
        self._chunks = [
            split_into_chunks(numel, self.world_size * max(1, self.settings.message_bytes // flat.dtype.itemsize))
            for numel, flat in zip(summed, flats, strict=True)
        ]

    def close(self) -> None:
        self.flats, self.flags, self.weight_sets, self._chunks = [], [], [], []
        self.copies_back = {}
        self._queued.clear()
        self._in_flight.clear()
        self._works.clear()
        self._gathers.clear()
        for thread in (self.arrivals, self.known_flags):
            thread.close()
        self.copier.close()

    def own_ranges(self, buffer: int) -> list[tuple[int, int]]:
        ranges = []
        for start, stop in self._chunks[buffer]:
            sizes = equal_shards(stop - start, self.world_size)
            begin = start + sum(sizes[: self.rank])
            ranges.append((begin, begin + sizes[self.rank]))
        return [(start, stop) for start, stop in ranges if start < stop]

    def used_flags(self, buffer: int) -> Tensor:
        return self.flags[buffer]

    @property
    def bytes_a_step(self) -> int:
        total = 0
        for flat, chunks in zip(self.flats, self._chunks, strict=True):
            sent = self.reduce_dtype_of(flat.dtype).itemsize
            returned = flat.dtype.itemsize if self.settings.sharded else sent  # weights in full, or sums
            for start, stop in chunks:
                sizes = equal_shards(stop - start, self.world_size)
                following = sizes[(self.rank + 1) % self.world_size]
                total += (stop - start - sizes[self.rank]) * sent + (stop - start - following) * returned
        return total

    # ---- Transfers

    def start(self, bucket: int, *, where: str, timed: bool = False, ready: Event = None) -> ShardWork:
        # Now, before anything else is queued on the stream: a copy waits for no more than what fills the buffer.
        ready = ready or self.copier.mark()
        transfers: list[ChunkTransfer] = []
        flags, flat = None, self.flats[bucket]
        if self.world_size > 1:
            for start, stop in self._chunks[bucket]:
                transfers.append(ChunkTransfer(self, bucket, flat[start:stop], ready, where))
            # In full on every rank: each server updates shards, and must know which parameters any rank has used.
            if self.settings.sharded and self.flags[bucket].numel():
                all_reduce = dist.all_reduce(self.flags[bucket], group=self.groups.flags, async_op=True)
                assert all_reduce is not None
                flags = self.with_timeout(self.known_flags.watch([all_reduce]), where)
        self._queued.extend(transfers)
        work = TransferWork(self, bucket, where, transfers, flags)
        self._works.append(work)
        self.progress()
        return work

    def gather_weights(self, buffer: int, *, where: str) -> GatherWork:
        transfers = []
        for start, stop in self._chunks[buffer] if self.world_size > 1 else []:
            chunk = self.weight_sets[self.next_set][buffer][start:stop]
            shards = chunk.split(equal_shards(len(chunk), self.world_size))
            transfer = RingTransfer(self, _WEIGHTS, where)
            # Into the weights themselves, which nothing reads before all of them are there.
            transfer.announce([shards[(self.rank - 1 - hop) % self.world_size] for hop in range(self.world_size - 1)])
            transfer.send(shards[self.rank])
            transfers.append(transfer)
        self._gathers.append(GatherWork(self, transfers, where))
        return self._gathers[-1]

    def receive(self, tensor: Tensor, tag: int) -> list[dist.Work]:
        """Announce that a tensor is received from the previous server."""
        return receive(tensor, self.groups.messages, source=(self.rank - 1) % self.world_size, tag=tag)

    def send(self, tensor: Tensor, tag: int) -> list[dist.Work]:
        """Start to send a tensor to the next server."""
        return send(tensor, self.groups.messages, target=(self.rank + 1) % self.world_size, tag=tag)

    def progress(self) -> None:
        """Advance every chunk and buffer as far as possible, without waiting."""
        # Cleared before looking: what ends meanwhile sets it again, and is not missed by the next wait.
        self.changed.clear()
        self._advance_chunks()
        for gather in self._gathers:
            gather.advance()
        self._gathers = [gather for gather in self._gathers if not gather.is_done()]
        for work in list(self._works):
            work.advance()
            if not work.is_summed:  # weights are sent in the order of buffers
                break
        while self._works and self._works[0].is_done():
            self._works.popleft()

    def wait_for_change(self, where: str) -> None:
        """Wait until something has ended that `progress` found under way."""
        # The end of a copy sets no event, so it is waited for by itself; messages arrive meanwhile.
        copy = next((transfer.copy for transfer in self._in_flight if transfer.copy is not None), None)
        if copy is not None:
            copy.synchronize()
        else:  # all else are messages
            self.with_timeout(_AnyMessage(self.changed), where).wait()

    def with_timeout(self, work: WaitableWork, where: str) -> WatchedWork:
        """Return the work as one whose `wait` raises if a rank fails or the timeout passes."""
        return WatchedWork(work, where=where, failure_store=self.failure_store, timeout_seconds=self.timeout_seconds)

    def _advance_chunks(self) -> None:
        """Advance the chunks in flight, and those that the complete ones make room for."""
        while True:
            while self._queued and len(self._in_flight) < self.settings.max_in_flight:
                self._in_flight.append(self._queued.popleft())
                self._in_flight[-1].launch()
            for transfer in self._in_flight:
                transfer.advance()
                if not transfer.is_sent:
                    break  # chunks that servers sent in different orders would be added up wrongly
            self._in_flight = [transfer for transfer in self._in_flight if not transfer.is_complete]
            if not self._queued or len(self._in_flight) == self.settings.max_in_flight:
                return


class _AnyMessage:
    """The next end of any messages, as a work."""

    def __init__(self, changed: threading.Event) -> None:
        self.changed = changed

    def is_completed(self) -> bool:
        return self.changed.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self.changed.wait(timeout.total_seconds()):
            raise RuntimeError("no message has ended")


class RingTransfer:
    """Shards of a chunk on their way round the ring: each hop sends on what the one before it has received."""

    def __init__(self, exchange: GlooExchange, kind: int, where: str) -> None:
        self.exchange, self.kind, self.number, self.where = exchange, kind, next(exchange.numbers[kind]), where
        self.is_complete = False
        self._hop = 0
        self._received: list[Tensor] = []  # by each hop
        self._receives: list[list[dist.Work]] = []
        self._sends: list[dist.Work] = []
        self._work: WatchedWork | None = None  # of the hop

    def announce(self, received: list[Tensor]) -> None:
        """Announce what each hop receives, before anything is sent."""
        self._received = received
        self._receives = [self.exchange.receive(tensor, self._tag(hop)) for hop, tensor in enumerate(received)]

    def send(self, tensor: Tensor) -> None:
        """Send the tensor of the current hop."""
        exchange, hop = self.exchange, self._hop
        self._sends += exchange.send(tensor, self._tag(hop))
        is_last = hop == len(self._received) - 1
        # A hop needs no more than what it receives. The last one waits for all sends too, which read memory until then.
        works = [*self._receives[hop], *self._sends] if is_last else self._receives[hop]
        self._work = exchange.with_timeout(exchange.arrivals.watch(works), self.where)

    def advance(self) -> bool:
        """Advance as far as possible without waiting; return True if the transfer is complete."""
        while self._work is not None and self._work.is_done():
            self._work.wait()
            self._work = None
            tensor = self.arrive(self._hop, self._received[self._hop])
            self._hop += 1
            self.is_complete = self._hop == len(self._received)
            if self.is_complete:
                self._received, self._receives, self._sends = [], [], []
            else:
                self.send(tensor)
        return self.is_complete

    def arrive(self, hop: int, received: Tensor) -> Tensor:
        """Return what the next hop sends, given what this one has received."""
        return received

    def _tag(self, hop: int) -> int:
        # All ranks number transfers in the same order, so that sender and receiver agree on a tag without a message.
        hops = self.exchange.world_size - 1
        return 2 * ((hops * self.number + hop) % _NUM_TAGS) + self.kind


class ReduceRing(RingTransfer):
    """The sums of a chunk's shards, each complete on its server, for a sharded optimizer."""

    def __init__(self, exchange: GlooExchange, chunk: Tensor, sent: Tensor, where: str) -> None:
        """Take what is `sent` of the chunk, and announce what is received."""
        super().__init__(exchange, _SUM, where)
        self.chunk, self.sizes = chunk, equal_shards(len(chunk), exchange.world_size)
        self._shards = sent.split(self.sizes)
        sizes = [self.sizes[self._index(hop)] for hop in range(exchange.world_size - 1)]
        # Memory of its own for each hop: all receives are announced before the first of them is added.
        self.announce(list(sent.new_empty(sum(sizes)).split(sizes)))

    def start(self) -> None:
        """Send the first shard, once the chunk is in host memory."""
        self.send(self._shards[self._index(-1)])

    def arrive(self, hop: int, received: Tensor) -> Tensor:
        index = self._index(hop)
        if index != self.exchange.rank:
            return torch.add(received, self._shards[index], out=received)  # which adds in float32
        total = ordered_sum([received, self._shards[index]])  # complete, and not sent: it need not be rounded
        self.chunk.split(self.sizes)[index].copy_(total)
        return total

    def _index(self, hop: int) -> int:
        """Return the index of the shard that a hop receives; it sends that of the hop before."""
        return (self.exchange.rank - 2 - hop) % self.exchange.world_size


class AllReduce:
    """The sum of a chunk on all servers, by gloo."""

    def __init__(self, exchange: GlooExchange, sent: Tensor, where: str) -> None:
        self.exchange, self.sent, self.where = exchange, sent, where
        self._work: WatchedWork | None = None

    def start(self) -> None:
        """Start to sum, once the chunk is in host memory."""
        work = dist.all_reduce(self.sent, group=self.exchange.groups.messages, async_op=True)
        assert work is not None
        self._work = self.exchange.with_timeout(self.exchange.arrivals.watch([work]), self.where)

    def advance(self) -> bool:
        """Return True if the sum is complete."""
        if self._work is None or not self._work.is_done():
            return False
        self._work.wait()
        return True


class ChunkTransfer:
    """The transfer of one chunk to the servers and back: copy to the host, sum on the way, return."""

    def __init__(self, exchange: GlooExchange, buffer: int, chunk: Tensor, ready: Event, where: str) -> None:
        self.exchange, self.buffer, self.chunk, self.ready, self.where = exchange, buffer, chunk, ready, where
        self.is_sent = self.is_complete = False
        self.sent = chunk
        self.copy: Event = None  # to the host
        self._sum: ReduceRing | AllReduce | None = None

    def launch(self) -> None:
        """Copy the chunk to host memory in the reduce dtype if it is elsewhere, and announce what is received."""
        exchange, chunk = self.exchange, self.chunk
        dtype = exchange.reduce_dtype_of(chunk.dtype)
        if chunk.device.type != "cpu" or dtype != chunk.dtype:
            # Here, not in `start`: only chunks in flight take memory for a copy.
            self.sent = exchange.copier.empty(len(chunk), dtype)
            self.copy = exchange.copier.to_host(chunk, self.sent, after=self.ready)
        if exchange.settings.sharded:
            self._sum = ReduceRing(exchange, chunk, self.sent, self.where)
        else:
            self._sum = AllReduce(exchange, self.sent, self.where)

    def advance(self) -> bool:
        """Advance as far as possible without waiting; return True if the transfer is complete."""
        assert self._sum is not None
        if not self.is_sent and (self.copy is None or self.copy.query()):
            self.copy, self.is_sent = None, True
            self._sum.start()
        if not self.is_complete and self._sum.advance():
            self.is_complete = True
            exchange = self.exchange
            if not exchange.settings.sharded and self.sent is not self.chunk:
                exchange.copy_to_device(self.buffer, self.sent, self.chunk)
        return self.is_complete


class GatherWork:
    """The exchange of the next weights of one buffer."""

    def __init__(self, exchange: GlooExchange, transfers: Sequence[RingTransfer | ChunkTransfer], where: str) -> None:
        self.exchange, self.transfers, self.where = exchange, transfers, where
        self.finished_at: float | None = None

    def is_done(self) -> bool:
        return all(transfer.is_complete for transfer in self.transfers)

    def advance(self) -> None:
        """Advance as far as possible without waiting."""
        for transfer in self.transfers:
            transfer.advance()

    def wait(self) -> None:
        exchange = self.exchange
        exchange.progress()
        while not self.is_done():
            exchange.wait_for_change(self.where)
            exchange.progress()

    def check_peers(self, *, waited: float) -> None:
        exchange = self.exchange
        exchange.failure_store.check(where=self.where, waited=waited, timeout_seconds=exchange.timeout_seconds)


class TransferWork(GatherWork):
    """The reduction of one buffer: the transfers of its chunks and, with sharded settings, the gather of weights."""

    def __init__(
        self,
        exchange: GlooExchange,
        buffer: int,
        where: str,
        transfers: Sequence[ChunkTransfer],
        flags: WatchedWork | None,
    ) -> None:
        super().__init__(exchange, transfers, where)
        self.buffer, self.flags = buffer, flags
        self.is_summed = False
        self.weights: GatherWork | None = None

    def is_done(self) -> bool:
        return self.finished_at is not None

    def wait(self) -> None:
        super().wait()
        self.exchange.order_current_stream(self.buffer)

    def advance(self) -> None:
        if not self.is_summed:
            self._try_sum()
        if self.is_summed and (self.weights is None or self.weights.is_done()):
            self.finished_at = self.finished_at or time.perf_counter()

    def _try_sum(self) -> None:
        if not super().is_done():
            return
        # Without the flags it is unknown which parameters are updated.
        if self.flags is not None:
            if not self.flags.is_done():
                return
            self.flags.wait()
        self.is_summed = True
        exchange = self.exchange
        if exchange.on_summed is not None:
            exchange.on_summed(self.buffer)  # updates this rank's shard, which is sent next
            self.weights = exchange.gather_weights(self.buffer, where=self.where)


class Messages:
    """Messages under way, which are waited for as one work."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works
        self.error: RuntimeError | None = None
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        """Return True if all have ended, successfully or not."""
        return self.ended.is_set()

    def wait(self, timeout: timedelta) -> None:
        """Return once all have arrived; raise RuntimeError if one failed or the timeout passes."""
        if not self.ended.wait(timeout.total_seconds()):
            raise RuntimeError(f"messages have not arrived in {timeout.total_seconds()} s")
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


class MessageThread:
    """Waits for messages in the order of `watch`: gloo does not tell whether one has ended to those that do not wait.

    The thread ends with `close` or with the process.
    """

    def __init__(self, changed: threading.Event) -> None:
        """Set `changed` whenever messages have ended."""
        self.changed = changed
        self._queue: SimpleQueue[Messages | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, works: Sequence[dist.Work]) -> Messages:
        """Return the messages of these works, which end once all works have."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fusion messages", daemon=True)
            self._thread.start()
        messages = Messages(works)
        self._queue.put(messages)
        return messages

    def close(self) -> None:
        """End the thread once it waits for nothing; may be called twice."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def _run(self) -> None:
        while (messages := self._queue.get()) is not None:
            try:
                for work in messages.works:
                    work.wait()
            except RuntimeError as error:
                messages.error = error
            messages.ended.set()
            self.changed.set()


def receive(tensor: Tensor, group: dist.ProcessGroup | None, *, source: int, tag: int) -> list[dist.Work]:
    """Announce to rank `source` of the group that the tensor is received; nothing is if it is empty."""
    work = dist.irecv(tensor, group=group, group_src=source, tag=tag) if tensor.numel() else None
    return [] if work is None else [work]


def send(tensor: Tensor, group: dist.ProcessGroup | None, *, target: int, tag: int) -> list[dist.Work]:
    """Start to send the tensor to rank `target` of the group, unless it is empty."""
    work = dist.isend(tensor, group=group, group_dst=target, tag=tag) if tensor.numel() else None
    return [] if work is None else [work]


def equal_shards(numel: int, world_size: int) -> list[int]:
    """Return the number of elements that each server sums; they differ by at most one."""
    small, larger = divmod(numel, world_size)
    return [small + (server < larger) for server in range(world_size)]


def split_into_chunks(numel: int, chunk: int) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive chunks of nearly equal size, each at most `chunk` elements."""
    sizes = equal_shards(numel, -(-numel // chunk)) if numel else []
    return list(pairwise(accumulate(sizes, initial=0)))
