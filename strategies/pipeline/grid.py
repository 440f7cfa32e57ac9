"""Where the ranks of a pipeline are: stages in one direction, replicas in the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from trainkit.errors import UserError

Holders = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """One rank's place, and the groups that it talks through."""

    stages: int
    replicas: int
    stage: int
    replica: int
    pipeline: dist.ProcessGroup
    """The stages of this rank's replica."""
    copies: dist.ProcessGroup
    """This rank's stage in every replica."""

    @classmethod
    def join(cls, *, stages: int, replicas: int, limit: timedelta) -> Grid:
        """Return this rank's place; stages of one replica are neighbours. Collective over all ranks."""
        if dist.get_world_size() != stages * replicas:
            raise UserError(
                f"strategy.stages={stages} x strategy.replicas={replicas} need {stages * replicas} processes, "
                f"but there are {dist.get_world_size()}."
            )
        replica, stage = divmod(dist.get_rank(), stages)
        # Every rank makes every group, in the same order.
        pipelines = [
            dist.new_group([number * stages + other for other in range(stages)], backend="gloo", timeout=limit)
            for number in range(replicas)
        ]
        copies = [
            dist.new_group([number * stages + other for number in range(replicas)], timeout=limit)
            for other in range(stages)
        ]
        return cls(stages, replicas, stage, replica, pipelines[replica], copies[stage])

    def holder_groups(self, holders: Iterable[Holders], *, limit: timedelta) -> dict[Holders, dist.ProcessGroup]:
        """Return for each set of stages the group of them in this rank's replica. Collective over all ranks."""
        groups: dict[Holders, dist.ProcessGroup] = {}
        wanted = sorted(holders)
        for replica in range(self.replicas):
            for stages in wanted:
                group = dist.new_group([replica * self.stages + stage for stage in stages], timeout=limit)
                if replica == self.replica:
                    groups[stages] = group
        return groups
