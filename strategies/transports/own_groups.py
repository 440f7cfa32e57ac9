"""OwnGroups: the process groups that a strategy makes beside the one of all ranks, and destroys at its end."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


class OwnGroups:
    """Process groups in which a wait for another rank ends after `timeout`."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._groups: list[dist.ProcessGroup] = []  # with this rank

    def new(self, ranks: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
        """Return a new group of these ranks of all. Collective over all ranks, which make all groups in one order."""
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=self.timeout)
        if dist.get_rank() in ranks:
            self._groups.append(group)
        return group

    def new_of_sets(
        self, sets: Sequence[Sequence[int]], group: dist.ProcessGroup, *, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Make a new group of each set of ranks of `group`, and return the one with this rank, if any. Collective."""
        local_group = None
        # Every rank makes the groups of all sets: torch numbers groups by the calls, which must be the same everywhere.
        for members in sets:
            made = self.new([dist.get_global_rank(group, member) for member in members], backend=backend)
            local_group = made if group.rank() in members else local_group
        return local_group

    def leave(self, *, destroy: bool = True) -> None:
        """Leave the groups, and end their threads; without `destroy` other ranks may still wait in them."""
        groups, self._groups = self._groups, []
        if not groups:
            return
        while groups and destroy:
            # Popped in the call, so that no reference here outlives the group.
            dist.destroy_process_group(groups.pop())
        groups.clear()
        gc.collect()  # threads end with the last reference
