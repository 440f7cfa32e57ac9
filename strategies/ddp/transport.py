"""The way in which flat buckets are summed over the ranks: the interface, and the choice of one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from trainkit.distributed.failure_store import FailureStore

TransportName = Literal["auto", "group", "shared_memory"]

logger = logging.getLogger(__name__)


class Reduction(Protocol):
    """A sum over the ranks that is under way."""

    finished_at: float | None
    """When it was done, in seconds of time.perf_counter, where that is known; else None."""

    def is_done(self) -> bool:
        """Whether there is nothing to wait for any more."""

    def wait(self) -> object:
        """Return once the tensor holds the sum over all ranks; raise when a rank failed or did not come in time."""


class Transport(ABC):
    """Sums flat buckets over all ranks, asynchronously; every rank starts the same buckets in the same order."""

    name: str

    @abstractmethod
    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return a flat tensor of any content for each (elements, dtype); earlier ones stay readable. Collective."""

    def reserve(self, bucket: int) -> None:
        """Take the memory of a bucket, which is about to be filled for the first time, where it is not taken yet."""

    @abstractmethod
    def start(self, bucket: int, *, where: str, timed: bool = False) -> Reduction:
        """Start to sum the allocated tensor number `bucket`; `where` names the place in messages.

        With `timed` the reduction notes when it is done, also if nobody waits for it then.
        """

    def progress(self) -> None:
        """Do what can be done now for the reductions under way, without waiting."""

    def fail(self, message: str) -> None:
        """Let ranks that wait in this transport know at once why this one stops."""

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds; may be called twice."""


def open_transport(
    name: TransportName,
    *,
    group: dist.ProcessGroup,
    board: FailureStore,
    device: torch.device,
    timeout_seconds: float,
) -> Transport:
    """Return the transport called `name`; "auto" is shared memory where it works, else the group. Collective."""
    from .collective import ProcessGroupTransport
    from .shared_memory import SharedMemoryTransport, why_no_shared_memory

    through_group = ProcessGroupTransport(group, board=board, device=device, timeout_seconds=timeout_seconds)
    if name == "group" or (name == "auto" and (device.type != "cpu" or group.size() == 1)):
        return through_group
    reason = why_no_shared_memory(group, device)
    if reason is None:
        # Bucket by bucket, as gradients move in for the first time and let go of their own: two sets are never there.
        return SharedMemoryTransport(group, board=board, timeout_seconds=timeout_seconds, takes_all=False)
    if name == "shared_memory":
        raise ValueError(f'transport="shared_memory" cannot work here: {reason}. Use transport="auto".')
    if group.rank() == 0:
        logger.info("gradients go through the process group, not through shared memory: %s", reason)
    return through_group
