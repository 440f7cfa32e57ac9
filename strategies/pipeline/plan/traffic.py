"""Placement of ranks on several hosts, and the bytes that a step sends between hosts with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainkit.errors import UserError

from ...transports.hosts import HostLayout

Placing = Literal["cluster", "spread"]
"""The ranks that one host has: the stages of a replica, or the replicas of a stage."""


def rank_grid(hosts: HostLayout, *, stages: int, replicas: int, placement: Placing) -> list[list[int]]:
    """Return the rank of each stage of each replica.

    Two hosts with two ranks each, two stages and two replicas::

        cluster    replica 0  0 1    host 0        spread    replica 0  0 2
                   replica 1  2 3    host 1                  replica 1  1 3
                                                             host       0 1

    Raises UserError for hosts whose ranks have an order in which groups of them would not be in rank order.
    """
    ranks = [rank for host_ranks in hosts.ranks for rank in host_ranks]
    if placement == "cluster":
        grid = [ranks[replica * stages : (replica + 1) * stages] for replica in range(replicas)]
    else:
        grid = [ranks[replica::replicas] for replica in range(replicas)]
    columns = [[replica_ranks[stage] for replica_ranks in grid] for stage in range(stages)]
    # `new_group` sorts its ranks: with another order the rank in a group would not be the stage or the replica.
    if any(group != sorted(group) for group in [*grid, *columns]):
        raise UserError(
            f"the ranks of the hosts are {', '.join(map(str, hosts.ranks))}, in which no stages can be placed. Start "
            "the ranks of each host one after the other, as torchrun does."
        )
    return grid


@dataclass(frozen=True, slots=True)
class StepMessages:
    """Bytes of the messages of one step, by the stages of a replica; without outputs, flags and metrics."""

    activations: Mapping[tuple[int, int], int]
    """Activations and their gradients, between two stages."""
    gradients: Sequence[int]
    """Gradients of each stage, summed over its replicas."""
    shared: Mapping[tuple[int, ...], int]
    """Gradients of the parameters that several stages hold, summed over these."""
    broadcast: Sequence[Sequence[int]]
    """Of each stage, the weights and buffers that each of its replicas sends to the others."""


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Bytes that all hosts together send to other hosts in one step with a placement of ranks."""

    placement: Placing
    activations: int
    """Activations and their gradients, between stages."""
    gradients: int
    """Gradients of parameters, between replicas, and between stages that share a parameter."""
    weights: int
    """Weights that optimizer shards have updated, and buffers, between replicas."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.activations + self.gradients + self.weights


def traffic_of(
    hosts: HostLayout, placement: Placing, messages: StepMessages, *, stages: int, replicas: int
) -> HostTraffic:
    """Return what a step sends between hosts with a placement.

    Gloo sums in a ring, in rank order: each rank sends 2 (n-1)/n of the bytes to its neighbour. It broadcasts in a
    tree, in which all bytes go along each edge. Four ranks on two hosts, summed, and broadcast by the first one::

        host 0   0 -- 1      host 0   0 --> 1
                 |    |               |     |
        host 1   3 -- 2      host 1   2     3
    """
    grid = rank_grid(hosts, stages=stages, replicas=replicas, placement=placement)
    columns = list(zip(*grid, strict=True))
    host_of = {rank: host for host, ranks in enumerate(hosts.ranks) for rank in ranks}

    def crossing(ranks: Sequence[int], edges: Iterable[tuple[int, int]]) -> int:
        return sum(host_of[ranks[source]] != host_of[ranks[destination]] for source, destination in edges)

    def summed(ranks: Sequence[int], size: int) -> int:
        count = len(ranks)
        ring = [(index, (index + 1) % count) for index in range(count)]
        return crossing(ranks, ring) * 2 * (count - 1) * size // count

    return HostTraffic(
        placement,
        activations=sum(
            size * crossing(ranks, [pair]) for ranks in grid for pair, size in messages.activations.items()
        ),
        gradients=sum(summed(ranks, size) for ranks, size in zip(columns, messages.gradients, strict=True))
        + sum(
            summed([ranks[stage] for stage in stages], size)
            for ranks in grid
            for stages, size in messages.shared.items()
        ),
        weights=sum(
            size * crossing(ranks, broadcast_tree(len(ranks), root))
            for ranks, sizes in zip(columns, messages.broadcast, strict=True)
            for root, size in enumerate(sizes)
        ),
    )


def broadcast_tree(count: int, root: int) -> list[tuple[int, int]]:
    """Return the pairs of sender and receiver in gloo's broadcast: after each round twice as many ranks have it all."""
    edges = []
    for number in range(1, count):  # counted from the root
        # In round k the first 2**k ranks send to the next 2**k: the sender is the number without its highest bit.
        sender = number - (1 << (number.bit_length() - 1))
        edges.append(((sender + root) % count, (number + root) % count))
    return edges
