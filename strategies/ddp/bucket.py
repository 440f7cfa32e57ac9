"""One bucket while it is filled and reduced, and what a communication hook sees of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from .bucket_plan import BucketLayout, BucketPlan
from .transport import PendingHook, Transport, TransportName, Work


@dataclass(slots=True, eq=False)
class GradientEntry:
    """One parameter's place: its bucket, its view of the bucket, and how far its gradient has come."""

    index: int
    name: str
    parameter: nn.Parameter
    bucket: Bucket | None = None
    view: Tensor | None = None  # None for sparse gradients, and before the buckets exist
    expected: int = 1  # firings of its hook in one backward
    remaining: int = 1
    arrived: int = 0  # when its hook last fired while learning; 0: never
    sparse_dim: int = 0
    touched: bool = False  # holds gradient that was accumulated without a reduction
    carried: bool = False  # `.grad` is the sum of an earlier reduction
    kept: Tensor | None = None  # the gradient to give back if no rank used the parameter


@dataclass(slots=True, eq=False)
class Bucket:
    """Gradients that are reduced together."""

    index: int
    layout: BucketLayout
    slots: list[GradientEntry]
    contents: Tensor | None  # flat gradients, then one flag for each parameter; None for a sparse bucket
    pending: int = 0
    absent: list[int] = field(default_factory=list)  # positions without a gradient on this rank
    reduction: Work | None = None
    flags: Work | None = None
    hook_run: PendingHook | None = None
    streams: set[torch.cuda.Stream] = field(default_factory=set)
    ready_at: float = 0.0  # seconds of time.perf_counter
    launched_at: float = 0.0
    finished_at: float = 0.0

    def is_done(self) -> bool:
        """Whether the reduction, once started, needs no more waiting; one by a hook is waited for at the end."""
        return self.hook_run is None and self.reduction is not None and self.reduction.is_done()

    @property
    def flat(self) -> Tensor:
        """The gradients, one after the other."""
        assert self.contents is not None
        return self.contents[: self.layout.numel]

    @property
    def used_flags(self) -> Tensor:
        """For each parameter how many ranks had a gradient, once reduced."""
        assert self.contents is not None
        return self.contents[self.layout.numel :]


class GradBucket:
    """What a communication hook gets, with the methods of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket, *, is_last: bool, buffer: Tensor) -> None:
        self._bucket, self._is_last, self._buffer = bucket, is_last, buffer

    def index(self) -> int:
        """Return the place of the bucket in the order of reductions."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Return the flat gradients, which the hook may change."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer` stand for the flat gradients."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, as views of the buffer."""
        return self.gradients_in(self._buffer)

    def gradients_in(self, buffer: Tensor) -> list[Tensor]:
        """Return the views of another buffer of the same layout."""
        parameters = [slot.parameter for slot in self._bucket.slots]
        pairs = zip(parameters, self._bucket.layout.offsets, strict=True)
        return [shaped_like(buffer[offset : offset + p.numel()], p) for p, offset in pairs]

    def parameters(self) -> list[Tensor]:
        """Return the parameters in the order of their gradients."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._is_last


def shaped_like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of the flat `part` with the parameter's sizes, and its strides where they fill the part."""
    if _is_dense(parameter):
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.size())


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the strides cover each element of a block once: then gradients are laid out the same way."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def views_of(contents: Tensor, layout: BucketLayout, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return each parameter's view of a bucket's contents."""
    return [
        shaped_like(contents[offset : offset + parameters[index].numel()], parameters[index])
        for index, offset in zip(layout.parameters, layout.offsets, strict=True)
    ]


def make_buckets(
    plan: BucketPlan, slots: Sequence[GradientEntry], transport: Transport, *, flags: bool
) -> list[Bucket]:
    """Return the plan's buckets in memory of the transport, each slot knowing its place; collective.

    With `flags` the gradients of a bucket are followed by one number for each of its parameters.
    """
    dtypes = [slots[layout.parameters[0]].parameter.dtype for layout in plan.buckets]
    sizes = [
        (0 if layout.sparse else layout.numel + flags * len(layout.parameters), dtype)
        for layout, dtype in zip(plan.buckets, dtypes, strict=True)
    ]
    parameters = [slot.parameter for slot in slots]
    buckets = []
    for index, (layout, flat) in enumerate(zip(plan.buckets, transport.allocate(sizes), strict=True)):
        members = [slots[i] for i in layout.parameters]
        bucket = Bucket(index, layout, members, None if layout.sparse else flat, pending=len(members))
        views = [None] if layout.sparse else views_of(flat, layout, parameters)
        for slot, view in zip(members, views, strict=True):
            slot.bucket, slot.view = bucket, view
        buckets.append(bucket)
    return buckets


class LaunchQueue:
    """Starts each bucket once it and all before it are filled."""

    def __init__(self, start: Callable[[Bucket], None]) -> None:
        self.buckets: list[Bucket] = []
        self.next = 0  # bucket to start
        self._start = start

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Wait anew for the gradients of all parameters in `buckets`."""
        self.buckets, self.next = list(buckets), 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots)
            bucket.absent.clear()

    @property
    def is_complete(self) -> bool:
        """Whether every bucket has been started."""
        return self.next == len(self.buckets)

    def count(self, bucket: Bucket) -> bool:
        """Count one gradient that lies in its bucket; return whether that is filled now."""
        bucket.pending -= 1
        if bucket.pending:
            return False
        bucket.ready_at = time.perf_counter()
        return True

    def start_filled(self) -> None:
        """Start every bucket that is filled and whose predecessors have been started."""
        while self.next < len(self.buckets) and not self.buckets[self.next].pending:
            self._start(self.buckets[self.next])
            self.next += 1


Unused = Literal["auto", "error", "find"]


@dataclass(frozen=True, slots=True)
class ReducerSettings:
    """How gradients are reduced."""

    average: bool = True
    """Divide by the number of ranks; else the sum is left."""
    bucket_mb: float | None = None
    """Size of a bucket in MiB; by default 25, as in PyTorch's own Reducer."""
    first_bucket_mb: float = 1.0
    """Size of the first bucket, whose reduction should start early."""
    gradient_as_bucket_view: bool = True
    """Let `.grad` be the part of the bucket: nothing is copied back, and there is one set of gradients."""
    unused: Unused = "auto"
    """Parameters without a gradient: "auto" handles them, "error" names them, "find" looks for them beforehand."""
    static_graph: bool = False
    """Every step uses the same parameters equally often: those unused in the first hold up nobody later."""
    transport: TransportName = "auto"
    """How buckets travel: "shared_memory", "group" (gloo, nccl), or "auto": the first where it works."""
    timeout_seconds: float = 1800.0
    """How long to wait for another rank."""
