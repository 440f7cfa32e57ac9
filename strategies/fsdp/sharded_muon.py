"""ShardedMuon: Muon's steps of whole matrices, of which each rank has rows."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from trainkit.distributed.collectives import ProcessGroupCollectives

from .parameter_shard import ParameterShard
from .sharded_task import ShardedTask

MUON: type[Optimizer] | None = getattr(optim, "Muon", None)  # from torch 2.9 on
MOMENTUM = "momentum_buffer"


class ShardedMuon:
    """Lets torch's Muon step each matrix whole on one rank, its owner, which alone has its momentum.

        shards    rank 0 [ a0 b0 c0 ]   rank 1 [ a1 b1 c1 ]
        round 0   rank 0 [ a ]          rank 1 [ b ]          parameters and gradients, gathered and stepped
        round 1   rank 0                rank 1 [ c ]
        shards    rank 0 [ a0 b0 c0 ]   rank 1 [ a1 b1 c1 ]   the parameters of each round are sent back

    The rounds precede the optimizers' own steps, which find no gradients left. Each replica of the shards has its own
    owners.

    Args:
        optimizers: The Muons; their steps are collective from now on.
        shards: Their matrices.
        task: The task of these matrices.
        comm: All ranks.

    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        shards: Sequence[ParameterShard],
        task: ShardedTask,
        comm: ProcessGroupCollectives,
    ) -> None:
        self._comm, self._group = comm, task.shard_group
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        self._locals = [shard.local for shard in shards]
        self._shapes = {id(shard.local): shard.sharded.shape for shard in shards}
        self._sizes = {id(shard.local): task.elements_of_ranks(shard.sharded) for shard in shards}
        owners = assign_owners([shard.sharded.numel() for shard in shards], self._num_ranks)
        self._owners = {id(shard.local): owner for shard, owner in zip(shards, owners, strict=True)}
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._step)

    # ---- A step

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Step the matrices that have a gradient, and drop their gradients; collective."""
        whole_optimizer = copy.copy(optimizer)  # has its settings, and no hooks, or `step` would call this one again
        for group in optimizer.param_groups:
            used = [local for local in group["params"] if local.grad is not None]
            # The same rounds on all ranks, or they would wait for each other: the strategy has checked before that all
            # have gradients of the same parameters.
            for matrices in self._rounds(used):
                values = self._gathered(matrices, [local.data for local in matrices.values()])
                gradients = [local.grad for local in matrices.values() if local.grad is not None]
                gradient = self._gathered(matrices, gradients)
                for local in matrices.values():
                    optimizer.state.setdefault(local, {})  # in the same order on all ranks; empty but on the owner
                if self._rank in matrices:
                    matrix = nn.Parameter(values)  # in the memory of `values`, which are sent back
                    matrix.grad = gradient
                    whole_optimizer.param_groups = [{**group, "params": [matrix]}]
                    # The same dictionary, so that the momentum stays in the optimizer's state.
                    whole_optimizer.state = defaultdict(dict, {matrix: optimizer.state[matrices[self._rank]]})
                    whole_optimizer.step()
                for local, rows in self._scattered(matrices, values):
                    local.copy_(rows)
                    local.grad = None  # or the optimizer's own step would update the rows again

    def _rounds(self, parameters: Sequence[nn.Parameter]) -> Iterator[dict[int, nn.Parameter]]:
        """Yield at most one parameter of each owner, by owner; those of a round have one dtype."""
        # A dictionary keeps the order, which a set of dtypes does not have: it must be that of all ranks.
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            owned: list[list[nn.Parameter]] = [[] for _ in range(self._num_ranks)]
            for parameter in parameters:
                if parameter.dtype == dtype:
                    owned[self._owners[id(parameter)]].append(parameter)
            for number in range(max(map(len, owned))):
                yield {owner: queue[number] for owner, queue in enumerate(owned) if number < len(queue)}

    def _gathered(self, matrices: Mapping[int, nn.Parameter], rows: Iterable[Tensor]) -> Tensor:
        """Return the whole tensor of this rank's matrix, of which each rank has rows; collective."""
        # In the order of owners, in which `all_to_all_single` cuts what is sent.
        sent = torch.cat([part.reshape(-1) for part in rows])
        received = self._exchange(sent, self._sizes_here(matrices), self._sizes_of_own(matrices))
        return received.view(self._shapes[id(matrices[self._rank])]) if self._rank in matrices else received

    def _scattered(self, matrices: Mapping[int, nn.Parameter], matrix: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each matrix with this rank's rows of its tensor, which is `matrix` on the owner; collective."""
        sizes = self._sizes_here(matrices)
        received = self._exchange(matrix.reshape(-1), self._sizes_of_own(matrices), sizes).split(sizes)
        for owner, local in matrices.items():
            yield local, received[owner].view(local.shape)

    def _sizes_here(self, matrices: Mapping[int, nn.Parameter]) -> list[int]:
        """Return the elements of each owner's matrix on this rank."""
        return [matrices[owner].numel() if owner in matrices else 0 for owner in range(self._num_ranks)]

    def _sizes_of_own(self, matrices: Mapping[int, nn.Parameter]) -> list[int]:
        """Return the elements of this rank's matrix on each rank."""
        return self._sizes[id(matrices[self._rank])] if self._rank in matrices else [0] * self._num_ranks

    def _exchange(self, sent: Tensor, sent_sizes: list[int], sizes: list[int]) -> Tensor:
        received = sent.new_empty(sum(sizes))
        with self._comm.waiting(self._comm.after("the exchange of Muon's matrices")):
            dist.all_to_all_single(received, sent, sizes, sent_sizes, group=self._group)
        return received

    # ---- State

    def shard_state(self, state: Mapping[Any, dict[str, Any]]) -> dict[int, dict[str, Tensor]]:
        """Return this rank's rows of the matrices' state, by the id of the parameter; collective."""
        rows_of: dict[int, dict[str, Tensor]] = {}
        for matrices in self._rounds([local for local in self._locals if local in state]):
            empty = next(iter(matrices.values())).new_empty(0)
            momentum = state[matrices[self._rank]][MOMENTUM] if self._rank in matrices else empty
            rows_of |= {id(local): {MOMENTUM: rows} for local, rows in self._scattered(matrices, momentum)}
        return rows_of

    def gather_state(self, state: Mapping[Any, dict[str, Any]]) -> None:
        """Leave the whole state of each matrix on its owner, of which each rank has rows; collective."""
        for matrices in self._rounds([local for local in self._locals if local in state]):
            # Removed on all ranks, as only the owner keeps the momentum.
            momentum = self._gathered(matrices, [state[local].pop(MOMENTUM) for local in matrices.values()])
            if self._rank in matrices:
                state[matrices[self._rank]][MOMENTUM] = momentum


def assign_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner of each matrix: from the largest on, the rank with the fewest elements so far."""
    owned, owners = [0] * num_ranks, [0] * len(sizes)
    # Large ones first: small ones even out the rest. Sorting is stable, so all ranks assign equal sizes alike.
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = owned.index(min(owned))
        owned[owners[index]] += sizes[index]
    return owners
