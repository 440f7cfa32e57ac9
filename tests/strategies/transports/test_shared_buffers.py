"""Fusion buffers on two simulated hosts of two ranks: sums to the bit, flags, and weights of every shard."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from trainkit.strategies.transports.hosts import HostLayout, OwnGroups
from trainkit.strategies.transports.process_group import ProcessGroupTransport, dtype_sent
from trainkit.strategies.transports.sharded import FusionSettings
from trainkit.strategies.transports.shared_buffers import SharedBuffers, open_shard_transport

from tests.strategies.fusion.training import pretend_hosts
from trainkit.distributed.failure_store import FailureStore
from trainkit.testing import run_ranks

SIZES = [
    (1, torch.float32),
    (100_003, torch.float32),
    (0, torch.float32),
    (777, torch.float64),
    (1001, torch.bfloat16),
    (33, torch.float16),
]
NUM_FLAGS = 3  # behind the gradients of each buffer


def opened(servers: str, reduce_dtype: torch.dtype | None, sharded: bool) -> SharedBuffers:
    pretend_hosts(2)
    group, seconds = dist.group.WORLD, 120.0
    store = FailureStore(group, token="test")
    transport = open_shard_transport(
        ProcessGroupTransport(group, failure_store=store, device=torch.device("cpu"), timeout_seconds=seconds),
        name="shared_memory",
        servers=servers,
        settings=FusionSettings(message_bytes=4096, max_in_flight=2, reduce_dtype=reduce_dtype, sharded=sharded),
        num_gradients=lambda: [numel for numel, _ in SIZES],
        hosts=HostLayout.gather(group),
        own_groups=OwnGroups(timedelta(seconds=seconds)),
    )
    assert isinstance(transport, SharedBuffers)
    return transport


def gradients_of(rank: int, turn: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return [torch.randn(numel, dtype=dtype, generator=generator) for numel, dtype in SIZES]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def of_host(
    first: torch.Tensor, second: torch.Tensor, reduce_dtype: torch.dtype | None, *, sharded: bool
) -> torch.Tensor:
    """Return what a host sends: gradients that are shared rounded, added in at least fp32, and rounded again."""
    total = widened(first.to(dtype_sent(first.dtype, reduce_dtype)))
    total = total + widened(second.to(dtype_sent(second.dtype, reduce_dtype)))
    if sharded:
        total = total.to(first.dtype)  # in the memory of the gradients
    return total.to(dtype_sent(total.dtype, reduce_dtype))


def sums_on_this_rank(servers: str, reduce_dtype: torch.dtype | None) -> list[str]:
    transport = opened(servers, reduce_dtype, sharded=False)
    flats = transport.allocate([(numel + NUM_FLAGS, dtype) for numel, dtype in SIZES])
    rank, wrong = dist.get_rank(), []
    for turn in range(5):
        works = []
        for number, (flat, gradient) in enumerate(zip(flats, gradients_of(rank, turn), strict=True)):
            flat[: len(gradient)].copy_(gradient)
            flat[len(gradient) :] = 1
            works.append(transport.start(number, where="a test"))
            if rank == turn % 4:
                time.sleep(0.002)  # ranks are never in step
        of_ranks = [gradients_of(other, turn) for other in range(4)]
        for number, (work, flat) in enumerate(zip(works, flats, strict=True)):
            work.wait()
            numel, dtype = SIZES[number]
            first, second, third, fourth = (gradients[number] for gradients in of_ranks)
            total = of_host(first, second, reduce_dtype, sharded=False)
            total = total + of_host(third, fourth, reduce_dtype, sharded=False)
            result = total.to(dtype_sent(dtype, reduce_dtype)).to(dtype)
            if not torch.equal(flat[:numel], result) or flat[numel:].tolist() != [4] * NUM_FLAGS:
                wrong.append(f"turn {turn}, {SIZES[number]}")
    transport.close()
    return wrong


@pytest.mark.parametrize("servers", ["rank", "host"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_sums_are_those_of_hosts_in_at_least_fp32_and_rounded_where_they_are_sent(servers, reduce_dtype):
    assert run_ranks(sums_on_this_rank, 4, servers, reduce_dtype) == [[]] * 4


def shards_on_this_rank(servers: str, reduce_dtype: torch.dtype | None) -> list[str]:
    transport = opened(servers, reduce_dtype, sharded=True)
    flats = transport.allocate([(numel + NUM_FLAGS, dtype) for numel, dtype in SIZES])
    rank, wrong = dist.get_rank(), []
    for turn in range(3):
        works = []
        for number, (flat, gradient) in enumerate(zip(flats, gradients_of(rank, turn), strict=True)):
            flat[: len(gradient)].copy_(gradient)
            flat[len(gradient) :] = torch.tensor([1, rank == 3, 0])
            works.append(transport.start(number, where="a test"))
        of_ranks = [gradients_of(other, turn) for other in range(4)]
        for number, (work, flat) in enumerate(zip(works, flats, strict=True)):
            work.wait()
            first, second, third, fourth = (gradients[number] for gradients in of_ranks)
            # A sum that stays on its server is not sent, and not rounded for that.
            total = widened(of_host(first, second, reduce_dtype, sharded=True))
            total = total + widened(of_host(third, fourth, reduce_dtype, sharded=True))
            for start, stop in transport.own_ranges(number):
                if not torch.equal(flat[start:stop], total[start:stop].to(flat.dtype)):
                    wrong.append(f"turn {turn}, {SIZES[number]}")
                transport.weight_sets[transport.next_set][number][start:stop] = 1 + number + turn
            if [count > 0 for count in transport.used_flags(number).tolist()] != [True, True, False]:
                wrong.append(f"turn {turn}, flags of {SIZES[number]}")
        gathers = [transport.gather_weights(number, where="a test") for number in range(len(SIZES))]
        for number, gather in enumerate(gathers):
            gather.wait()
            weights = transport.weight_sets[transport.next_set][number][: SIZES[number][0]]
            if not bool((weights == 1 + number + turn).all()):
                wrong.append(f"turn {turn}, weights of {SIZES[number]}")
        dist.barrier()  # the next turn writes the weights that slow ranks still read here
    transport.close()
    return wrong


@pytest.mark.parametrize("servers", ["rank", "host"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_servers_have_the_sums_of_their_shards_and_gather_the_weights_of_all(servers, reduce_dtype):
    assert run_ranks(shards_on_this_rank, 4, servers, reduce_dtype) == [[]] * 4
