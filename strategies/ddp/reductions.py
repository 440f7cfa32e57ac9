"""Buckets on their way: started through a transport, a communication hook or as sparse tensors, and waited for."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainkit.distributed.failure_store import FailureStore

from .bucket import Bucket, GradBucket, ReducerSettings
from .transport import CommunicationHook, PendingHook, ProcessGroupTransport, Transport, TransportName

logger = logging.getLogger(__name__)


class BucketReductions:
    """Starts the reductions of buckets, and leaves their results in the gradients."""

    def __init__(
        self, group: dist.ProcessGroup, *, settings: ReducerSettings, failure_store: FailureStore, device: torch.device
    ) -> None:
        self.settings, self.failure_store, self.device = settings, failure_store, device
        self.world_size = group.size()
        self.collective = ProcessGroupTransport(
            group, failure_store=failure_store, device=device, timeout_seconds=settings.timeout_seconds
        )
        self._hook: CommunicationHook | None = None
        self._hook_state: Any = None

    def register_hook(self, state: Any, hook: CommunicationHook) -> None:
        """Let `hook(state, bucket)` reduce the buckets: it leaves the mean over ranks. Once, before training."""
        if self._hook is not None:
            raise RuntimeError("a communication hook is already registered; there can be only one")
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, got {type(hook).__name__}")
        self._hook, self._hook_state = hook, state

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook reduces the buckets."""
        return self._hook is not None

    def start(self, bucket: Bucket, transport: Transport, *, where: str, is_last: bool, timed: bool) -> None:
        """Start to reduce a filled bucket; `where` names the place in messages."""
        bucket.launched_at = time.perf_counter()
        if bucket.streams:
            self._order_streams(bucket)
        if bucket.contents is None:
            self._start_sparse(bucket, where)
            return
        if self.settings.unused != "error":
            self._raise_flags(bucket)
        if self._hook is None:
            bucket.reduction = transport.start(bucket.index, where=where, timed=timed)
            return
        if self.settings.unused != "error":
            bucket.flags = self.collective.start_tensor(bucket.used_flags, where=where)
        view = GradBucket(bucket, is_last=is_last, buffer=bucket.flat)
        bucket.hook_run = PendingHook(
            self._hook(self._hook_state, view),
            where=where,
            failure_store=self.failure_store,
            timeout_seconds=self.settings.timeout_seconds,
        )

    def run_hooks(self, buckets: Sequence[Bucket]) -> None:
        """Let all hooks go on in turn, stage by stage, so that every rank has the same order of collectives."""
        if self._hook is None:
            return
        running = [bucket for bucket in buckets if bucket.hook_run is not None]
        waiting = running
        while waiting:
            waiting = [b for b in waiting if b.hook_run is not None and not b.hook_run.advance()]
        for bucket in running:
            assert bucket.hook_run is not None and bucket.hook_run.result is not None
            result = bucket.hook_run.result
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result.view_as(bucket.flat))
            if not self.settings.average:
                bucket.flat.mul_(self.world_size)
            if bucket.flags is not None:
                bucket.flags.wait()
                bucket.flags = None
            bucket.hook_run = None
            bucket.finished_at = time.perf_counter()

    def wait(self, bucket: Bucket) -> None:
        """Return once the bucket's result is in the gradients of its parameters."""
        if bucket.reduction is not None:
            bucket.reduction.wait()
            bucket.finished_at = bucket.reduction.finished_at or time.perf_counter()
            bucket.reduction = None
        if not self.settings.gradient_as_bucket_view:
            _copy_back(bucket)
        if bucket.absent:
            self._restore_unused(bucket)

    def _start_sparse(self, bucket: Bucket, where: str) -> None:
        (slot,) = bucket.slots
        gradient = slot.parameter.grad
        if gradient is None or bucket.absent:
            size, dims = slot.parameter.size(), slot.sparse_dim
            gradient = torch.sparse_coo_tensor(
                torch.zeros((dims, 0), dtype=torch.int64, device=self.device),
                torch.zeros((0, *size[dims:]), dtype=slot.parameter.dtype, device=self.device),
                size,
                check_invariants=False,  # said aloud, since torch warns of a silent default
            )
        gradient = gradient.coalesce()
        if self._hook is not None and self.settings.average:  # no hook is asked, and none has divided
            gradient = gradient / self.world_size
        slot.parameter.grad = gradient
        bucket.reduction = self.collective.start_tensor(gradient, where=where)

    def _raise_flags(self, bucket: Bucket) -> None:
        """Say behind the gradients which of them this rank has."""
        flags = bucket.used_flags
        if not bucket.absent:
            flags.fill_(1)
            return
        # A pinned temporary, so that the copy waits for nobody; its memory is not used again before that has run.
        used = torch.ones(flags.shape, dtype=flags.dtype, pin_memory=flags.is_cuda)
        used[bucket.absent] = 0
        flags.copy_(used, non_blocking=True)

    def _order_streams(self, bucket: Bucket) -> None:
        """Let the collective wait for gradients that other streams are still writing."""
        current = torch.cuda.current_stream(self.device)
        for stream in bucket.streams:
            if stream != current:
                current.wait_stream(stream)
        bucket.streams.clear()

    def _restore_unused(self, bucket: Bucket) -> None:
        """Give back what it had to each parameter that no rank used, and the result to the others."""
        counts = self._used_counts(bucket)
        for position in bucket.absent:
            slot = bucket.slots[position]
            gradient, view, kept = slot.parameter.grad, slot.view, slot.kept
            slot.kept = None
            if view is None:
                if kept is not None and gradient is not None and counts[position]:
                    slot.parameter.grad = kept + gradient
                elif not counts[position]:
                    slot.parameter.grad = kept
            elif not counts[position]:
                if gradient is view and kept is not None:
                    view.copy_(kept)
            elif self.settings.gradient_as_bucket_view:
                slot.parameter.grad = view
            elif gradient is None:
                slot.parameter.grad = view.clone()
            else:
                gradient.copy_(view)

    def _used_counts(self, bucket: Bucket) -> Sequence[bool]:
        if self.settings.unused == "error":
            return [True] * len(bucket.slots)
        if bucket.contents is None:
            gradient = bucket.slots[0].parameter.grad
            return [gradient is not None and gradient._nnz() > 0]
        if bucket.flags is not None:
            bucket.flags.wait()
            bucket.flags = None
        # Waits for the device, but only on a rank that had parameters without a gradient.
        return [bool(count) for count in bucket.used_flags.tolist()]


def _copy_back(bucket: Bucket) -> None:
    """Give parameters that keep a gradient of their own the bucket's result."""
    gradients, views = [], []
    for position, slot in enumerate(bucket.slots):
        gradient = slot.parameter.grad
        if gradient is not None and slot.view is not None and position not in bucket.absent:
            gradients.append(gradient)
            views.append(slot.view)
    if gradients:
        with torch.no_grad():
            torch._foreach_copy_(gradients, views)


def open_transport(
    name: TransportName,
    *,
    group: dist.ProcessGroup,
    failure_store: FailureStore,
    device: torch.device,
    timeout_seconds: float,
) -> Transport:
    """Return the transport called `name`; "auto" is shared memory where it works, else the group. Collective."""
    from .shared_memory import SharedMemoryTransport, why_no_shared_memory

    through_group = ProcessGroupTransport(
        group, failure_store=failure_store, device=device, timeout_seconds=timeout_seconds
    )
    if name == "group" or (name == "auto" and (device.type != "cpu" or group.size() == 1)):
        return through_group
    reason = why_no_shared_memory(group, device)
    if reason is None:
        # Bucket by bucket, as gradients move in for the first time and let go of their own: two sets are never there.
        return SharedMemoryTransport(
            group, failure_store=failure_store, timeout_seconds=timeout_seconds, takes_all=False
        )
    if name == "shared_memory":
        raise ValueError(f'transport="shared_memory" cannot work here: {reason}. Use transport="auto".')
    if group.rank() == 0:
        logger.info("gradients go through the process group, not through shared memory: %s", reason)
    return through_group
