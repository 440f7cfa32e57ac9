"""Mesh of ranks: stages in one dimension, replicas in the other."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.errors import UserError

from ..ddp.failure import RankError, StoreBoard, is_lost

logger = logging.getLogger(__name__)

Holders = tuple[int, ...]


class PipelineMesh:
    """Coordinates of this rank, and the process groups along both dimensions.

    Stages of one replica have consecutive ranks. `stage` and `replica` are 0 until `join`.

    Args:
        stages: Ranks that share one copy of the task.
        replicas: Copies that train on different samples.

    """

    def __init__(self, *, stages: int, replicas: int) -> None:
        self.stages, self.replicas = stages, replicas
        self.stage = self.replica = 0
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._timeout = timedelta()

    @property
    def is_joined(self) -> bool:
        """True while the process groups exist."""
        return self._groups is not None

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

    @property
    def timeout(self) -> timedelta:
        """Longest wait of a collective for another rank."""
        return self._timeout

    def join(self, *, timeout: timedelta) -> None:
        """Create the process groups. Collective over all ranks."""
        stages, replicas = self.stages, self.replicas
        if dist.get_world_size() != stages * replicas:
            raise UserError(
                f"strategy.stages={stages} x strategy.replicas={replicas} need {stages * replicas} processes, "
                f"but there are {dist.get_world_size()}."
            )
        self._timeout = timeout
        self.replica, self.stage = divmod(dist.get_rank(), stages)
        # Every rank creates every group, in the same order.
        stage_groups = [
            dist.new_group([number * stages + other for other in range(stages)], backend="gloo", timeout=timeout)
            for number in range(replicas)
        ]
        replica_groups = [
            dist.new_group([number * stages + other for number in range(replicas)], timeout=timeout)
            for other in range(stages)
        ]
        self._groups = stage_groups[self.replica], replica_groups[self.stage]

    def leave(self) -> None:
        """Forget the process groups."""
        self._groups = None

    def rank_name(self, process: int) -> str:
        """Return the name of a rank in messages."""
        replica, stage = divmod(process, self.stages)
        return f"rank {process}, stage {stage} of replica {replica}"

    def holder_groups(self, holders: Iterable[Holders]) -> dict[Holders, dist.ProcessGroup]:
        """Return for each set of stages their group in this rank's replica. Collective over all ranks."""
        groups: dict[Holders, dist.ProcessGroup] = {}
        wanted = sorted(holders)
        for replica in range(self.replicas):
            for stages in wanted:
                group = dist.new_group([replica * self.stages + stage for stage in stages], timeout=self._timeout)
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


class PipelineErrors:
    """Publisher of this rank's errors in the failure store that all ranks read.

    Args:
        board: The failure store.
        name: Name of this rank in messages.
        step: Returns the current step.

    """

    def __init__(self, board: StoreBoard, *, name: str, step: Callable[[], int]):
        self._board = board
        self._name = name
        self._step = step
        self._published: BaseException | None = None

    @contextmanager
    def published(self) -> Iterator[None]:
        """Publish an error of the block; one that another rank caused is raised with that cause."""
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise

    def explain(self, error: Exception, *, where: str = "") -> None:
        """Publish an error and its place; raises RankError for one that another rank caused."""
        if error is self._published or isinstance(error, RankError):
            return
        if isinstance(error, RuntimeError):
            self._explain_by_others(error)
        self._published = error
        self.publish(f"{type(error).__name__}: {error}", where=where)
        if where:
            _add_note(error, f"{self._name}, {where}")

    def publish(self, why: str, *, where: str = "") -> None:
        """Publish why this rank stops; only the first message of all ranks is kept."""
        place = f", {where}" if where else ""
        self._board.publish(f"{self._name} stopped in step {self._step()}{place}: {why}")

    def _explain_by_others(self, error: RuntimeError) -> None:
        first_line = str(error).partition("\n")[0]
        cause = self._board.root_cause()
        if cause is not None:
            raise RankError(f"{first_line}\nbecause {cause}") from None
        if is_lost(error) and "imed out" in str(error):
            self._board.publish(f"{self._name}, in step {self._step()}: {first_line}")
            raise RankError(f"{first_line}\nwho is where:\n{self._board.who_waits()}") from None


def _add_note(error: Exception, place: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(place)
    else:
        logger.error("%s: %s", place, error)
