"""Mesh of ranks: stages in one dimension, replicas in the other; its collectives and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.collectives import ProcessGroupCollectives, ReduceOp
from trainkit.distributed.failure_store import FailureStore, RankError, is_lost
from trainkit.errors import UserError, add_note

from ..own_groups import OwnGroups

T = TypeVar("T")


_OF_GLOO = re.compile(r":?\s*\[[^]]*gloo/[^]]*\].*")
"""What gloo says of a lost connection, with its own source file and line."""


class PipelineMesh:
    """Position of this rank, and the process groups along both dimensions.

    Stages of one replica have consecutive ranks. `stage` and `replica` are 0 until `join`.
    """

    def __init__(self, *, stages: int, replicas: int) -> None:
        self.stages, self.replicas = stages, replicas
        self.stage = self.replica = 0
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._own_groups = OwnGroups(timedelta())

    @property
    def timeout(self) -> timedelta:
        """Longest wait of a collective for another rank."""
        return self._own_groups.timeout

    @property
    def stage_group(self) -> dist.ProcessGroup:
        """The stages of this rank's replica (gloo)."""
        assert self._groups is not None, "the mesh is not joined"
        return self._groups[0]

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks with this stage, one in every replica."""
        assert self._groups is not None, "the mesh is not joined"
        return self._groups[1]

    def join(self, *, timeout: timedelta) -> None:
        """Create the process groups. Collective over all ranks."""
        stages, replicas = self.stages, self.replicas
        if dist.get_world_size() != stages * replicas:
            raise UserError(
                f"strategy.stages={stages} x strategy.replicas={replicas} need {stages * replicas} processes, "
                f"but there are {dist.get_world_size()}."
            )
        self._own_groups = OwnGroups(timeout)
        self.replica, self.stage = divmod(dist.get_rank(), stages)
        # Every rank creates every group, in the same order.
        stage_groups = [
            self._own_groups.new([number * stages + other for other in range(stages)], backend="gloo")
            for number in range(replicas)
        ]
        replica_groups = [
            self._own_groups.new([number * stages + other for number in range(replicas)]) for other in range(stages)
        ]
        self._groups = stage_groups[self.replica], replica_groups[self.stage]

    def leave(self, *, destroy: bool = True) -> None:
        """Leave the process groups, and end their threads; without `destroy` other ranks may still wait in them."""
        self._groups = None
        self._own_groups.leave(destroy=destroy)

    def holder_groups(self, holders: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return the group of each set of stages in this rank's replica. Collective over all ranks."""
        groups = {}
        wanted = sorted(holders)
        for replica in range(self.replicas):
            for stages in wanted:
                group = self._own_groups.new([replica * self.stages + stage for stage in stages])
                if replica == self.replica:
                    groups[stages] = group
        return groups

    def max_over_stages(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the stages of this replica, on the tensor's device. Collective."""
        on_host = tensor.detach().to("cpu", copy=True)
        dist.all_reduce(on_host, dist.ReduceOp.MAX, group=self.stage_group)
        return on_host.to(tensor.device)

    def sync_rng(self) -> None:
        """Give every stage of this replica the state of the first stage's torch generator. Collective."""
        state = torch.get_rng_state()
        dist.broadcast(state, group=self.stage_group, group_src=0)
        torch.set_rng_state(state)


class PipelineCollectives(ProcessGroupCollectives):
    """Collectives along one dimension of the mesh, or over all of it.

    `all_reduce`, metrics and predictions are those of the replicas, for this stage; `should_stop_evaluation` that of
    the stages of this replica; the others are those of `all_ranks`. `step` returns how many steps this rank has begun.
    """

    def __init__(self, all_ranks: ProcessGroupCollectives, mesh: PipelineMesh, *, step: Callable[[], int]) -> None:
        super().__init__(
            mesh.replica_group,
            device=all_ranks.device,
            timeout_seconds=all_ranks.timeout_seconds,
            step=step,
            failure_store=all_ranks.failure_store,
            consensus=all_ranks.consensus,
            process=all_ranks.process,
            num_processes=all_ranks.num_processes,
        )
        self._all_ranks = all_ranks
        self._mesh = mesh

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return tensor.detach().clone() if self.world_size == 1 else super().all_reduce(tensor, op)

    def all_gather_object(self, value: T) -> list[T]:
        return self._all_ranks.all_gather_object(value)

    def broadcast_object(self, value: T) -> T:
        return self._all_ranks.broadcast_object(value)

    def barrier(self) -> None:
        self._all_ranks.barrier()

    def any_rank(self, flag: bool) -> bool:
        return self._all_ranks.any_rank(flag)

    def should_stop_evaluation(self, requested: bool) -> bool:
        with self.waiting(self.after("the check whether to continue an evaluation")):
            return bool(self._mesh.max_over_stages(torch.tensor([int(requested)])).item())


class PipelineErrors:
    """Publisher of this rank's errors in the failure store that all ranks read; `name` is that of this rank."""

    def __init__(self, failure_store: FailureStore, *, name: str, step: Callable[[], int]):
        self._store, self._name, self._step = failure_store, name, step
        self._published: BaseException | None = None

    @contextmanager
    def published(self) -> Iterator[None]:
        """Publish an error of the block; an error caused by another rank is raised with that cause."""
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise

    def explain(self, error: Exception, *, where: str = "") -> None:
        """Publish an error and its place; raises RankError for an error caused by another rank."""
        if error is self._published or isinstance(error, RankError):
            return
        if isinstance(error, RuntimeError):
            first_line = _OF_GLOO.sub("", str(error).partition("\n")[0]) or "the connection to another rank is lost"
            if (cause := self._store.root_cause()) is not None:
                raise RankError(f"{cause}\n{self._name} stopped then: {first_line}") from None
            if is_lost(error):
                self._store.publish(f"{self._name}, in step {self._step()}: {first_line}")
                is_late = "imed out" in str(error)
                positions = f"\nposition of each rank:\n{self._store.who_waits()}" if is_late else ""
                raise RankError(first_line + positions) from None
        self._published = error
        self.publish(f"{type(error).__name__}: {error}", where=where)
        if where:
            add_note(error, f"{self._name}, {where}")

    def publish(self, why: str, *, where: str = "") -> None:
        """Publish why this rank stops; only the first message of all ranks is kept."""
        place = f", {where}" if where else ""
        self._store.publish(f"{self._name} stopped in step {self._step()}{place}: {why}")
