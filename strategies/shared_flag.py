"""SharedFlag: a flag that ranks compare in every step, in shared memory inside a host."""

from __future__ import annotations

import torch

from trainkit.distributed.collectives import ProcessGroupCollectives

from .transports.shared_memory import SharedMemoryError, SharedMemoryTransport

RARE_CALLS = 4  # over the process group: memory is shared once the flag is compared often


class SharedFlag:
    """Compares a flag over the ranks of `comm`; between hosts over the process group."""

    def __init__(self, comm: ProcessGroupCollectives) -> None:
        self._comm = comm
        self._calls = 0
        self._transport: SharedMemoryTransport | None = None
        self._flat = torch.zeros(0)

    def any_rank(self, flag: bool) -> bool:
        """Return True if `flag` is true on any rank; collective."""
        self._calls += 1
        if self._calls == RARE_CALLS:
            self._open()
        if self._transport is None:
            return self._comm.any_rank(flag)
        self._flat[0] = float(flag)
        self._transport.start(0, where=self._comm.after("the agreement on a stop")).wait()
        return bool(self._flat[0])

    def close(self) -> None:
        """Release the memory; may be called twice."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _open(self) -> None:
        """Share memory, if all ranks can; collective."""
        comm = self._comm
        assert comm.failure_store is not None
        transport = SharedMemoryTransport(
            comm.group, failure_store=comm.failure_store, timeout_seconds=comm.timeout_seconds
        )
        try:
            (self._flat,) = transport.allocate([(1, torch.float32)])
        except SharedMemoryError:  # on every rank, such as those of several hosts
            return
        self._transport = transport
