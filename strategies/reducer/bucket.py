"""Bucket: gradients that are reduced together, the communication hook's view of it, and the order of launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from ..transports.process_group import PendingHook, Transport, Work
from .bucket_plan import BucketLayout, BucketPlan

Unused = Literal["auto", "error", "graph"]


@dataclass(frozen=True, slots=True)
class ReducerSettings:
    """Settings of a Reducer."""

    average: bool = True  # divide by the number of ranks; otherwise leave the sum
    bucket_cap_mb: float | None = None  # size of a bucket in MiB; `None`: 25, as in PyTorch's Reducer
    first_bucket_cap_mb: float = 1.0  # size of the first bucket in MiB, whose reduction should start early
    bucket_caps_mb: tuple[
        float, ...
    ] = ()  # instead of both: sizes of the first buckets, and the last one of all others
    gradient_as_bucket_view: bool = True  # make `.grad` a view of the bucket: one set of gradients, and no copy back
    find_unused_parameters: Unused = "auto"
    """Parameters without a gradient: "auto" handles them, "error" names them, "graph" finds them before backward."""
    static_graph: bool = False
    """Every step uses the same parameters equally often; those unused in the first step never delay a bucket."""
    timeout_seconds: float = 1800.0  # to wait for another rank


@dataclass(slots=True, eq=False)  # a comparison of fields would compare tensors, element by element
class GradientEntry:
    """One parameter: its bucket, its view of the bucket, and the progress of its gradient."""

    index: int
    name: str
    parameter: nn.Parameter
    bucket: Bucket | None = None
    view: Tensor | None = None  # None for sparse gradients, and before the buckets exist
    expected: int = 1  # firings of its hook in one backward
    remaining: int = 1
    arrived: int = 0  # position, from 1, of its last firing in the first backward; 0: its hook has not fired
    sparse_dim: int = 0
    used_this_backward: bool = False  # has gradient that is not reduced yet, also from backwards in no_sync
    accumulated: bool = False  # `.grad` holds the sum of an earlier reduction
    saved_grad: Tensor | None = None  # restored if no rank used the parameter


@dataclass(slots=True, eq=False)
class Bucket:
    """Gradients that are reduced together."""

    index: int
    layout: BucketLayout
    entries: list[GradientEntry]
    contents: Tensor | None  # flat gradients, then one flag for each parameter; None for a sparse bucket
    pending: int = 0  # entries that are not filled
    unused: list[int] = field(default_factory=list)  # positions without a gradient on this rank
    reduction: Work | None = None
    flags: Work | None = None
    pending_hook: PendingHook | None = None
    streams: set[torch.Stream] = field(default_factory=set)
    ready_at: float = 0.0  # seconds of time.perf_counter
    launched_at: float = 0.0
    finished_at: float = 0.0

    def is_done(self) -> bool:
        """Return True if the started reduction needs no more waiting; hooks are waited for after backward."""
        return self.pending_hook is None and self.reduction is not None and self.reduction.is_done()

    @property
    def flat(self) -> Tensor:
        """The gradients, one after the other: (numel,)."""
        assert self.contents is not None
        return self.contents[: self.layout.numel]

    @property
    def used_flags(self) -> Tensor:
        """For each parameter the number of ranks with a gradient, once reduced: (parameters,)."""
        assert self.contents is not None
        return self.contents[self.layout.numel :]

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients."""
        return self.layout.numel * self.entries[0].parameter.element_size()


class GradBucket:
    """The argument of a communication hook, with the methods of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket, self._is_last, self._buffer = bucket, is_last, bucket.flat

    def index(self) -> int:
        """Return the position of the bucket in the order of reductions."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Return the flat gradients, which the hook may change."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat gradients by `buffer`."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, as views of the buffer."""
        return self.gradients_in(self._buffer)

    def gradients_in(self, buffer: Tensor) -> list[Tensor]:
        """Return the views of another buffer of the same layout."""
        return _views(buffer, self._bucket.layout, [entry.parameter for entry in self._bucket.entries])

    def names(self) -> list[str]:
        """Return the names of the parameters in the order of their gradients."""
        return [entry.name for entry in self._bucket.entries]

    def parameters(self) -> list[Tensor]:
        """Return the parameters in the order of their gradients."""
        return [entry.parameter for entry in self._bucket.entries]

    def is_last(self) -> bool:
        """Return True for the last bucket of the step."""
        return self._is_last


class LaunchQueue:
    """Starts each bucket once it and all before it are filled."""

    def __init__(self, start: Callable[[Bucket], None]) -> None:
        self.buckets: list[Bucket] = []
        self.next = 0  # bucket to start
        self._start = start

    def reset(self, buckets: Sequence[Bucket]) -> None:
        """Wait for the gradients of all parameters in `buckets`."""
        self.buckets, self.next = list(buckets), 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.entries)
            bucket.unused.clear()

    @property
    def is_complete(self) -> bool:
        """True once every bucket has been started."""
        return self.next == len(self.buckets)

    def count(self, bucket: Bucket) -> bool:
        """Count one gradient that is in its bucket; return True if the bucket is filled now."""
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


def make_buckets(
    plan: BucketPlan, entries: Sequence[GradientEntry], transport: Transport, *, flags: bool
) -> list[Bucket]:
    """Return the plan's buckets in memory of the transport, and set each entry's bucket and view. Collective.

    With `flags` the gradients of a bucket are followed by one number for each of its parameters.
    """
    sizes, devices = [], []
    for layout in plan.buckets:
        # A sparse bucket needs no memory here, but transports know buckets by their position in this list.
        numel = 0 if layout.sparse else layout.numel + flags * len(layout.parameters)
        first = entries[layout.parameters[0]].parameter
        sizes.append((numel, first.dtype))
        devices.append(first.device)
    flats = transport.allocate_on(devices, sizes) if len(set(devices)) > 1 else transport.allocate(sizes)
    buckets = []
    for index, (layout, flat) in enumerate(zip(plan.buckets, flats, strict=True)):
        members = [entries[i] for i in layout.parameters]
        bucket = Bucket(index, layout, members, None if layout.sparse else flat, pending=len(members))
        views = [None] if layout.sparse else _views(flat, layout, [entry.parameter for entry in members])
        for entry, view in zip(members, views, strict=True):
            entry.bucket, entry.view = bucket, view
        buckets.append(bucket)
    return buckets


def shaped_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of `flat` with the parameter's sizes, and its strides if they are dense."""
    expected = 1  # stride of the next dimension of a dense tensor, from the inner to the outer one
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size > 1 and stride != expected:
            return flat.view(parameter.size())
        expected *= size
    return flat.as_strided(parameter.size(), parameter.stride())


def _views(flat: Tensor, layout: BucketLayout, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    pairs = zip(parameters, layout.offsets, strict=True)
    return [shaped_like(flat[offset : offset + p.numel()], p) for p, offset in pairs]
