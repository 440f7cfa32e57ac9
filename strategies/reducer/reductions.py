"""Bucket reductions: started through a transport, a communication hook or as sparse tensors, and waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from trainkit.devices import current_stream, has_streams

from ..transports.process_group import CommunicationHook, PendingHook, ProcessGroupTransport, Transport
from .bucket import Bucket, GradBucket, ReducerSettings


class BucketReductions:
    """Starts the reductions of buckets, and leaves their results in the gradients.

    `collective` reduces what the buckets' transport does not: sparse gradients, and flags beside a hook.
    """

    def __init__(self, settings: ReducerSettings, collective: ProcessGroupTransport) -> None:
        self.settings, self.collective = settings, collective
        self.world_size = collective.group.size()
        self._uses_flags = settings.find_unused_parameters != "error"
        self.hook: CommunicationHook | None = None
        self._hook_state: Any = None

    def register_hook(self, state: Any, hook: CommunicationHook) -> None:
        """Reduce the buckets by `hook(state, bucket)`, which leaves the mean over ranks. Once, before training."""
        if self.hook is not None:
            raise RuntimeError("a communication hook is already registered; there can be only one")
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, got {type(hook).__name__}")
        self.hook, self._hook_state = hook, state

    def start(self, bucket: Bucket, transport: Transport, *, where: str, is_last: bool, timed: bool) -> None:
        """Start to reduce a filled bucket; `where` names the place in errors."""
        bucket.launched_at = time.perf_counter()
        # Or the collective, which follows the current stream, might send a bucket that is not written yet.
        if bucket.streams:  # that have written gradients
            current = current_stream(bucket.entries[0].parameter.device)
            for stream in bucket.streams - {current}:
                current.wait_stream(stream)
            bucket.streams.clear()
        if bucket.contents is None:
            self._start_sparse(bucket, where)
            return
        # Flags follow the gradients in `contents`, so that one reduction sums both.
        if self._uses_flags:
            _set_flags(bucket)
        if self.hook is None:
            bucket.reduction = transport.start(bucket.index, where=where, timed=timed)
            return
        if self._uses_flags:  # a hook reduces the gradients only
            bucket.flags = self.collective.start_tensor(bucket.used_flags, where=where)
        returned = self.hook(self._hook_state, GradBucket(bucket, is_last=is_last))
        store, seconds = self.collective.failure_store, self.settings.timeout_seconds
        bucket.pending_hook = PendingHook(returned, where=where, failure_store=store, timeout_seconds=seconds)

    def run_hooks(self, buckets: Sequence[Bucket]) -> None:
        """Advance all hooks in turn until they have ended, so that every rank has the same order of collectives."""
        if self.hook is None:
            return
        running = [bucket for bucket in buckets if bucket.pending_hook is not None]
        # One step of each hook in a round, not one hook to its end: collectives of several buckets overlap.
        waiting = running
        while waiting:
            waiting = [b for b in waiting if b.pending_hook is not None and not b.pending_hook.advance()]
        for bucket in running:
            assert bucket.pending_hook is not None and bucket.pending_hook.result is not None
            result = bucket.pending_hook.result
            if result.data_ptr() != bucket.flat.data_ptr():  # a hook may reduce in place, or return another tensor
                bucket.flat.copy_(result.view_as(bucket.flat))
            if not self.settings.average:  # hooks leave the mean, and strategies weight losses for a sum
                bucket.flat.mul_(self.world_size)
            if bucket.flags is not None:
                bucket.flags.wait()
                bucket.flags = None
            bucket.pending_hook = None
            bucket.finished_at = time.perf_counter()

    def wait(self, bucket: Bucket, transport: Transport) -> None:
        """Return once the bucket's result is in the gradients of its parameters."""
        if bucket.reduction is not None:
            bucket.reduction.wait()
            bucket.finished_at = bucket.reduction.finished_at or time.perf_counter()
            bucket.reduction = None
        if not self.settings.gradient_as_bucket_view:
            _copy_back(bucket)
        if bucket.unused:
            self._restore_unused(bucket, transport)

    def _start_sparse(self, bucket: Bucket, where: str) -> None:
        (entry,) = bucket.entries
        gradient = entry.parameter.grad
        if gradient is None or bucket.unused:
            # Without values, but with the sparse dimensions of the other ranks: gloo compares them.
            size, dims = entry.parameter.size(), entry.sparse_dim
            gradient = torch.sparse_coo_tensor(
                torch.zeros((dims, 0), dtype=torch.int64, device=entry.parameter.device),
                torch.zeros((0, *size[dims:]), dtype=entry.parameter.dtype, device=entry.parameter.device),
                size,
                check_invariants=False,  # explicit, since torch warns of its default
            )
        gradient = gradient.coalesce()
        if self.hook is not None and self.settings.average:  # sparse gradients bypass the hook, which would divide
            gradient = gradient / self.world_size
        entry.parameter.grad = gradient
        bucket.reduction = self.collective.start_tensor(gradient, where=where)

    def _restore_unused(self, bucket: Bucket, transport: Transport) -> None:
        """Restore the gradient of each parameter that no rank used, and set the result for the others."""
        # A zero that no rank contributed must not become a gradient: weight decay and momentum would apply it.
        used = self._used(bucket, transport)
        for position in bucket.unused:
            entry = bucket.entries[position]
            gradient, view, saved_grad = entry.parameter.grad, entry.view, entry.saved_grad
            entry.saved_grad = None
            if view is None:
                # A sparse sum has replaced `.grad`: what was accumulated in it earlier is added here.
                if saved_grad is not None and gradient is not None and used[position]:
                    entry.parameter.grad = saved_grad + gradient
                elif not used[position]:
                    entry.parameter.grad = saved_grad
            elif not used[position]:
                if gradient is view and saved_grad is not None:  # the sum of equal parts may differ in the last bit
                    view.copy_(saved_grad)
            elif self.settings.gradient_as_bucket_view:
                entry.parameter.grad = view
            elif gradient is None:
                entry.parameter.grad = view.clone()
            else:
                gradient.copy_(view)

    def _used(self, bucket: Bucket, transport: Transport) -> list[bool]:
        """Return for each parameter of a reduced bucket True if any rank had a gradient."""
        if not self._uses_flags:
            return [True] * len(bucket.entries)
        if self.world_size == 1:
            return [position not in bucket.unused for position in range(len(bucket.entries))]
        if bucket.contents is None:
            gradient = bucket.entries[0].parameter.grad
            # Private: the public methods require the sum to be coalesced, which costs a sort.
            return [gradient is not None and gradient._nnz() > 0]
        flags = transport.flags_on_host(bucket.index)
        # On a device `tolist` waits for it, but only on a rank that had parameters without a gradient.
        return [bool(count) for count in (bucket.used_flags if flags is None else flags).tolist()]


def _set_flags(bucket: Bucket) -> None:
    """Set the flag of each parameter: 1 if this rank has a gradient, else 0."""
    flags = bucket.used_flags
    if not bucket.unused:
        flags.fill_(1)
        return
    # Pinned, so that the copy does not wait for the device; torch keeps the memory until the copy has run.
    used = torch.ones(flags.shape, dtype=flags.dtype, pin_memory=has_streams(flags.device))
    used[bucket.unused] = 0
    flags.copy_(used, non_blocking=True)


def _copy_back(bucket: Bucket) -> None:
    """Copy the bucket's result to gradients that are not views of it."""
    used = [entry for position, entry in enumerate(bucket.entries) if position not in bucket.unused]
    pairs = [(e.parameter.grad, e.view) for e in used if e.parameter.grad is not None and e.view is not None]
    if pairs:
        gradients, views = zip(*pairs, strict=True)
        with torch.no_grad():
            torch._foreach_copy_(gradients, views)  # private: torch has no public copy of many tensors in one call
