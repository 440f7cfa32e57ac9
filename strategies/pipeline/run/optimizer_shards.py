"""The optimizer of a stage, divided over the stage's replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from trainkit.distributed.collectives import broadcast
from trainkit.errors import UserError
from trainkit.optim.optimizer import PhaseOptimizer

from ..plan.stage import owners_of
from .mesh import PipelineMesh

T = TypeVar("T")


class OptimizerShards:
    """Division of an optimizer over the replicas of a stage: each updates some parameters, and sends them to all.

        replica 0   all gradients | update w0 w1 | send w0 w1 | receive w2 w3
        replica 1   all gradients | update w2 w3 | receive w0 w1 | send w2 w3

    The first stage of ZeRO (Rajbhandari et al., 2020), for whole parameters: weights are those of an optimizer that is
    not divided, to the bit.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: PipelineMesh) -> None:
        """Divide the named parameters of this rank's stage, the same on each of its replicas."""
        self.mesh = mesh
        self._owners = owners_of({name: parameter.numel() for name, parameter in parameters.items()}, mesh.replicas)
        # By identity: optimizers do not know names, and `==` of tensors compares elements.
        self._owner_of = {id(parameter): self._owners[name] for name, parameter in parameters.items()}

    def owns(self, name: str) -> bool:
        """Return True if this replica updates the parameter."""
        return self._owners.get(name) == self.mesh.replica

    def update(self, phase_optimizer: PhaseOptimizer, *, norm: Tensor | None) -> None:
        """Step the optimizer for this replica's parameters, and exchange them. Collective over replicas."""
        owned: list[list[nn.Parameter]] = [[] for _ in range(self.mesh.replicas)]
        groups = phase_optimizer.optimizer.param_groups
        for parameter in (parameter for group in groups for parameter in group["params"]):
            owner = self._owner_of.get(id(parameter))
            if owner is None and parameter.grad is not None:
                raise UserError(
                    f"a parameter of shape {tuple(parameter.shape)} came into the optimizer during the run, and "
                    "shard_optimizer=true divided the optimizer before. Give it to the optimizer in "
                    "configure_optimizers, or type strategy.shard_optimizer=false."
                )
            if owner is None:
                continue  # of another stage
            owned[owner].append(parameter)
            if owner != self.mesh.replica:
                parameter.grad = None  # optimizers skip a parameter without one; the norm has been computed before
        phase_optimizer.update(norm=norm)
        # Every replica has the same lists in the same order, or broadcasts would wait for each other forever.
        for replica, parameters in enumerate(owned):
            broadcast(parameters, self.mesh.replica_group, source=self._group_rank(replica))

    def gather(self, state: T) -> list[T]:
        """Return the state of every replica on the first one, and `[state]` on others. Collective over replicas."""
        parts: list[Any] | None = [None] * self.mesh.replicas if self.mesh.replica == 0 else None
        dist.gather_object(state, parts, group=self.mesh.replica_group, group_dst=self._group_rank(0))
        return [state] if parts is None else parts

    def _group_rank(self, replica: int) -> int:
        return dist.get_group_rank(self.mesh.replica_group, self.mesh.grid[replica][self.mesh.stage])
