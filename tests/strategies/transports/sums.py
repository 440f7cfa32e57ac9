"""Sums of buffers of all types and sizes, for tests of transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from trainkit.strategies.transports.process_group import Transport

SIZES = [
    (1, torch.float32),
    (100_003, torch.float32),
    (0, torch.float32),
    (777, torch.float64),
    (1000, torch.bfloat16),
    (33, torch.float16),
    (400_000, torch.complex64),
]


def wrong_sums(transport: Transport, expected: Callable[[Sequence[Tensor]], Tensor]) -> list[str]:
    """Return the sums that are not, bit for bit, what is expected of the ranks' parts; closes the transport twice."""
    flats = transport.allocate(SIZES)
    rank, world_size, wrong = dist.get_rank(), dist.get_world_size(), []
    for turn in range(5):
        parts = [
            [torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(100 * turn + r)) for n, dtype in SIZES]
            for r in range(world_size)
        ]
        works = []
        for number, flat in enumerate(flats):
            flat.copy_(parts[rank][number])
            works.append(transport.start(number, where="a test"))
            if rank == turn % world_size:
                time.sleep(0.002)  # ranks are never in step
        for number, work in enumerate(works):
            work.wait()
            if not torch.equal(flats[number], expected([part[number] for part in parts]).to(flats[number].dtype)):
                wrong.append(f"turn {turn}, {SIZES[number]}")
    transport.close()
    transport.close()
    return wrong
