"""Half-precision transport: buckets sent in 16 bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore

from .process_group import ProcessGroupTransport, Work, dtype_sent


class HalfPrecisionTransport(ProcessGroupTransport):
    """Sums buckets that are sent in `dtype`, by one all_reduce each.

    Buckets of a dtype of at most 16 bits, and complex ones, are sent as they are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        failure_store: FailureStore,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        super().__init__(group, failure_store=failure_store, device=device, timeout_seconds=timeout_seconds)
        self.dtype = dtype

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        flat = self.flats[bucket]
        if self.group.size() == 1 or not len(flat) or dtype_sent(flat.dtype, self.dtype) == flat.dtype:
            return super().start(bucket, where=where, timed=timed)
        sent = flat.to(self.dtype)
        return RoundedWork(self.start_tensor(sent, where=where, timed=timed), sent, flat)


class RoundedWork:
    """The sum of a rounded copy, under way."""

    def __init__(self, work: Work, sent: Tensor, flat: Tensor) -> None:
        self.work, self.sent, self.flat = work, sent, flat  # `sent` must live until the collective has ended
        self.finished_at: float | None = None

    def is_done(self) -> bool:
        return self.work.is_done()

    def wait(self) -> None:
        """Leave the sum in the flat tensor."""
        self.work.wait()
        self.finished_at = self.work.finished_at
        self.flat.copy_(self.sent)
