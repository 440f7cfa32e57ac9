"""What the first backward shows: in which order gradients arrive, and how often the hook of each parameter fires."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .buckets import DEFAULT_CAP_BYTES, MIB, BucketPlan, GradientSpec, plan_buckets
from .gradient_bucket import Slot
from .reducer_settings import ReducerSettings


@dataclass(frozen=True, slots=True)
class GradientOrder:
    """The order of arrival in the first backward, known to all ranks."""

    order: list[int]
    """Rank 0's order of arrival; parameters that it has not seen come last, in the reverse order of their own."""
    unseen_by_first: set[int]
    """Parameters that rank 0 has not seen."""
    unseen_by_all: set[int]
    """Parameters that no rank has seen."""
    sparse_dims: list[int]
    """For each parameter its gradient's sparse dimensions on any rank, 0 if it is dense."""


class FirstBackward:
    """Notes the arrival of gradients until the ranks agree on rank 0's order."""

    def __init__(self, slots: Sequence[Slot], *, settings: ReducerSettings) -> None:
        self.slots, self.settings = slots, settings
        self.moments = 0  # firings so far
        self.fires = [0] * len(slots)
        self.unused_here: list[int] = []  # in a static graph: by this rank, while others use them

    def restart(self) -> None:
        """Forget a backward that did not reach its end."""
        self.moments, self.fires = 0, [0] * len(self.slots)
        for slot in self.slots:
            slot.arrived = 0

    def note(self, slot: Slot) -> int:
        """Note that the hook of a parameter fired; return how often it has."""
        self.moments += 1
        self.fires[slot.index] += 1
        slot.arrived = self.moments
        return self.fires[slot.index]

    def absent(self) -> list[Slot]:
        """Return the parameters without a gradient."""
        return [slot for slot in self.slots if not slot.arrived and not slot.touched]

    def agree(self, group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
        """Return the plan in rank 0's order of arrival, and leave in each slot what to expect. Collective."""
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient.is_sparse:
                slot.sparse_dim = gradient.sparse_dim()
        moments, sparse_dims = [slot.arrived for slot in self.slots], [slot.sparse_dim for slot in self.slots]
        arrivals = exchange_arrivals(moments, sparse_dims, group, device)
        for slot, sparse_dim, fires in zip(self.slots, arrivals.sparse_dims, self.fires, strict=True):
            slot.sparse_dim = sparse_dim
            slot.expected = fires if self.settings.static_graph and self.moments else max(1, fires)
        unseen = arrivals.unseen_by_first
        if self.settings.static_graph:
            unseen = arrivals.unseen_by_all
            for index in unseen:
                self.slots[index].expected = 0
            self.unused_here = [s.index for s in self.slots if s.expected == 0 and s.index not in unseen]
        return plan_of(self.slots, settings=self.settings, order=arrivals.order, apart=unseen)


def plan_of(
    slots: Sequence[Slot],
    *,
    settings: ReducerSettings,
    order: Sequence[int] | None = None,
    apart: Iterable[int] = (),
) -> BucketPlan:
    """Return the buckets of the slots' parameters; `order` and `apart` as in `plan_buckets`."""
    specs = [
        GradientSpec(p.numel(), p.element_size(), f"{p.dtype} {p.device}", bool(slot.sparse_dim))
        for slot, p in ((slot, slot.parameter) for slot in slots)
    ]
    return plan_buckets(
        specs,
        cap_bytes=DEFAULT_CAP_BYTES if settings.bucket_mb is None else int(settings.bucket_mb * MIB),
        first_cap_bytes=int(settings.first_bucket_mb * MIB),
        order=order,
        apart=apart,
    )


def exchange_arrivals(
    arrived: Sequence[int], sparse_dims: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> GradientOrder:
    """Return what the ranks have seen together. Collective.

    `arrived` holds for each parameter the moment at which its gradient was ready, 0 if it never was; the sparse
    dimensions are 0 for dense gradients.
    """
    of_first = torch.tensor(list(arrived), dtype=torch.int64, device=device)
    of_any = torch.tensor([list(arrived), list(sparse_dims)], dtype=torch.int64, device=device)
    if group.size() > 1:
        dist.broadcast(of_first, dist.get_global_rank(group, 0), group=group)
        dist.all_reduce(of_any, dist.ReduceOp.MAX, group=group)
    known, (known_to_any, sparse) = of_first.tolist(), of_any.tolist()
    count = len(known)
    return GradientOrder(
        order=sorted(range(count), key=lambda i: (known[i] == 0, known[i], -i)),
        unseen_by_first={i for i in range(count) if known[i] == 0},
        unseen_by_all={i for i in range(count) if known_to_any[i] == 0},
        sparse_dims=sparse,
    )
