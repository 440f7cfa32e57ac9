"""Buckets summed through memory that all ranks of one host share, without sockets, threads or copies.

    rank 0's bucket   [ shard 0 | shard 1 ]     rank r owns shard r: once every rank has filled its bucket, it adds
    rank 1's bucket   [ shard 0 | shard 1 ]     shard r of all buckets, in rank order, and writes the sum to all.

Each bucket has two counters for each rank, with one writer each: `filled` (my gradients are in) and `summed` (my
shard is done). A bucket is reduced when all ranks have raised `summed`; each also leaves the time at which it did, by
the clock that the processes of a host share. The order of additions never depends on the size of buckets or on timing,
so results are the same bit for bit from run to run.

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore, RankError, timed_out

from .transport import Transport, Work

LINE_BYTES = 64  # of the processor's cache; regions and shards start at its multiples
NONCE_BYTES = 16
MESSAGE_BYTES = 4096
CHUNK_ELEMENTS = 128 * 1024  # added at once, so that the sum is still in the cache when it is written to all
SPINS = 2000  # polls before a waiting rank begins to sleep
NAP_SECONDS = 50e-6
LOOK_SECONDS = 0.01  # between two looks whether the others live
BOARD_SECONDS = 0.5  # between two looks at the failure board
MADV_POPULATE_WRITE = 23  # of Linux 5.14; no name in Python's mmap

T = TypeVar("T")


class SharedMemoryError(RuntimeError):
    """The ranks cannot share memory; the message says why."""


def why_no_shared_memory(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return None after a page was really shared by all ranks, else the reason, equal on every rank. Collective."""
    if device.type != "cpu":
        return f"the parameters are on {device.type}"
    try:
        share_regions(group, LINE_BYTES)
    except SharedMemoryError as error:
        return str(error)
    return None


class SharedMemoryTransport(Transport):
    """Sums each bucket in the memory of the ranks themselves."""

    name = "shared_memory"

    def __init__(
        self, group: dist.ProcessGroup, *, failure_store: FailureStore, timeout_seconds: float, preallocate: bool = True
    ) -> None:
        """Share nothing yet; with `preallocate` memory is taken when it is allocated, else by `reserve`."""
        self.group, self.failure_store, self.timeout_seconds = group, failure_store, timeout_seconds
        self.preallocate = preallocate
        self._extents: list[tuple[int, int]] = []  # of each bucket in the region, in bytes
        self.rank, self.world_size = group.rank(), group.size()
        self.peers: list[PeerMemory] = []
        self.buckets: list[SharedBucket] = []
        self.under_way: list[SharedBucket] = []
        self.fence = Lock()  # taking a lock drains the processor's store buffers, streaming stores included

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return one flat tensor of zeros for each (elements, dtype), in memory that all ranks map."""
        self.close()
        self._extents, end = [], _header_bytes(len(sizes))
        for numel, dtype in sizes:
            start, end = end, end + _round_up(numel * dtype.itemsize, LINE_BYTES)
            self._extents.append((start, end))
        regions = share_regions(self.group, end, preallocate=self.preallocate)
        self.peers = [PeerMemory(rank, *shared) for rank, shared in enumerate(regions)]
        self.buckets = []
        for number, ((numel, dtype), (offset, _)) in enumerate(zip(sizes, self._extents, strict=True)):
            flats = [_tensor_in(peer.region, offset, numel, dtype) for peer in self.peers]
            self.buckets.append(self.make_bucket(number, flats))
        return [bucket.flat for bucket in self.buckets]

    def reserve(self, bucket: int) -> None:
        """Take the memory of this rank's part now: without any left this is an error, and later a SIGBUS."""
        start, end = self._extents[bucket]
        start -= start % mmap.PAGESIZE
        if self.preallocate or end == start:
            return
        try:
            self.peers[self.rank].region.madvise(MADV_POPULATE_WRITE, start, end - start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel takes each page when it is written
                raise SharedMemoryError(f"no shared memory of {end - start} bytes: {error}") from None

    def make_bucket(self, number: int, flats: list[Tensor]) -> SharedBucket:
        """Return bucket `number`, of which each rank holds one of the flat tensors."""
        return SharedBucket(number, flats[self.rank], _shards(flats, self.rank))

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        """Let the others know that this rank's part is in, and add what is already complete."""
        shared = self.buckets[bucket]
        shared.round += 1
        self.raise_counter(2 * shared.number, shared.round)
        self.under_way.append(shared)
        self.progress()
        return BucketWork(self, shared, where)

    def progress(self) -> None:
        """Add this rank's shard of every bucket that all ranks have filled."""
        if self.under_way:
            self.under_way = [bucket for bucket in self.under_way if not self._sum_if_filled(bucket)]

    def summed_at(self, bucket: SharedBucket) -> float:
        """Return when the last rank had summed its shard of a bucket that is done, in seconds of time.perf_counter."""
        place = 2 * len(self.buckets) + bucket.number
        return max(peer.counters[place] for peer in self.peers) / 1e9

    def is_done(self, bucket: SharedBucket) -> bool:
        """Whether every rank has summed its shard of the bucket's latest round."""
        counter = 2 * bucket.number + 1
        return all(peer.counters[counter] >= bucket.round for peer in self.peers)

    def fail(self, message: str) -> None:
        """Leave the reason where ranks that wait here see it within milliseconds."""
        if self.peers:
            self.peers[self.rank].write_message(message)

    def close(self) -> None:
        """Let go of the memory; gradients that still point to it keep it alive."""
        for peer in self.peers:
            peer.close()
        self.peers, self.buckets, self.under_way = [], [], []

    def is_filled(self, bucket: SharedBucket) -> bool:
        """Whether every rank has filled the bucket in its latest round."""
        counter = 2 * bucket.number
        return all(peer.counters[counter] >= bucket.round for peer in self.peers)

    def _sum_if_filled(self, bucket: SharedBucket) -> bool:
        if not self.is_filled(bucket):
            return False
        bucket.add_shard()
        self.raise_summed(bucket)
        return True

    def raise_summed(self, bucket: SharedBucket) -> None:
        """Let the other ranks see that this rank's shard is done, and since when."""
        self.peers[self.rank].counters[2 * len(self.buckets) + bucket.number] = time.perf_counter_ns()
        self.raise_counter(2 * bucket.number + 1, bucket.round)

    def raise_counter(self, counter: int, value: int) -> None:
        """Let the other ranks see `value`, and all that was written before."""
        with self.fence:
            self.peers[self.rank].counters[counter] = value


class SharedBucket:
    """One bucket as every rank holds it, cut in chunks of this rank's shard."""

    __slots__ = ("chunks", "flat", "number", "round")

    def __init__(self, number: int, flat: Tensor, chunks: list[list[Tensor]]) -> None:
        self.number, self.flat, self.chunks = number, flat, chunks
        self.round = 0

    def add_shard(self) -> None:
        """Leave the sum of this rank's shard in every rank's flat tensor."""
        with torch.no_grad():
            for first, *others in self.chunks:
                for other in others:
                    first.add_(other)
                for other in others:
                    other.copy_(first)


class BucketWork:
    """The reduction of one bucket; whoever waits for it helps with all of them."""

    __slots__ = ("bucket", "finished_at", "transport", "where")

    def __init__(self, transport: SharedMemoryTransport, bucket: SharedBucket, where: str) -> None:
        self.finished_at: float | None = None
        self.transport, self.bucket, self.where = transport, bucket, where

    def is_done(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.transport.is_done(self.bucket)

    def check_peers(self, *, waited: float) -> None:
        """Raise if a rank has failed, has gone, or has been waited for too long; for one that waits in its own way."""
        self._look_at_peers()
        self._look_at_board(waited=waited)

    def wait(self) -> None:
        """Return once every rank has summed its shard."""
        transport, bucket = self.transport, self.bucket
        for _ in range(SPINS):
            transport.progress()
            if transport.is_done(bucket):
                break
            os.sched_yield()
        else:
            self._wait_patiently()
        self.finished_at = transport.summed_at(bucket)

    def _wait_patiently(self) -> None:
        transport = self.transport
        start = time.monotonic()
        next_look, next_board, noted = start, start + BOARD_SECONDS, False
        while not transport.is_done(self.bucket):
            transport.progress()
            time.sleep(NAP_SECONDS)
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                self._look_at_peers()
            if now >= next_board:
                next_board = now + BOARD_SECONDS
                self._look_at_board(waited=now - start)
                noted = True
        if noted:
            transport.failure_store.note_waiting("")

    def _look_at_peers(self) -> None:
        for peer in self.transport.peers:
            cause = peer.message()
            if not cause and peer.is_gone() and not self.transport.is_done(self.bucket):
                time.sleep(BOARD_SECONDS)  # whoever watches that rank may know more
                cause = self.transport.failure_store.root_cause() or f"rank {peer.rank} (pid {peer.pid}) is gone"
            if cause:
                raise RankError(f"stopped while waiting in {self.where}, because {cause}")

    def _look_at_board(self, *, waited: float) -> None:
        failure_store = self.transport.failure_store
        cause = failure_store.root_cause()
        if cause is not None:
            raise RankError(f"stopped while waiting in {self.where}, because {cause}")
        failure_store.note_waiting(self.where)
        if waited > self.transport.timeout_seconds:
            raise timed_out(failure_store, where=self.where, seconds=waited)


class PeerMemory:
    """One rank's region of shared memory, with its counters, its last words and a handle on its life."""

    def __init__(self, rank: int, pid: int, region: mmap.mmap) -> None:
        self.rank, self.pid, self.region = rank, pid, region
        view = memoryview(region)
        self.text = view[NONCE_BYTES : NONCE_BYTES + MESSAGE_BYTES]
        self.counters = view[NONCE_BYTES + MESSAGE_BYTES :].cast("Q")
        self.pidfd: int | None = None
        with suppress(OSError):
            self.pidfd = os.pidfd_open(pid)

    def write_message(self, message: str) -> None:
        encoded = message.encode()[: MESSAGE_BYTES - 8]
        self.text[4 : 4 + len(encoded)] = encoded
        self.text[:4] = len(encoded).to_bytes(4, "little")

    def message(self) -> str:
        length = int.from_bytes(self.text[:4], "little")
        return bytes(self.text[4 : 4 + length]).decode(errors="replace")

    def is_gone(self) -> bool:
        if self.pidfd is None:
            return not os.path.exists(f"/proc/{self.pid}")
        return bool(select.select([self.pidfd], [], [], 0)[0])  # readable once the process has ended

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """What a rank says of its region, so that the others can open it, or why it has none."""

    host: str = ""
    pid: int = 0
    fd: int = -1
    nonce: bytes = b""
    problem: str | None = None


def share_regions(group: dist.ProcessGroup, num_bytes: int, *, preallocate: bool = True) -> list[tuple[int, mmap.mmap]]:
    """Return (pid, memory) of every rank, each `num_bytes` of zeros but for a nonce at its start. Collective.

    With `preallocate` it is taken at once, else page by page where it is written. It has no name in any file system and
    lives as long as its mappings, so nothing can be left behind.
    Raises `SharedMemoryError` on every rank, with the first rank's reason, when one of them cannot.
    """
    fd = -1
    try:
        offer, fd = _make_offer(num_bytes, preallocate)
        offers: list[SharedRegion] = _gather(group, offer)
        _raise_first_problem([offer.problem for offer in offers])
        regions, problem = _open_all(offers, num_bytes, preallocate)
        # Also the barrier behind which every rank has mapped this one's memory, so the descriptor may go.
        _raise_first_problem(_gather(group, problem))
    finally:
        if fd >= 0:
            os.close(fd)
    return [(offer.pid, region) for offer, region in zip(offers, regions, strict=True)]


def _make_offer(num_bytes: int, preallocate: bool) -> tuple[SharedRegion, int]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return SharedRegion(problem=f"the order of stores is not known on {platform.machine()}"), -1
    if not hasattr(os, "memfd_create"):
        return SharedRegion(problem=f"{platform.system()} has no memfd_create"), -1
    nonce = secrets.token_bytes(NONCE_BYTES)
    fd = -1
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read().strip()
        fd = os.memfd_create("trainkit-gradients", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        if preallocate:
            os.posix_fallocate(fd, 0, num_bytes)  # now, with an error, rather than a SIGBUS later
        os.pwrite(fd, nonce, 0)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        return SharedRegion(problem=f"no shared memory of {num_bytes} bytes: {error}"), -1
    return SharedRegion(host, os.getpid(), fd, nonce), fd


def _open_all(offers: list[SharedRegion], num_bytes: int, preallocate: bool) -> tuple[list[mmap.mmap], str | None]:
    regions: list[mmap.mmap] = []
    for rank, offer in enumerate(offers):
        if offer.host != offers[0].host:
            return [], f"ranks 0 and {rank} are on different hosts"
        try:
            fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return [], f"rank {rank}'s memory cannot be opened: {error}"
        try:
            flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if preallocate else 0)
            regions.append(mmap.mmap(fd, num_bytes, flags=flags))
        except (OSError, ValueError) as error:
            return [], f"rank {rank}'s memory cannot be mapped: {error}"
        finally:
            os.close(fd)
        if regions[-1][:NONCE_BYTES] != offer.nonce:
            return [], f"rank {rank}'s memory is not the one that it offered (another container?)"
    return regions, None


def _gather(group: dist.ProcessGroup, value: T) -> list[T]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _raise_first_problem(problems: list[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise SharedMemoryError(problem)


def _header_bytes(num_buckets: int) -> int:
    return _round_up(NONCE_BYTES + MESSAGE_BYTES + 24 * num_buckets, 4096)


def _tensor_in(region: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(region, dtype=dtype, count=numel, offset=offset)


def _shards(flats: list[Tensor], owner: int) -> list[list[Tensor]]:
    """Return the chunks of the shard of `owner`: for each chunk its tensors in rank order."""
    numel = flats[0].numel()
    line = LINE_BYTES // flats[0].element_size()
    shard = _round_up(-(-numel // len(flats)), line)
    start, end = min(owner * shard, numel), min((owner + 1) * shard, numel)
    steps = range(start, end, CHUNK_ELEMENTS)
    return [[flat[step : min(step + CHUNK_ELEMENTS, end)] for flat in flats] for step in steps]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
