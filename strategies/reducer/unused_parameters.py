"""Parameters without a gradient: zeros in their place, and what the first backward shows of the use of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .bucket import Bucket, GradientEntry, LaunchQueue, ReducerSettings
from .bucket_plan import DEFAULT_CAP_BYTES, MIB, BucketPlan, GradientSpec, plan_buckets

HIDING_NODE = "CheckpointFunctionBackward"  # of reentrant checkpoints; it computes the graph inside it in backward


class BucketFiller:
    """Puts the gradients of one rank into its buckets, multiplied by `scale`."""

    def __init__(self, *, scale: float, as_view: bool) -> None:
        self.scale = scale
        self.as_view = as_view

    def fill(self, entry: GradientEntry) -> None:
        """Leave the parameter's gradient in its bucket, scaled; zeros if it has none."""
        gradient, view = entry.parameter.grad, entry.view
        if gradient is None:  # its hook fired with an undefined gradient
            assert entry.bucket is not None
            self.add_zeros(entry, entry.bucket)
            return
        # With create_graph=True it has a graph, of which the bucket must not become a part.
        gradient = gradient.detach()
        with torch.no_grad():
            if view is None:
                entry.sparse_dim = gradient.sparse_dim()
                if self.scale != 1.0:
                    entry.parameter.grad = gradient * self.scale
                return
            torch.mul(gradient, self.scale, out=view) if self.scale != 1.0 else view.copy_(gradient)
        if self.as_view:
            entry.parameter.grad = view

    def move_into_bucket(self, entry: GradientEntry) -> None:
        """Make a gradient that is only accumulated a view of its bucket, unscaled."""
        gradient, view = entry.parameter.grad, entry.view
        # With a graph it stays as it is: the user may differentiate through it.
        if not self.as_view or gradient is None or view is None or gradient is view or gradient.requires_grad:
            return
        view.copy_(gradient)
        entry.parameter.grad = view

    def add_zeros(
        self, entry: GradientEntry, bucket: Bucket, *, saved_grad: Tensor | None = None, is_shadow: bool = False
    ) -> None:
        """Mark the parameter as unused by this rank; `saved_grad` is restored if no rank uses it.

        A gradient from before is added to the reduction again, unless this rank is a shadow of the others' backward.
        """
        gradient, view = entry.parameter.grad, entry.view
        bucket.unused.append(bucket.entries.index(entry))
        entry.saved_grad = saved_grad  # only the reduced flags tell if any rank uses it
        if view is None:
            return
        if gradient is None or is_shadow:
            view.zero_()  # it still holds the sum of the last step
        elif gradient is not view:
            torch.mul(gradient, self.scale, out=view)
        elif self.scale != 1.0:
            view.mul_(self.scale)


class UnusedParameters:
    """Fills the entries of parameters whose hooks do not fire, or less often than expected.

    `accumulated_divisor` is the number of ranks that add up the sum of an earlier reduction again; 1 if ranks take
    means, since the mean of equal gradients is that gradient.
    """

    def __init__(
        self, entries: Sequence[GradientEntry], *, filler: BucketFiller, queue: LaunchQueue, accumulated_divisor: int
    ) -> None:
        self.entries, self.filler, self.queue = entries, filler, queue
        self.accumulated_divisor = accumulated_divisor
        self.statically_unused: list[int] = []  # by this rank, in a static graph
        self.is_shadow = False  # this rank only takes part in the backward of the others
        self.marked_unused: set[int] = set()  # in the backward under way, and not filled yet
        self._undivided: dict[int, Tensor] = {}  # earlier sums by index of the parameter

    def start(self) -> None:
        """Prepare for a backward; the buckets exist."""
        self.marked_unused = set(self.statically_unused)
        # Other ranks use these, so their buckets cannot be without them: no hook of this rank counts them down.
        for index in self.statically_unused:
            self.entries[index].remaining = 1  # until it is filled with zeros
        self.pre_divide_accumulated()

    def finish(self) -> None:
        """Clear the state of one backward."""
        self.marked_unused.clear()
        self._undivided.clear()

    def pre_divide_accumulated(self) -> None:
        """Divide sums of an earlier reduction that are still in `.grad`: ranks will add them up again."""
        if self.accumulated_divisor == 1:
            return
        for entry in self.entries:
            if entry.accumulated:
                entry.accumulated = False  # a second no_sync, or the session after it, must not divide again
                gradient = entry.parameter.grad
                if gradient is not None:
                    # Divided and added up again it might differ in the last bit.
                    self._undivided[entry.index] = gradient.clone()
                    gradient.mul_(1.0 / self.accumulated_divisor)

    def fill_unused(self) -> None:
        """Fill the entries that are marked as unused."""
        for index in sorted(self.marked_unused):
            entry = self.entries[index]
            if entry.remaining:
                self.fill(entry)
        self.marked_unused.clear()

    def fill(self, entry: GradientEntry) -> None:
        """Fill an entry whose hook will not fire again, with its accumulated gradient or with zeros."""
        bucket = entry.bucket
        assert bucket is not None
        entry.remaining = 0
        if entry.used_this_backward:  # in a backward without sync, or less often than expected
            self.filler.fill(entry)
        else:
            gradient, saved_grad = entry.parameter.grad, self._undivided.get(entry.index)
            if gradient is not None and saved_grad is None:
                saved_grad = gradient.clone()  # `.grad` may be the view that the reduction overwrites
            self.filler.add_zeros(entry, bucket, saved_grad=saved_grad, is_shadow=self.is_shadow)
        self.queue.count(bucket)


class FirstBackwardStats:
    """Records the arrival of gradients until the ranks take rank 0's order."""

    def __init__(self, entries: Sequence[GradientEntry], *, settings: ReducerSettings) -> None:
        self.entries, self.settings = entries, settings
        self.num_fired = 0  # hooks, over all parameters
        self.fires = [0] * len(entries)
        self.statically_unused: list[int] = []  # by this rank, in a static graph, while others use them

    def reset(self) -> None:
        """Discard a backward that did not complete."""
        self.num_fired, self.fires = 0, [0] * len(self.entries)
        for entry in self.entries:
            entry.arrived = 0

    def record(self, entry: GradientEntry) -> int:
        """Record that the hook of a parameter fired; return its number of firings."""
        self.num_fired += 1
        self.fires[entry.index] += 1
        entry.arrived = self.num_fired
        return self.fires[entry.index]

    def unused(self) -> list[GradientEntry]:
        """Return the parameters without a gradient."""
        return [entry for entry in self.entries if not entry.arrived and not entry.used_this_backward]

    def make_plan(self, group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
        """Return the plan in rank 0's order of arrival, and set the expected firings of each entry. Collective.

        Parameters unused by rank 0 come last, in reverse order.
        """
        # Only a gradient shows that it is sparse: a rank without one learns it from the others, by the maximum.
        for entry in self.entries:
            gradient = entry.parameter.grad
            if gradient is not None and gradient.is_sparse:
                entry.sparse_dim = gradient.sparse_dim()
        arrived = [entry.arrived for entry in self.entries]  # positions from 1 on, 0 without a gradient
        of_first = torch.tensor(arrived, device=device)
        of_any = torch.tensor([arrived, [entry.sparse_dim for entry in self.entries]], device=device)
        if group.size() > 1:  # ranks may take different paths through the model, so one of them decides
            dist.broadcast(of_first, dist.get_global_rank(group, 0), group=group)
            dist.all_reduce(of_any, dist.ReduceOp.MAX, group=group)
        first, (any_rank, sparse_dims) = of_first.tolist(), of_any.tolist()
        for entry, sparse_dim, fires in zip(self.entries, sparse_dims, self.fires, strict=True):
            entry.sparse_dim = sparse_dim
            entry.expected = fires if self.settings.static_graph and self.num_fired else max(1, fires)
        unused = {index for index, position in enumerate(first) if position == 0}
        if self.settings.static_graph:
            unused = {index for index, position in enumerate(any_rank) if position == 0}
            for index in unused:
                self.entries[index].expected = 0
            self.statically_unused = [e.index for e in self.entries if e.expected == 0 and e.index not in unused]
        # From reduced numbers only: every rank sorts the same, or buckets would differ between ranks.
        order = sorted(range(len(first)), key=lambda index: (first[index] == 0, first[index], -index))
        return make_plan(self.entries, settings=self.settings, order=order, apart=unused)


def make_plan(
    entries: Sequence[GradientEntry],
    *,
    settings: ReducerSettings,
    order: Sequence[int] | None = None,
    apart: Iterable[int] = (),
) -> BucketPlan:
    """Return the plan for the entries' parameters; `order` and `apart` as in `plan_buckets`."""
    specs = [
        GradientSpec(p.numel(), p.element_size(), f"{p.dtype} {p.device}", bool(entry.sparse_dim))
        for entry, p in ((entry, entry.parameter) for entry in entries)
    ]
    return plan_buckets(
        specs,
        cap_bytes=DEFAULT_CAP_BYTES if settings.bucket_cap_mb is None else int(settings.bucket_cap_mb * MIB),
        first_cap_bytes=int(settings.first_bucket_cap_mb * MIB),
        caps_bytes=[int(cap * MIB) for cap in settings.bucket_caps_mb],
        order=order,
        apart=apart,
    )


def unreached_parameters(outputs: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return the indices of parameters that get no gradient from `outputs`, found by a walk over the autograd graph.

    Empty with a reentrant checkpoint, which hides the graph behind it.
    """
    # Ids and nodes stay unique during the walk: `outputs` holds the whole graph.
    outputs = list(outputs)
    reached = {id(output) for output in outputs if output.is_leaf and output.requires_grad}  # outputs themselves
    seen: set[Any] = {None}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == HIDING_NODE:
            return []
        variable = getattr(node, "variable", None)  # on AccumulateGrad nodes only
        if variable is not None:
            reached.add(id(variable))
        waiting.extend(parent for parent, _ in node.next_functions)
    return [index for index, parameter in enumerate(parameters) if id(parameter) not in reached]
