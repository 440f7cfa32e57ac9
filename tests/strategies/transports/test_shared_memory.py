"""Sums in shared memory: exact for every type and size, and nothing is left behind."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import resource
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trainkit.strategies.transports import shared_memory
from trainkit.strategies.transports.process_group import ProcessGroupTransport
from trainkit.strategies.transports.selection import open_transport
from trainkit.strategies.transports.shared_memory import (
    MESSAGE_BYTES,
    NONCE_BYTES,
    PeerMemory,
    SharedMemoryTransport,
    chunks_of,
    span_of,
    why_no_shared_memory,
)

from tests.strategies.transports.sums import wrong_sums
from trainkit.distributed.collectives import gather
from trainkit.distributed.failure_store import FailureStore
from trainkit.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create on this system")


def transport_of_all_ranks() -> SharedMemoryTransport:
    group = dist.group.WORLD
    failure_store = FailureStore(group, token="test")
    return SharedMemoryTransport(group, failure_store=failure_store, timeout_seconds=120)


def process_group_transport() -> ProcessGroupTransport:
    group, device = dist.group.WORLD, torch.device("cpu")
    failure_store = FailureStore(group, token="test")
    return ProcessGroupTransport(group, failure_store=failure_store, device=device, timeout_seconds=120)


def resident_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Rss:")]
    return 1024 * int(line.split()[1])


def memory_taken_by_each_bucket() -> list[float]:
    """Return by how much this rank grows when memory is allocated, and when two buckets of 16 MiB are reserved."""
    taken = []
    transport = open_transport(process_group_transport(), name="shared_memory")
    for action in (
        lambda: transport.allocate([(4 << 20, torch.float32)] * 2),
        lambda: transport.reserve(0),
        lambda: transport.reserve(1),
    ):
        before = resident_bytes()
        action()
        taken.append((resident_bytes() - before) / (16 << 20))
    return taken


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not report resident memory")
def test_memory_is_taken_bucket_by_bucket():
    for allocated, first, second in run_ranks(memory_taken_by_each_bucket, 2):
        assert allocated < 0.1
        assert first == pytest.approx(1, abs=0.1)
        assert second == pytest.approx(1, abs=0.1)


def open_files() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }


def sums_of_all_types() -> list[str]:
    return wrong_sums(transport_of_all_ranks(), in_rank_order)


def in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4))])
def test_sums_of_all_types_are_exact_in_rank_order(num_ranks):
    assert run_ranks(sums_of_all_types, num_ranks) == [[]] * num_ranks


def mapped_below_dev_shm() -> set[str]:
    """Return the files below /dev/shm that this process has mapped; others there belong to other programs."""
    fields = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {name for *_, name in fields if name.startswith("/dev/shm/")}


def leftovers() -> tuple[list[str], list[str], str]:
    before, files = mapped_below_dev_shm(), open_files()
    transport = open_transport(process_group_transport())
    flats = transport.allocate([(1000, torch.float32)])
    flats[0].fill_(1)
    transport.start(0, where="a test").wait()
    named = sorted(mapped_below_dev_shm() - before)
    transport.close()
    dist.barrier()
    assert flats[0].sum() == 1000 * dist.get_world_size(), "gradients stay readable after close"
    del flats
    gc.collect()
    memory = [name for name in open_files() - files if "memfd" in name]
    return memory, named, transport.name


def test_auto_uses_shared_memory_without_a_name_or_an_open_file():
    assert run_ranks(leftovers, 2) == [([], [], "shared_memory")] * 2


def mode_of_memory() -> int:
    region = shared_memory._make_region(4096, True)
    mode = stat.S_IMODE(os.fstat(region.fd).st_mode)
    os.close(region.fd)
    return mode


def test_shared_memory_is_open_to_this_user_only():
    assert mode_of_memory() == 0o600


def falls_back(broken_rank: int) -> tuple[str | None, str]:
    if dist.get_rank() == broken_rank:
        shared_memory.os.memfd_create = _no_memory
    reason = why_no_shared_memory(dist.group.WORLD, torch.device("cpu"))
    return reason, open_transport(process_group_transport()).name


def _no_memory(name: str, flags: int) -> int:
    raise OSError(12, "no memory")


def test_all_ranks_use_the_process_group_if_one_cannot_share_memory():
    for reason, name in run_ranks(falls_back, 2, 1):
        assert "no memory" in reason
        assert name == "process_group"


def with_another_region(of_rank_1: dict[str, Any]) -> str | None:
    """Return why no memory is shared if rank 1 describes another region than its own."""
    make = shared_memory._make_region

    def pretended(num_bytes: int, preallocate: bool) -> object:
        region = make(num_bytes, preallocate)
        return replace(region, **of_rank_1) if dist.get_rank() == 1 else region

    shared_memory._make_region = pretended
    return why_no_shared_memory(dist.group.WORLD, torch.device("cpu"))


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        ({"host": "elsewhere"}, "ranks 0 and 1 are on different hosts"),
        ({"nonce": bytes(16)}, "rank 1's memory is not the one that it offered (another container?)"),
    ],
)
def test_ranks_that_cannot_map_each_others_memory_share_none(offer, reason):
    assert run_ranks(with_another_region, 2, offer) == [reason] * 2


def processes_of_a_group_of_its_own() -> list[int]:
    ranks = [0, 2]
    group = dist.new_group(ranks, timeout=timedelta(seconds=300))
    if dist.get_rank() not in ranks:
        return []
    transport = SharedMemoryTransport(group, failure_store=FailureStore(group, token="test"), timeout_seconds=120)
    (flat,) = transport.allocate([(10, torch.float32)])
    flat.fill_(dist.get_rank() + 1)
    transport.start(0, where="a test").wait()
    assert len(gather(os.getpid(), group)) == 2
    return flat[:2].int().tolist()


def test_a_group_of_some_ranks_shares_memory_among_them():
    assert run_ranks(processes_of_a_group_of_its_own, 3) == [[4, 4], [], [4, 4]]


@given(numel=st.integers(0, 1_000_000), world_size=st.integers(1, 9))
def test_shards_cover_each_element_once(numel, world_size):
    flats: list[Tensor] = [torch.empty(numel, device="meta") for _ in range(world_size)]
    owned = [span_of(numel, owner, world_size, element_bytes=4) for owner in range(world_size)]
    chunks = [chunk for span in owned for chunk in chunks_of(flats, span)]
    spans = sorted((chunk[0].storage_offset(), chunk[0].numel()) for chunk in chunks)
    end = 0
    for start, size in spans:
        assert start == end
        end += size
    assert end == numel


def test_tests_leave_no_process_behind():
    gc.collect()  # which ends data workers of other tests
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    helpers = ("forkserver", "resource_tracker", "addr2line\0")  # torch asks the last for the names of C++ functions
    assert all(any(helper in name for helper in helpers) for name in names), names


def test_the_end_of_a_process_is_noticed_through_a_descriptor_above_1023():
    process = subprocess.Popen(["sleep", "1000"])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
        peer = PeerMemory(0, process.pid, mmap.mmap(-1, NONCE_BYTES + MESSAGE_BYTES))
        low, peer.pidfd = peer.pidfd, fcntl.fcntl(peer.pidfd, fcntl.F_DUPFD, 1024)
        os.close(low)
        assert not peer.is_gone()
        process.kill()
        process.wait()
        assert peer.is_gone()
        peer.close()
    finally:
        process.kill()
        process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
