"""The ranks of a pipeline: stages that share one copy of the task, in as many replicas, and their collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.collectives import ProcessGroupCollectives, ReduceOp
from trainkit.distributed.failure_store import FailureStore
from trainkit.precision import Precision
from trainkit.strategy import PhaseTraining

from ..process_group import MultiProcessStrategy
from .arguments import checked_count
from .failures import Failures
from .grid import Grid

T = TypeVar("T")


class StagedRanks(PhaseTraining, MultiProcessStrategy):
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

    def rank_name(self, process: int) -> str:
        """Return the name of a process in messages, with its stage."""
        replica, stage = divmod(process, self.stages)
        return f"rank {process}, stage {stage} of replica {replica}"

    def setup(self, precision: Precision) -> None:
        """Join the other ranks, and find this rank's stage and replica; collective."""
        super().setup(precision)
        grid = Grid.join(stages=self.stages, replicas=self.replicas, limit=self._limit)
        self._grid, self.stage = grid, grid.stage
        self.comm = PipelineCollectives(self.comm, grid, step=lambda: self._steps)
        self._failures = Failures(
            self.comm.failure_store or FailureStore(grid.pipeline, token="pipeline"),
            name=f"stage {self.stage} of replica {grid.replica}",
            step=lambda: max(self._steps - 1, 0),
        )

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.ranks.timeout_seconds)

    def _told(self) -> AbstractContextManager[None]:
        assert self._failures is not None
        return self._failures.told()

    def publish_failure(self, why: str) -> None:
        """Let the other ranks know that this one stops."""
        if self._failures is not None:
            self._failures.tell(why)

    def teardown(self) -> None:
        """Leave the other ranks and release what was acquired; may be called twice."""
        self._grid = None
        super().teardown()

    @property
    def _stage_group(self) -> dist.ProcessGroup:
        """The stages of this rank's replica."""
        assert self._grid is not None
        return self._grid.pipeline

    def _agree_on_overflow(self, found: Tensor) -> Tensor:
        on_host = found.cpu()
        dist.all_reduce(on_host, dist.ReduceOp.MAX, group=self._stage_group)
        return on_host.to(found.device)


class PipelineCollectives(ProcessGroupCollectives):
    """Collectives of the stages of one replica and of the replicas of one stage.

    `all_reduce`, metrics and predictions go over the replicas of this stage; the rest over every process.
    """

    def __init__(self, everyone: ProcessGroupCollectives, grid: Grid, *, step: Callable[[], int]) -> None:
        super().__init__(
            grid.copies,
            device=everyone.device,
            timeout_seconds=everyone.timeout_seconds,
            step=step,
            failure_store=everyone.failure_store,
            consensus=everyone.consensus,
            process=grid.replica * grid.stages + grid.stage,
            num_processes=everyone.num_processes,
        )
        self._everyone = everyone
        self._pipeline = grid.pipeline

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return tensor.detach().clone() if self.world_size == 1 else super().all_reduce(tensor, op)

    def all_gather_object(self, value: T) -> list[T]:
        return self._everyone.all_gather_object(value)

    def broadcast_object(self, value: T) -> T:
        return self._everyone.broadcast_object(value)

    def barrier(self) -> None:
        self._everyone.barrier()

    def any_rank(self, flag: bool) -> bool:
        return self._everyone.any_rank(flag)

    def should_stop_evaluation(self, requested: bool) -> bool:
        found = torch.tensor([int(requested)])
        with self.waiting(self.after("the check whether to continue an evaluation")):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._pipeline)
        return bool(found.item())
