"""The process groups in which servers exchange parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Channels:
    """Groups of the same ranks, one for each purpose: in one group the order of collectives would depend on timing."""

    rank: int
    """This rank's place among them."""
    world_size: int
    scatter: dist.ProcessGroup | None
    """Takes gradients to the servers."""
    back: dist.ProcessGroup | None
    """Takes sums, or weights, from them."""
    flags: dist.ProcessGroup | None


def open_channels(sets: Sequence[Sequence[int]], group: dist.ProcessGroup) -> Channels | None:
    """Return the channels of the set that this rank is in, if any. Collective: every rank names the same sets."""
    found = None
    for members in sets:
        ranks = [dist.get_global_rank(group, member) for member in members]
        scatter, back, flags = (dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None for _ in range(3))
        if group.rank() in members:
            found = Channels(list(members).index(group.rank()), len(ranks), scatter, back, flags)
    return found
