"""The ranks of a pipeline: stages that share one copy of the task, in as many replicas, and their collectives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.precision import Precision

from ..ddp.agreement import gather
from ..ddp.failure import StoreBoard
from ..process_group import ProcessGroupStrategy
from .arguments import checked_count
from .failures import Failures
from .grid import Grid

T = TypeVar("T")


class StagedRanks(ProcessGroupStrategy):
    """Ranks of which each is one stage of one replica.

    Args:
        stages: Processes that share one copy of the task.
        replicas: Copies that train on different samples.
        settings: Those of any strategy over a process group.

    """

    def __init__(self, *, stages: int, replicas: int, **settings: Any) -> None:
        super().__init__(**settings)
        for name, value in (("stages", stages), ("replicas", replicas)):
            checked_count(name, value)
        self.stages = stages
        self.replicas = replicas
        self.stage = 0
        self._grid: Grid | None = None
        self._failures: Failures | None = None

    def num_ranks(self) -> int:
        """Return the number of processes: one for each stage of each replica."""
        return self.stages * self.replicas

    def name_of_process(self, process: int) -> str:
        """Return what to call a process in messages: its stage says more than its rank."""
        replica, stage = divmod(process, self.stages)
        return f"rank {process}, stage {stage} of replica {replica}"

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that have copies of this rank's part: the same stage of every replica."""
        return super().group if self._grid is None else self._grid.copies

    @property
    def process(self) -> int:
        """Stages of one replica are neighbours."""
        return self.rank * self.stages + self.stage

    @property
    def num_processes(self) -> int:
        return self.replicas * self.stages

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user: the first stage of the first replica."""
        return self.rank == 0 and self.stage == 0

    def setup(self, precision: Precision) -> None:
        """Join the other ranks, and find this rank's stage and replica; collective."""
        super().setup(precision)
        grid = Grid.join(stages=self.stages, replicas=self.replicas, limit=self._limit)
        self._grid, self.rank, self.stage, self.world_size = grid, grid.replica, grid.stage, self.replicas
        self._failures = Failures(
            self._board or StoreBoard(grid.pipeline, token="pipeline"),
            name=f"stage {self.stage} of replica {self.rank}",
            step=lambda: max(self._steps - 1, 0),
        )

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout_seconds)

    def _told(self) -> AbstractContextManager[None]:
        assert self._failures is not None
        return self._failures.told()

    def tell_failure(self, why: str) -> None:
        """Let the other ranks know that this one stops."""
        if self._failures is not None:
            self._failures.tell(why)

    def teardown(self) -> None:
        """Leave the other ranks and release what was acquired; may be called twice."""
        self._grid = None
        super().teardown()

    # ---- Talking to the other ranks: those of other replicas, unless it says otherwise

    @property
    def _stage_group(self) -> dist.ProcessGroup:
        """The stages of this rank's replica."""
        assert self._grid is not None
        return self._grid.pipeline

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Return the reduction of `tensor` over replicas; collective."""
        return tensor.detach().clone() if self.replicas == 1 else super().all_reduce(tensor, op)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the value of each process, of any stage and replica; collective."""
        with self._waiting(self._after("an all_gather")):
            return gather(value, self._ranks)

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value, on every stage of every replica; collective."""
        box: list[Any] = [value]
        with self._waiting(self._after("a broadcast")):
            dist.broadcast_object_list(box, src=0)
        received: T = box[0]
        return received

    def barrier(self) -> None:
        """Return when every rank, of any stage and replica, has come here; collective."""
        with self._waiting(self._after("a barrier")):
            dist.barrier()

    def agree(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank, of any stage and replica; collective."""
        found = torch.tensor([int(flag)], device=self.device)
        with self._waiting(self._after("an agreement")):
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def stop_evaluating(self, requested: bool) -> bool:
        """Return whether a stage of this replica was asked to stop, so that none leaves the others in a batch."""
        found = torch.tensor([int(requested)])
        with self._waiting(self._after("the agreement whether to go on evaluating")):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._stage_group)
        return bool(found.item())

    def _agree_on_overflow(self, found: Tensor) -> Tensor:
        on_host = found.cpu()
        dist.all_reduce(on_host, dist.ReduceOp.MAX, group=self._stage_group)
        return on_host.to(found.device)
