"""Half-precision transport: buckets sent in 16 bits, and what rounding loses of them, kept for the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore

from .comm_hooks import ErrorFeedback, sum_of_errors
from .transport import ProcessGroupTransport, Work, add_loss, dtype_sent


class HalfPrecisionTransport(ProcessGroupTransport):
    """Sums buckets that are sent in `dtype`: by one all_reduce, or with error feedback in float32.

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
        self._without_sum: deque[FeedbackWork] = deque()  # started, in the order of buckets

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Work:
        flat = self.flats[bucket]
        error = self.add_error(bucket, flat)  # also to one that is sent as it is: a checkpoint may hold errors of it
        if self.group.size() == 1 or not len(flat) or dtype_sent(flat.dtype, self.dtype) == flat.dtype:
            return super().start(bucket, where=where, timed=timed)
        if error is None:
            sent = flat.to(self.dtype)
            return RoundedWork(self.start_tensor(sent, where=where, timed=timed), sent, flat)
        work = FeedbackWork(self, flat, error, where=where, timed=timed)
        # Its second collective waits for the first one, and so would hold up backward: it comes in `flush`.
        self._without_sum.append(work)
        return work

    def flush(self) -> None:
        """Send the sums of shards, after all shards: every rank has this order of collectives."""
        while self._without_sum:
            self._without_sum.popleft().send_sum()

    def close(self) -> None:
        super().close()
        self._without_sum.clear()


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


class FeedbackWork:
    """The sum of a flat tensor, sent in 16 bits and added in float32; what both roundings lose is in `error`.

        rank 0   [ shard 0 | shard 1 ]  --16 bits-->  rank 0 sums shard 0  --16 bits-->  every rank
        rank 1   [ shard 0 | shard 1 ]                rank 1 sums shard 1

    Bytes are those of an all_reduce. `error` may be shorter than `flat`, which flags follow.
    """

    finished_at: float | None

    def __init__(
        self, transport: HalfPrecisionTransport, flat: Tensor, error: Tensor, *, where: str, timed: bool
    ) -> None:
        self.transport, self.flat, self.error, self.where, self.timed = transport, flat, error, where, timed
        self.has_sent_sum, self.finished_at = False, None
        world_size = transport.group.size()
        self.shard = -(-len(flat) // world_size)  # rounded up: all_to_all_single sends equal parts
        # (world_size * shard,); the end, beyond `flat`, is sent too and must not be NaN.
        self.sent = torch.zeros(world_size * self.shard, dtype=transport.dtype, device=flat.device)
        self.sent[: len(flat)] = flat
        add_loss(error, flat, self.sent)
        self.arrived = torch.empty_like(self.sent)  # this rank's shard of every rank
        shards = dist.all_to_all_single(self.arrived, self.sent, group=transport.group, async_op=True)
        self.work = transport.watch(shards, where=where)

    def is_done(self) -> bool:
        return self.has_sent_sum and self.work.is_done()

    def send_sum(self) -> None:
        """Add up this rank's shard of all ranks, and start to send it to them."""
        self.work.wait()
        group, shard = self.transport.group, self.shard
        # In 16 bits each addition would round again, and only the last rounding is in `error`.
        wide = torch.promote_types(self.flat.dtype, torch.float32)
        total = self.arrived.view(group.size(), shard).to(wide).sum(0)
        rounded = total.to(self.sent.dtype)
        add_loss(self.error[group.rank() * shard :][:shard], total, rounded)  # the last shard may be shorter
        # In the memory of the first collective, which has ended; all ranks begin these in the order of buckets.
        sums = dist.all_gather(list(self.sent.split(shard)), rounded, group=group, async_op=True)
        self.work, self.has_sent_sum = self.transport.watch(sums, where=self.where, timed=self.timed), True

    def wait(self) -> None:
        """Leave the sum in the flat tensor."""
        self.work.wait()
        self.finished_at = self.work.finished_at
        self.flat.copy_(self.sent[: len(self.flat)])


@dataclass(slots=True)
class RoundingErrors:
    """What rounding has lost on this rank, as checkpoints hold it."""

    group: dist.ProcessGroup
    errors: ErrorFeedback = field(default_factory=ErrorFeedback, init=False)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's errors, without those of parameters of which it has lost nothing."""
        # Reading `any` waits for the device, but only when a checkpoint is made.
        return {"errors": {name: error for name, error in self.errors.by_name.items() if error.any()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue with the errors of this rank."""
        self.errors.load(saved["errors"])

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue with the errors of another number of ranks: their sum is kept."""
        self.errors.load(sum_of_errors(states, world_size=self.group.size()))
