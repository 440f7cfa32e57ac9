"""What both ways of moving fusion buffers offer: sums in parts, and parts of the weights for all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ddp.transport import Reduction, Transport


@dataclass(frozen=True)
class BufferSettings:
    """How buffers are summed."""

    window_bytes: int
    """Largest piece of a buffer that travels at once."""
    in_flight: int
    """Windows under way at once, which bounds the memory that they take."""
    wire_type: torch.dtype | None
    """Number format in which gradients travel; sums are made in at least float32. `None`: their own."""
    sharded: bool
    """Whether a part's sum stays with its server, which then updates that part of the weights."""


class PartTransport(Transport):
    """A transport in which server i, which is rank i, sums part i of every window."""

    settings: BufferSettings
    weights: list[Tensor]
    """With sharded settings: for each buffer the flat weights of its parameters, which `share` makes whole."""
    num_gradients: Callable[[], list[int]]
    """Gradient elements of each buffer; behind them are flags, which every rank must know."""

    @abstractmethod
    def own_parts(self, buffer: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the gradient elements of a buffer that this rank sums."""

    @abstractmethod
    def share(self, buffer: int, *, where: str) -> Reduction:
        """Start to give all ranks this rank's parts of the buffer's weights, and it theirs. Collective."""

    @property
    @abstractmethod
    def bytes_a_step(self) -> int:
        """Bytes that this rank moves to or from other ranks for the gradients and weights of one step."""

    def wire_type_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the format in which gradients of a type travel."""
        wire = self.settings.wire_type
        return dtype if wire is None or dtype.itemsize <= wire.itemsize else wire


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Return the sum of all ranks' parts, added in the order of ranks, in at least float32."""
    first, *others = parts
    total = first.to(torch.float32, copy=True) if first.dtype.itemsize < 4 else first.clone()
    for other in others:
        total.add_(other)
    return total
