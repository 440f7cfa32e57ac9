"""What a rank adds for parameters that get no gradient in a backward, so that their buckets can go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .bucket import Bucket, GradientEntry, LaunchQueue, ReducerSettings
from .bucket_plan import DEFAULT_CAP_BYTES, MIB, BucketPlan, GradientSpec, plan_buckets


class BucketFiller:
    """Puts the gradients of one rank into its buckets."""

    def __init__(self, *, scale: float, as_view: bool) -> None:
        self.scale = scale  # by which each gradient is multiplied on its way
        self.as_view = as_view

    def fill(self, slot: GradientEntry) -> None:
        """Leave the parameter's gradient in its bucket, scaled; where there is none, add nothing."""
        gradient, view = slot.parameter.grad, slot.view
        if gradient is None:  # its hook fired with an undefined gradient
            assert slot.bucket is not None
            self.add_zeros(slot, slot.bucket, kept=None)
            return
        gradient = gradient.detach()
        with torch.no_grad():
            if view is None:
                slot.sparse_dim = gradient.sparse_dim()
                if self.scale != 1.0:
                    slot.parameter.grad = gradient * self.scale
                return
            torch.mul(gradient, self.scale, out=view) if self.scale != 1.0 else view.copy_(gradient)
        if self.as_view:
            slot.parameter.grad = view

    def move(self, slot: GradientEntry) -> None:
        """Let a gradient that was only added up lie in its bucket, unscaled."""
        gradient, view = slot.parameter.grad, slot.view
        if not self.as_view or gradient is None or view is None or gradient is view or gradient.requires_grad:
            return
        view.copy_(gradient)
        slot.parameter.grad = view

    def add_zeros(self, slot: GradientEntry, bucket: Bucket, *, kept: torch.Tensor | None, zeros: bool = False) -> None:
        """Let this rank use the parameter not at all: a gradient from before is added again, and given back as `kept`.

        With `zeros` it is not even added: this rank only stands in for the others' backward.
        """
        gradient, view = slot.parameter.grad, slot.view
        bucket.absent.append(bucket.slots.index(slot))
        slot.kept = kept
        if view is None:
            return
        if gradient is None or zeros:
            view.zero_()
        elif gradient is not view:
            torch.mul(gradient, self.scale, out=view)
        elif self.scale != 1.0:
            view.mul_(self.scale)


class UnusedParameters:
    """Fills the places of parameters whose hooks will not fire, or not as often as expected.

    Args:
        slots: All parameters.
        filling: Puts gradients into buckets.
        queue: Counts the places that are filled.
        divide_carried_by: Ranks that will add up again what is left of an earlier sum; 1 where they take means, as the
            mean of equal gradients is that gradient.

    """

    def __init__(
        self, slots: Sequence[GradientEntry], *, filling: BucketFiller, queue: LaunchQueue, divide_carried_by: int
    ) -> None:
        self.slots, self.filling, self.queue = slots, filling, queue
        self.divide_carried_by = divide_carried_by
        self.never: list[int] = []  # parameters that a static graph does not use on this rank
        self.is_shadow = False  # this rank only takes part in the backward of the others
        self._marked: set[int] = set()  # known not to take part, and not filled yet
        self._undivided: dict[int, Tensor] = {}  # earlier sums of parameters by index, see `pre_divide_accumulated`

    def begin(self) -> None:
        """Expect a backward into buckets that are there."""
        self._marked = set(self.never)
        for index in self.never:
            self.slots[index].remaining = 1  # until its place is filled with nothing
        self.pre_divide_accumulated()

    def mark(self, unused: Iterable[int]) -> None:
        """Know of parameters that will take no part."""
        self._marked.update(unused)

    def end(self) -> None:
        """Forget what was known of one backward."""
        self._marked.clear()
        self._undivided.clear()

    def pre_divide_accumulated(self) -> None:
        """Divide sums of an earlier reduction that are still in `.grad`: they will be added up over ranks again."""
        if self.divide_carried_by == 1:
            return
        for slot in self.slots:
            if slot.carried:
                slot.carried = False
                gradient = slot.parameter.grad
                if gradient is not None:
                    self._undivided[slot.index] = gradient.clone()
                    gradient.mul_(1.0 / self.divide_carried_by)

    def fill_unused(self) -> None:
        """Fill the places of parameters that are known to take no part."""
        for index in sorted(self._marked):
            slot = self.slots[index]
            if slot.remaining:
                self.fill(slot)
        self._marked.clear()

    def fill(self, slot: GradientEntry) -> None:
        """Add what a parameter has whose hook will not fire: what was accumulated before, or nothing."""
        bucket = slot.bucket
        assert bucket is not None
        slot.remaining = 0
        if slot.touched:
            self.filling.fill(slot)
        else:
            self._fill_with_nothing(slot, bucket)
        self.queue.count(bucket)

    def _fill_with_nothing(self, slot: GradientEntry, bucket: Bucket) -> None:
        """Let this rank add nothing to the gradient of a parameter; a gradient from before is kept."""
        gradient, kept = slot.parameter.grad, None
        if gradient is not None:
            undivided = self._undivided.get(slot.index)
            kept = gradient.clone() if undivided is None else undivided
        self.filling.add_zeros(slot, bucket, kept=kept, zeros=self.is_shadow)


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


class FirstBackwardStats:
    """Notes the arrival of gradients until the ranks agree on rank 0's order."""

    def __init__(self, slots: Sequence[GradientEntry], *, settings: ReducerSettings) -> None:
        self.slots, self.settings = slots, settings
        self.moments = 0  # firings so far
        self.fires = [0] * len(slots)
        self.unused_here: list[int] = []  # in a static graph: by this rank, while others use them

    def restart(self) -> None:
        """Forget a backward that did not reach its end."""
        self.moments, self.fires = 0, [0] * len(self.slots)
        for slot in self.slots:
            slot.arrived = 0

    def note(self, slot: GradientEntry) -> int:
        """Note that the hook of a parameter fired; return how often it has."""
        self.moments += 1
        self.fires[slot.index] += 1
        slot.arrived = self.moments
        return self.fires[slot.index]

    def absent(self) -> list[GradientEntry]:
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
    slots: Sequence[GradientEntry],
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
