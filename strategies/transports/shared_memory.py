"""Shared-memory transports: buckets summed in memory that all ranks of a host map, without sockets or copies.

    rank 0's bucket   [ shard 0 | shard 1 ]     rank r owns shard r: once every rank has filled its bucket, it adds
    rank 1's bucket   [ shard 0 | shard 1 ]     shard r of all buckets, in rank order, and writes the sum to all.

Several hosts exchange the sums of their shards before these are written, each shard once a host:

    host 0   rank 0   [ shard 0 | shard 1 ]    1  rank 0 adds up shard 0 of its host's buckets, rank 1 shard 1
             rank 1   [ shard 0 | shard 1 ]    2  ranks 0 and 2 exchange shard 0, ranks 1 and 3 shard 1
    host 1   rank 2   [ shard 0 | shard 1 ]    3  and write the result into all buckets of their host
             rank 3   [ shard 0 | shard 1 ]

A host sends 2 (H-1)/H of the gradients for H hosts, whatever its number of ranks, and every rank an equal part of it.
While shards are between hosts, backward fills the next buckets.

Each bucket has two counters for each rank, written by that rank only: `filled` (its gradients are in) and `summed` (its
shard is done). A bucket is reduced when all ranks have raised `summed`, each with the time, by the clock that the
processes of a host share. The order of additions does not depend on the size of buckets or on timing, so results are
the same bit for bit from run to run.

The counters rely on stores becoming visible in program order: true on x86, so other processors use the group.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import secrets
import select
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.collectives import gather
from trainkit.distributed.failure_store import FailureStore, stopped

from .hosts import host_name
from .process_group import ProcessGroupTransport, Transport, Work

LINE_BYTES = 64  # of the processor's cache; regions and shards start at its multiples, so that no two ranks write one
NONCE_BYTES = 16  # random, to recognize the memory of a rank
MESSAGE_BYTES = 4096  # of the reason why a rank stops, with its length; longer ones are cut
CHUNK_ELEMENTS = 128 * 1024  # added at once, so that the sum is still in the cache when it is written to all
SPINS = 2000  # polls before a waiting rank begins to sleep
NAP_SECONDS = 50e-6
LONGEST_NAP_SECONDS = 1e-3  # of waits for a network or a device, which are slower than memory
PEER_SECONDS = 0.01  # between two checks of the other processes
STORE_SECONDS = 0.5  # between two checks of the failure store
MADV_POPULATE_WRITE = 23  # of Linux 5.14; not in Python's mmap


class SharedMemoryError(RuntimeError):
    """The ranks cannot share memory; the message says why."""


def why_no_shared_memory(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return `None` if the ranks could share a page, else the reason, equal on every rank. Collective."""
    if device.type != "cpu":
        return f"the parameters are on {device.type}"
    try:
        share_regions(group, LINE_BYTES)
    except SharedMemoryError as error:
        return str(error)
    return None


def nap_after(waited: float, *, longest: float) -> float:
    """Return the seconds until the next poll: an eighth of those waited so far, within limits."""
    return min(max(NAP_SECONDS, waited / 8), longest)


class SharedMemoryTransport(Transport):
    """Sums each bucket in the memory of the ranks themselves."""

    name = "shared_memory"
    sends = False
    spins, longest_nap_seconds = SPINS, NAP_SECONDS

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        failure_store: FailureStore,
        timeout_seconds: float,
        preallocate: bool = True,
        names: Sequence[int] | None = None,
    ) -> None:
        """Take memory in `allocate`, or with `preallocate=False` bucket by bucket in `reserve`.

        `names` are the numbers of the ranks in messages; `None`: those that they have in the group.
        """
        self.group, self.failure_store, self.timeout_seconds = group, failure_store, timeout_seconds
        self.preallocate, self.names = preallocate, range(group.size()) if names is None else names
        self._extents: list[tuple[int, int]] = []  # (start, stop) of each bucket in the region, in bytes
        self.rank, self.world_size = group.rank(), group.size()
        self.peers: list[PeerMemory] = []
        self.buckets: list[SharedBucket] = []
        self.under_way: list[SharedBucket] = []
        self.fence = Lock()  # taking a lock drains the processor's store buffers, streaming stores included

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return one flat tensor of zeros for each (elements, dtype), in memory that all ranks map."""
        self.close()
        # After the counters, of which a bucket has three with 8 bytes: filled, summed, and the time of the sum.
        self._extents, end = [], _round_up(NONCE_BYTES + MESSAGE_BYTES + 24 * len(sizes), 4096)
        for numel, dtype in sizes:
            start, end = end, end + _round_up(numel * dtype.itemsize, LINE_BYTES)
            self._extents.append((start, end))
        regions = share_regions(self.group, end, preallocate=self.preallocate)
        self.peers = [PeerMemory(name, *shared) for name, shared in zip(self.names, regions, strict=True)]
        self.buckets = []
        for number, ((numel, dtype), (offset, _)) in enumerate(zip(sizes, self._extents, strict=True)):
            flats = [torch.empty(0, dtype=dtype) for _ in self.peers]  # frombuffer rejects sizes of 0
            if numel:
                flats = [torch.frombuffer(p.region, dtype=dtype, count=numel, offset=offset) for p in self.peers]
            self.buckets.append(self.make_bucket(number, flats))
        return [bucket.flat for bucket in self.buckets]

    def reserve(self, bucket: int) -> None:
        """Take the memory of this rank's bucket now: if none is left this is an error, but later a SIGBUS."""
        start, end = self._extents[bucket]
        start -= start % mmap.PAGESIZE  # madvise accepts only the start of a page
        if self.preallocate or end == start:
            return
        try:
            self.peers[self.rank].region.madvise(MADV_POPULATE_WRITE, start, end - start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel takes each page when it is written
                raise SharedMemoryError(f"no shared memory of {end - start} bytes: {error}") from None

    def make_bucket(self, number: int, flats: list[Tensor]) -> SharedBucket:
        """Return bucket `number`, of which each rank holds one of the flat tensors."""
        return SharedBucket(number, flats[self.rank], chunks_of(flats, self._span(flats[0])))

    def _span(self, flat: Tensor) -> tuple[int, int]:
        return span_of(len(flat), self.rank, self.world_size, element_bytes=flat.element_size())

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        """Mark this rank's bucket as filled, and sum its shards of buckets that all ranks have filled."""
        shared = self.buckets[bucket]
        # Counters grow by one a step and are never reset, or a fast rank would reset one that a slow rank still reads.
        shared.round += 1
        self.raise_counter(2 * shared.number, shared.round)
        self.under_way.append(shared)
        self.progress()
        return BucketWork(self, shared, where)

    def progress(self) -> None:
        """Sum this rank's shard of every bucket that all ranks have filled."""
        if self.under_way:
            self.under_way = [bucket for bucket in self.under_way if not self._sum_if_filled(bucket)]

    def is_done(self, bucket: SharedBucket) -> bool:
        """Return True if every rank has summed its shard in the bucket's latest round."""
        counter = 2 * bucket.number + 1
        return all(peer.counters[counter] >= bucket.round for peer in self.peers)

    def fail(self, message: str) -> None:
        """Leave the reason in shared memory, where waiting ranks read it within milliseconds."""
        if self.peers:
            self.peers[self.rank].write_message(message)

    def close(self) -> None:
        """Release the memory; gradients in it keep it alive."""
        for peer in self.peers:
            peer.close()
        self.peers, self.buckets, self.under_way = [], [], []

    def is_filled(self, bucket: SharedBucket) -> bool:
        """Return True if every rank has filled the bucket in its latest round."""
        counter = 2 * bucket.number
        return all(peer.counters[counter] >= bucket.round for peer in self.peers)

    def _sum_if_filled(self, bucket: SharedBucket) -> bool:
        if not self.is_filled(bucket):
            return False
        bucket.add_shard()
        self.raise_summed(bucket)
        return True

    def raise_summed(self, bucket: SharedBucket) -> None:
        """Publish that this rank's shard is summed, and the time."""
        # The time first: a rank that sees the counter reads it.
        self.peers[self.rank].counters[2 * len(self.buckets) + bucket.number] = time.perf_counter_ns()
        self.raise_counter(2 * bucket.number + 1, bucket.round)

    def raise_counter(self, counter: int, value: int) -> None:
        """Publish `value`, and with it all earlier writes of this rank."""
        with self.fence:
            self.peers[self.rank].counters[counter] = value


class HostTransport(SharedMemoryTransport):
    """Sums each bucket in the memory of the ranks of a host, and this rank's shard of the sums with other hosts.

    How shards are exchanged, and where results go, is left to the subclasses.
    """

    _rounds: Sequence[HostBucket] = ()  # under way, in the order in which they began

    @abstractmethod
    def exchange(self, bucket: HostBucket) -> Work | None:
        """Start to exchange this rank's shard of a bucket with other hosts; `None` if there is nothing to wait for."""

    def finish(self, bucket: HostBucket) -> None:
        """Leave the result in the buckets of the host."""
        bucket.write()

    def begin(self, bucket: HostBucket, where: str) -> None:
        """Begin a round of a bucket that this rank has filled."""
        bucket.round += 1
        bucket.where, bucket.exchange, bucket.is_published, bucket.is_summed = where, None, False, False
        self._publish_if_on_host(bucket)
        self._rounds = [*self._rounds, bucket]
        self.progress()

    def progress(self) -> None:
        """Sum, exchange and write all that can be, without waiting."""
        if not self._rounds:
            return
        for bucket in self._rounds:
            if bucket.is_summed:
                continue
            self._publish_if_on_host(bucket)
            if not bucket.is_published or not self.is_filled(bucket):
                break  # shards that hosts exchange in different orders would be added up wrongly
            bucket.is_summed = True
            bucket.add_shard()
            bucket.exchange = self.exchange(bucket)
        self._rounds = [bucket for bucket in self._rounds if not self._try_finish(bucket)]

    def close(self) -> None:
        super().close()
        self._rounds = ()

    def _publish_if_on_host(self, bucket: HostBucket) -> None:
        if not bucket.is_published and bucket.is_on_host():
            bucket.is_published = True
            self.raise_counter(2 * bucket.number, bucket.round)  # after the copy, as others read from here on

    def _try_finish(self, bucket: HostBucket) -> bool:
        """Return True if this rank's shard is ready, and now written to the ranks of the host."""
        if not bucket.is_summed or not (bucket.exchange is None or bucket.exchange.is_done()):
            return False
        if bucket.exchange is not None:
            bucket.exchange.wait()  # it has ended: this raises its error, or copies a sum that was sent rounded
        self.finish(bucket)
        self.raise_summed(bucket)
        return True


class HierarchicalTransport(HostTransport):
    """Sums each bucket in the memory of the ranks `inside` a host, and its shards over the ranks `between` hosts."""

    sends = True
    spins, longest_nap_seconds = 1, LONGEST_NAP_SECONDS  # a network is slower than memory: polling only takes a core

    def __init__(
        self,
        inside: dist.ProcessGroup,
        between: ProcessGroupTransport,
        *,
        names: Sequence[int],
        failure_store: FailureStore,
        timeout_seconds: float,
    ) -> None:
        super().__init__(
            inside, failure_store=failure_store, timeout_seconds=timeout_seconds, preallocate=False, names=names
        )
        self.between = between

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        flats = super().allocate(sizes)
        # Shards are exchanged in the shared memory itself, without a copy.
        self.between.flats = [bucket.sums for bucket in self.buckets if isinstance(bucket, HostBucket)]
        return flats

    def make_bucket(self, number: int, flats: list[Tensor]) -> HostBucket:
        shards = [flat[slice(*self._span(flat))] for flat in flats]
        # Summed in the first rank's bucket: only this rank reads or writes this shard of it.
        return HostBucket(number, flats[self.rank], [shards], shards[0])

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        shared = self.buckets[bucket]
        assert isinstance(shared, HostBucket)
        self.begin(shared, where)
        return BucketWork(self, shared, where)

    def exchange(self, bucket: HostBucket) -> Work:
        return self.between.start(bucket.number, where=bucket.where)

    def close(self) -> None:
        super().close()
        self.between.close()


class SharedBucket:
    """One bucket on every rank, and the chunks of this rank's shard."""

    __slots__ = ("chunks", "flat", "number", "round")

    def __init__(self, number: int, flat: Tensor, chunks: list[list[Tensor]]) -> None:
        self.number, self.flat, self.chunks = number, flat, chunks
        self.round = 0

    def add_shard(self) -> None:
        """Leave the sum of this rank's shard in every rank's flat tensor."""
        with torch.no_grad():
            # In rank order, in this one place: every rank has the same bits.
            for first, *others in self.chunks:
                for other in others:
                    first.add_(other)
                for other in others:
                    other.copy_(first)


class HostBucket(SharedBucket):
    """A bucket on every rank of a host, the `sums` of this rank's shard, and the state of its latest round."""

    __slots__ = ("exchange", "is_published", "is_summed", "sums", "totals", "where")

    where: str
    is_published: bool  # the other ranks know that it is filled
    is_summed: bool  # by this rank: its shard, over the ranks of this host
    exchange: Work | None  # with other hosts

    def __init__(self, number: int, flat: Tensor, chunks: list[list[Tensor]], sums: Tensor) -> None:
        super().__init__(number, flat, chunks)
        self.sums = sums
        self.totals = sums.split([len(chunk[0]) for chunk in chunks])  # views, one for each chunk

    def is_on_host(self) -> bool:
        """Return True if other ranks may read it."""
        return True

    def add_shard(self) -> None:
        """Leave the sum of this rank's shard over the ranks of the host, in rank order, in `sums`."""
        with torch.no_grad():
            for first, *others in self.chunks:
                for other in others:
                    first.add_(other)

    def write(self) -> None:
        """Copy `sums` to the buckets of all ranks of the host."""
        with torch.no_grad():
            for chunk, total in zip(self.chunks, self.totals, strict=True):
                write_to_all(total, chunk)


class BucketWork:
    """The reduction of one bucket; a rank that waits for it makes progress on all of them."""

    __slots__ = ("bucket", "finished_at", "transport", "where")

    def __init__(self, transport: SharedMemoryTransport, bucket: SharedBucket, where: str) -> None:
        self.finished_at: float | None = None
        self.transport, self.bucket, self.where = transport, bucket, where

    def is_done(self) -> bool:
        """Return True if there is nothing left to wait for."""
        return self.transport.is_done(self.bucket)

    def check_peers(self, *, waited: float) -> None:
        """Raise RankError if a rank has failed, is gone, or has been waited for too long; `waited` in seconds."""
        self._check_processes()
        store, limit = self.transport.failure_store, self.transport.timeout_seconds
        store.check(where=self.where, waited=waited, timeout_seconds=limit)

    def wait(self) -> None:
        """Return once every rank has summed its shard."""
        transport, bucket = self.transport, self.bucket
        for _ in range(transport.spins):
            transport.progress()
            if transport.is_done(bucket):
                break
            os.sched_yield()  # with more ranks than cores, the rank that is waited for may need this one
        else:
            self._sleep_until_done()
        summed_at = 2 * len(transport.buckets) + bucket.number  # written by each rank
        self.finished_at = max(peer.counters[summed_at] for peer in transport.peers) / 1e9

    def _sleep_until_done(self) -> None:
        transport = self.transport
        start = time.monotonic()
        # The store is a network round trip, the state of a process a system call.
        next_processes, next_store, noted = start, start + STORE_SECONDS, False
        while not transport.is_done(self.bucket):
            transport.progress()
            time.sleep(nap_after(time.monotonic() - start, longest=transport.longest_nap_seconds))
            now = time.monotonic()
            if now >= next_store:
                next_store, noted = now + STORE_SECONDS, True
                self.check_peers(waited=now - start)
            elif now >= next_processes:
                next_processes = now + PEER_SECONDS
                self._check_processes()
        if noted:
            transport.failure_store.note_waiting("")

    def _check_processes(self) -> None:
        for peer in self.transport.peers:
            cause = peer.message()
            if not cause and peer.is_gone() and not self.transport.is_done(self.bucket):
                if self.transport.failure_store.asks_who_is_silent:
                    time.sleep(STORE_SECONDS)  # the process that started that rank may publish more
                cause = self.transport.failure_store.root_cause() or f"rank {peer.rank} (pid {peer.pid}) is gone"
            if cause:
                raise stopped(self.where, cause)


class PeerMemory:
    """One rank's region of shared memory: its counters, its error message, and a handle on its process."""

    def __init__(self, rank: int, pid: int, region: mmap.mmap) -> None:
        self.rank, self.pid, self.region = rank, pid, region
        view = memoryview(region)
        self.text = view[NONCE_BYTES : NONCE_BYTES + MESSAGE_BYTES]
        self.counters = view[NONCE_BYTES + MESSAGE_BYTES :].cast("Q")  # aligned, so that no read sees half a value
        self.pidfd: int | None = None
        # A pid may be given to a new process, a descriptor of the process may not; kernels before 5.3 have none.
        with suppress(OSError):
            self.pidfd = os.pidfd_open(pid)

    def write_message(self, message: str) -> None:
        encoded = message.encode()[: MESSAGE_BYTES - 8]
        self.text[4 : 4 + len(encoded)] = encoded
        # The length last: a waiting rank takes a message as soon as it is above 0.
        self.text[:4] = len(encoded).to_bytes(4, "little")

    def message(self) -> str:
        length = int.from_bytes(self.text[:4], "little")
        return bytes(self.text[4 : 4 + length]).decode(errors="replace")  # the cut may be inside a character

    def is_gone(self) -> bool:
        if self.pidfd is None:
            return not os.path.exists(f"/proc/{self.pid}")
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))  # readable once the process has ended

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A rank's description of its region, with which the others open it, or the reason why it has none."""

    host: str = ""
    pid: int = 0
    fd: int = -1
    nonce: bytes = b""
    problem: str | None = None


def share_regions(group: dist.ProcessGroup, num_bytes: int, *, preallocate: bool = True) -> list[tuple[int, mmap.mmap]]:
    """Return (pid, memory) of every rank, each `num_bytes` of zeros except for a nonce at its start. Collective.

    With `preallocate` memory is taken at once, otherwise page by page when it is written. It has no name in any file
    system and lives as long as its mappings, so a killed process leaves nothing behind.
    Raises `SharedMemoryError` on every rank, with the first rank's reason, if one of them fails.
    """
    local_region = _make_region(num_bytes, preallocate)  # a failure is gathered too, or the others would wait for it
    try:
        regions = gather(local_region, group)
        _raise_first_problem([region.problem for region in regions])
        mappings, problem = _map_all(regions, num_bytes, preallocate)
        # Also a barrier: every rank has mapped this one's memory before its descriptor is closed.
        _raise_first_problem(gather(problem, group))
    finally:
        if local_region.fd >= 0:
            os.close(local_region.fd)
    return [(region.pid, mapping) for region, mapping in zip(regions, mappings, strict=True)]


def _make_region(num_bytes: int, preallocate: bool) -> SharedRegion:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return SharedRegion(problem=f"the order of stores is unknown on {platform.machine()}")
    if not hasattr(os, "memfd_create"):
        return SharedRegion(problem=f"{platform.system()} has no memfd_create")
    nonce = secrets.token_bytes(NONCE_BYTES)
    fd = -1
    try:
        fd = os.memfd_create("trainkit-gradients", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)  # a new memfd has rights for every user
        os.ftruncate(fd, num_bytes)
        if preallocate:
            os.posix_fallocate(fd, 0, num_bytes)  # an error now rather than a SIGBUS later
        os.pwrite(fd, nonce, 0)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        return SharedRegion(problem=f"no shared memory of {num_bytes} bytes: {error}")
    return SharedRegion(host_name(), os.getpid(), fd, nonce)


def _map_all(regions: list[SharedRegion], num_bytes: int, preallocate: bool) -> tuple[list[mmap.mmap], str | None]:
    """Return the memory of every rank, or [] and the reason why it cannot be mapped."""
    mappings: list[mmap.mmap] = []
    for rank, region in enumerate(regions):
        if region.host != regions[0].host:
            return [], f"ranks 0 and {rank} are on different hosts"
        try:
            fd = os.open(f"/proc/{region.pid}/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return [], f"rank {rank}'s memory cannot be opened: {error}"
        try:
            flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if preallocate else 0)
            mappings.append(mmap.mmap(fd, num_bytes, flags=flags))
        except (OSError, ValueError) as error:
            return [], f"rank {rank}'s memory cannot be mapped: {error}"
        finally:
            os.close(fd)
        if mappings[-1][:NONCE_BYTES] != region.nonce:  # the pid is another process in another container
            return [], f"rank {rank}'s memory is not the one that it offered (another container?)"
    return mappings, None


def _raise_first_problem(problems: list[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise SharedMemoryError(problem)


def write_to_all(total: Tensor, chunk: list[Tensor]) -> None:
    """Copy a sum to the tensors of a chunk, of which it may be one."""
    for tensor in chunk:
        if tensor.data_ptr() != total.data_ptr():
            tensor.copy_(total)


def span_of(numel: int, owner: int, owners: int, *, element_bytes: int) -> tuple[int, int]:
    """Return (start, stop) of the owner's shard, which starts at a cache line; empty for the last of too many."""
    # Two ranks that write to one cache line would take it from each other at every store.
    shard = _round_up(-(-numel // owners), LINE_BYTES // element_bytes)
    return min(owner * shard, numel), min((owner + 1) * shard, numel)


def chunks_of(flats: list[Tensor], span: tuple[int, int]) -> list[list[Tensor]]:
    """Return the chunks of a shard, each as its tensors in rank order."""
    # A chunk stays in cache from the sum to the writes.
    shards = [flat[slice(*span)].split(CHUNK_ELEMENTS) for flat in flats]
    return [list(chunk) for chunk in zip(*shards, strict=True)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
