"""Mesh of ranks: stages in one dimension, replicas in the other; its collectives and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.collectives import ProcessGroupCollectives, ReduceOp
from trainkit.distributed.failure_store import FailureStore, RankError, is_lost
from trainkit.errors import UserError

from ...transports.hosts import HostLayout, OwnGroups, host_name
from ..plan.traffic import Placing, rank_grid
from .communication import Lane

T = TypeVar("T")


# Removed from messages: users can do nothing with a line of gloo's C++ code.
_OF_GLOO = re.compile(r":?\s*\[[^]]*gloo/[^]]*\].*")
"""Text of gloo about a lost connection, with a source file and line of gloo."""


class PipelineMesh:
    """Position of this rank, and the process groups along both dimensions.

    Stages of one replica have consecutive ranks, unless several hosts are placed otherwise. `stage` and `replica` are 0
    until `join`.
    """

    def __init__(self, *, stages: int, replicas: int, placement: Literal["auto"] | Placing = "auto") -> None:
        self.stages, self.replicas = stages, replicas
        self.placement = placement
        self.stage = self.replica = 0
        self.placed: Placing = "cluster"
        """The present placement; for `auto` it is `cluster` until ranks are placed by what the task sends."""
        self.grid = [[replica * stages + stage for stage in range(stages)] for replica in range(replicas)]
        """The rank of each stage of each replica."""
        self.hosts = HostLayout((tuple(range(stages * replicas)),))
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
        # With one stage or one replica all placements are the same, and hosts need not be known.
        if stages > 1 and replicas > 1:
            names: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(names, host_name())
            self.hosts = HostLayout.of(names)
        self.placed = "cluster"
        if self.placement != "auto":
            self.placed = self.placement
            self.grid = self._grid(self.placed)
        self._create_groups()

    @property
    def has_choice(self) -> bool:
        """True if the placement decides what is sent between hosts, whose ranks follow each other."""
        ranks = [rank for host_ranks in self.hosts.ranks for rank in host_ranks]
        # `rank_grid` can refuse hosts whose ranks alternate: a choice that may raise is none.
        return len(self.hosts.ranks) > 1 and self.stages > 1 and self.replicas > 1 and ranks == sorted(ranks)

    def placement_of(self, grid: list[list[int]] | None) -> Placing | None:
        """Return the placement by which these hosts have the grid; `None` if there is none."""
        placements: tuple[Placing, Placing] = ("cluster", "spread")
        return next((candidate for candidate in placements if self._grid(candidate) == grid), None)

    def _grid(self, placement: Placing) -> list[list[int]]:
        return rank_grid(self.hosts, stages=self.stages, replicas=self.replicas, placement=placement)

    def place(self, placement: Placing) -> None:
        """Place the ranks otherwise, in new process groups. Collective over all ranks."""
        self.leave()  # the threads and connections of groups that nobody would use
        self.placed = placement
        self.grid = self._grid(placement)
        self._create_groups()

    def _create_groups(self) -> None:
        self.replica, self.stage = self.position(dist.get_rank())
        # Every rank creates every group, in the same order: `new_group` waits for all ranks, members or not.
        # Stages use gloo, which alone has tags; lanes of NCCL come later.
        stage_groups = [self._own_groups.new(ranks, backend="gloo") for ranks in self.grid]
        backend, columns = backend_with_host(dist.get_backend_config()), zip(*self.grid, strict=True)
        # Gradients are summed on the device, but `prepare` broadcasts parameters that are still in host memory.
        replica_groups = [self._own_groups.new(ranks, backend=backend) for ranks in columns]
        self._groups = stage_groups[self.replica], replica_groups[self.stage]

    def position(self, rank: int) -> tuple[int, int]:
        """Return the replica and the stage of a rank."""
        return next((replica, ranks.index(rank)) for replica, ranks in enumerate(self.grid) if rank in ranks)

    def leave(self, *, destroy: bool = True) -> None:
        """Leave the process groups, and end their threads; without `destroy` other ranks may still wait in them."""
        self._groups = None
        self._own_groups.leave(destroy=destroy)

    def holder_groups(self, holders: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return the group of each set of stages in this rank's replica. Collective over all ranks."""
        groups = {}
        # Sorted, and for all replicas: ranks that make groups in different orders wait for each other forever.
        wanted = sorted(holders)
        for replica in range(self.replicas):
            for stages in wanted:
                group = self._own_groups.new([self.grid[replica][stage] for stage in stages])
                if replica == self.replica:
                    groups[stages] = group
        return groups

    def lane_groups(self, lanes: Iterable[Lane], *, backend: str) -> dict[Lane, dist.ProcessGroup]:
        """Return the group of each lane that begins or ends at this rank. Collective over all ranks."""
        groups = {}
        # Sorted, since `lanes` is a set of tuples with text, whose order differs from process to process.
        wanted = sorted(lanes)
        for replica, ranks in enumerate(self.grid):
            for lane in wanted:
                group = self._own_groups.new([ranks[stage] for stage in lane.ranks], backend=backend)
                if replica == self.replica and self.stage in lane.ranks:
                    groups[lane] = group
        return groups

    def max_over_stages(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the stages of this replica, on the tensor's device. Collective."""
        on_host = tensor.detach().to("cpu", copy=True)  # the reduction writes to it, and the group is one of gloo
        dist.all_reduce(on_host, dist.ReduceOp.MAX, group=self.stage_group)
        return on_host.to(tensor.device)

    def sync_rng(self) -> None:
        """Give every stage of this replica the state of the first stage's torch generator. Collective."""
        # Each step draws its seed from this generator. With other seeds stages would compute other values for the nodes
        # that each of them runs, such as random masks of the batch alone.
        state = torch.get_rng_state()
        dist.broadcast(state, group=self.stage_group, group_src=0)
        torch.set_rng_state(state)


def backend_with_host(configured: str) -> str | None:
    """Return the backend of groups that also broadcast tensors in host memory; `None` if `configured` is one."""
    return None if "cpu:" in configured else f"cpu:gloo,{configured}"


class PipelineCollectives(ProcessGroupCollectives):
    """Collectives along one dimension of the mesh, or over all of it.

    `all_reduce`, metrics and predictions are those of the replicas, for this stage; `should_stop_evaluation` that of
    the stages of this replica; the others are those of `all_ranks`. `step` returns how many steps this rank has begun.
    """

    def __init__(self, all_ranks: ProcessGroupCollectives, mesh: PipelineMesh, *, step: Callable[[], int]) -> None:
        # Rank and world size are those of replicas, which divide the samples; the process is one of all ranks, so that
        # a single one writes files.
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
        # A copy even without other replicas: callers may write to the result.
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
        # Stages evaluate the same batches and must end after the same one; other replicas may have fewer batches.
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
        # An error passes here twice, in the action and in the step; a RankError is the consequence of another rank's.
        if error is self._published or isinstance(error, RankError):
            return
        if isinstance(error, RuntimeError):
            first_line = _OF_GLOO.sub("", str(error).partition("\n")[0]) or "the connection to another rank is lost"
            # Before the text is looked at: a rank that fails closes its connections, and so breaks those to this one.
            if (cause := self._store.root_cause()) is not None:
                raise RankError(f"{cause}\n{self._name} stopped then: {first_line}") from None
            if is_lost(error):
                self._store.publish(f"{self._name}, in step {self._step()}: {first_line}")
                # A rank that is late can still answer where it is; one that is gone cannot, and asking takes seconds.
                is_late = "imed out" in str(error)
                positions = f"\nposition of each rank:\n{self._store.who_waits()}" if is_late else ""
                raise RankError(first_line + positions) from None
        self._published = error
        self.publish(f"{type(error).__name__}: {error}", where=where)
        if where:
            error.add_note(f"{self._name}, {where}")

    def publish(self, why: str, *, where: str = "") -> None:
        """Publish why this rank stops; only the first message of all ranks is kept."""
        suffix = f", {where}" if where else ""
        self._store.publish(f"{self._name} stopped in step {self._step()}{suffix}: {why}")
