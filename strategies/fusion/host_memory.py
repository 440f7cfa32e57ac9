"""Buffers of gradients and weights as the ranks of one host hold them, and what a server does with its part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ddp.shared_memory import CHUNK_ELEMENTS, SharedBucket
from .part_transport import Landing, sum_in_order
from .staging import Copy

if TYPE_CHECKING:
    from .host_buffers import HostBuffers


class OnItsWay(SharedBucket):
    """A bucket and how far it has come in its latest round."""

    __slots__ = ("is_taken", "is_told", "travels", "where")

    where: str
    is_told: bool  # the others know that it is filled
    is_taken: bool  # this rank has done its part of the host's work
    travels: Landing | None  # between hosts

    def is_on_host(self) -> bool:
        """Whether other ranks may read it."""
        return True


class Gradients(OnItsWay):
    """Gradients of which each server sums its part."""

    __slots__ = ("copy", "copy_back", "flag_views", "owner", "result", "span", "sums", "wire")

    def __init__(
        self, owner: HostBuffers, number: int, flats: list[Tensor], result: Tensor, *, span: tuple[int, int]
    ) -> None:
        self.wire, self.owner, self.result, self.span = flats[owner.rank], owner, result, span
        parts = [flat[slice(*span)].split(CHUNK_ELEMENTS) for flat in flats]
        super().__init__(number, self.wire, [list(chunk) for chunk in zip(*parts, strict=True)])
        self.flag_views = [flat[owner.num_gradients()[number] :] for flat in flats]
        self.copy: Copy | None = None
        self.copy_back: Copy | None = None
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


class Weights(OnItsWay):
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
        total.copy_(sum_in_order(chunk))
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
