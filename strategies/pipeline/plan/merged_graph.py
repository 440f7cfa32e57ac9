"""Merged graph of several steps of one task, for one partition of all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush

from ..trace.graph import RETURN, CutConstraint, Node, NodeOutput, TracedGraph
from .partition import Partition, replicate_shared

RETURN_TOGETHER = "all steps return in the last stage"


@dataclass(frozen=True, slots=True)
class MergedGraph:
    """The steps of a task's phases in one list, in which each step keeps its order.

        step of phase a    G1  G2          D  return            G1: a node that uses the parameters of G1
        step of phase b    G1  G2  G1  G2  D  return
        merged              [G1 G2 G1 G2 G1 G2] [D D] [return return]

    Nodes that must be in one stage are neighbours under one constraint: those under a constraint of one step, and the
    users of a parameter in all steps. So every cut that violates no constraint leaves each parameter in one stage.
    """

    graph: TracedGraph
    places: tuple[tuple[int, ...], ...]
    """For each step, the indices of its nodes in the list."""

    def partitions(self, whole: Partition, steps: Sequence[TracedGraph]) -> list[Partition]:
        """Return the partition of each step by a partition of the list; a stage may have no nodes of a step."""
        if len(steps) == 1:
            return [whole]
        return [
            # The first node of the step at or after the cut. Sorted, as each step keeps its order in the list.
            replicate_shared(step, [bisect_left(indices, cut) for cut in whole.cuts])
            for step, indices in zip(steps, self.places, strict=True)
        ]


def merge_graphs(steps: Sequence[TracedGraph], shares: Sequence[float]) -> MergedGraph:
    """Return the steps in one list; `shares` are the calls of each per step of the task.

    The order does not depend on costs. A single step is unchanged.
    """
    if len(steps) == 1:
        return MergedGraph(steps[0], (tuple(range(len(steps[0].nodes))),))
    groups = _ConstraintGroups(steps)
    pieces = groups.pieces()
    merged_indices: list[list[int]] = [[0] * len(step.nodes) for step in steps]
    nodes: list[Node] = []
    constraints: list[CutConstraint] = []
    # The values of each step are numbered from 0: in the list they follow those of the steps before.
    offsets = [sum(len(step.values) for step in steps[:number]) for number in range(len(steps))]
    # `reasons` after `pieces`, which joins groups whose order would be a circle.
    for piece, reason in zip(pieces, groups.reasons(pieces), strict=True):
        activations: dict[int, float] = defaultdict(float)
        for step, index in piece:
            activations[step] += steps[step].nodes[index].cost.activation_bytes
        heaviest = max(activations, key=lambda step: activations[step])
        first = len(nodes)
        for step, index in piece:
            merged_indices[step][index] = len(nodes)
            node = _moved(steps[step].nodes[index], len(nodes), offset=offsets[step], share=shares[step])
            # Phases run one after the other, so the memory for backward is that of the heaviest, not the sum.
            if step != heaviest:
                node.cost.activation_bytes = 0.0
            nodes.append(node)
        if len(piece) > 1:
            constraints.append(CutConstraint(first, len(nodes) - 1, *reason))
    returns = {(number, len(step.nodes) - 1) for number, step in enumerate(steps)}
    end = next(number for number, piece in enumerate(pieces) if returns & set(piece))
    start = sum(len(piece) for piece in pieces[:end])
    # A bool that is subtracted: a stage that only returns would be empty, so the node before belongs to it too.
    only_returns = returns >= set(pieces[end])
    constraints.append(CutConstraint(start - only_returns, len(nodes) - 1, RETURN_TOGETHER))
    values = [value for step in steps for value in step.values]
    measured = all(step.measured for step in steps)
    graph = TracedGraph(nodes, values, constraints, steps[0].parameter_bytes, measured=measured)
    return MergedGraph(graph, tuple(map(tuple, merged_indices)))


NodeKey = tuple[int, int]
"""A step and a node of it."""
Reason = tuple[str, str]
"""Reason why nodes must be in one stage, and a remedy or an empty string."""


class _ConstraintGroups:
    """Groups of nodes that must be in one stage, with the reasons."""

    def __init__(self, steps: Sequence[TracedGraph]) -> None:
        self._steps = steps
        # Disjoint sets: the leader of a group leads itself, and every other member leads to it.
        self._leader: dict[NodeKey, NodeKey] = {
            (number, index): (number, index) for number, step in enumerate(steps) for index in range(len(step.nodes))
        }
        self._reasons: list[tuple[NodeKey, Reason]] = []  # the strongest first
        for number, step in enumerate(steps):
            for constraint in sorted(step.constraints, key=lambda constraint: constraint.first - constraint.last):
                # -1 is the batch, which comes before the first node.
                keys = [(number, index) for index in range(max(constraint.first, 0), constraint.last + 1)]
                self._group(keys, constraint.reason, constraint.advice)
        self._group([(number, len(step.nodes) - 1) for number, step in enumerate(steps)], RETURN_TOGETHER)
        for name, users in _users(steps).items():
            described = " and ".join(dict.fromkeys(str(self._node(user)) for user in (users[0], users[-1])))
            self._group(users, f"'{name}' is used by {described}")

    def pieces(self) -> list[list[NodeKey]]:
        """Return the groups of nodes, ordered so that every step keeps its order."""
        # Ends, as each round joins at least two groups.
        while True:
            self._close_gaps()
            members: dict[NodeKey, list[NodeKey]] = defaultdict(list)
            for key in self._leader:
                members[self._find(key)].append(key)
            predecessors: dict[NodeKey, set[NodeKey]] = {leader: set() for leader in members}
            for number, index in self._leader:
                if index:
                    earlier, later = self._find((number, index - 1)), self._find((number, index))
                    if earlier != later:
                        predecessors[later].add(earlier)
            sorter = TopologicalSorter(predecessors)
            try:
                sorter.prepare()
            except CycleError as error:
                # The steps call these groups in different orders: only in one stage can each step keep its own.
                cycle = error.args[1]
                first, second = (self._node(members[leader][0]) for leader in cycle[:2])
                self._group(cycle, f"the steps call {first} and {second} in different orders", strongest=True)
                continue
            return self._in_order(sorter, members)

    def reasons(self, pieces: Sequence[Sequence[NodeKey]]) -> list[Reason]:
        """Return the reason and the remedy of each group; empty strings for a single node."""
        strongest: dict[NodeKey, Reason] = {}
        for key, reason in self._reasons:
            strongest.setdefault(self._find(key), reason)
        return [strongest.get(self._find(piece[0]), ("", "")) for piece in pieces]

    def _in_order(
        self, sorter: TopologicalSorter[NodeKey], members: dict[NodeKey, list[NodeKey]]
    ) -> list[list[NodeKey]]:
        # By the share of a step's nodes that comes before, not by costs: these are measured, and a saved partition must
        # fit the order of a later run. Groups with a `return` are last, as `RETURN_TOGETHER` reaches to the end.
        def rank(leader: NodeKey) -> tuple[bool, float]:
            last = any(self._node(key).name == RETURN for key in members[leader])
            return last, min(index / len(self._steps[number].nodes) for number, index in members[leader])

        ready: list[tuple[tuple[bool, float], NodeKey]] = []
        pieces = []
        while sorter.is_active():
            for leader in sorter.get_ready():
                # Of equal ranks the leader decides, for the same reason.
                heappush(ready, (rank(leader), leader))
            _, leader = heappop(ready)
            pieces.append(sorted(members[leader]))
            sorter.done(leader)
        return pieces

    def _close_gaps(self) -> None:
        """Add the nodes between two nodes of a group to it."""
        # Until a pass joins nothing: a group that grows in one step may have a gap in another.
        has_grown = True
        while has_grown:
            has_grown = False
            for number, step in enumerate(self._steps):
                ends: dict[NodeKey, int] = {}
                for index in range(len(step.nodes)):
                    ends[self._find((number, index))] = index
                reach, leader = -1, (number, 0)
                for index in range(len(step.nodes)):
                    key = (number, index)
                    if index <= reach and self._find(key) != self._find(leader):
                        reach = max(reach, ends.get(self._find(key), index))
                        self._leader[self._find(key)] = self._find(leader)
                        has_grown = True
                    elif index > reach:
                        leader, reach = key, ends[self._find(key)]

    def _group(self, keys: Sequence[NodeKey], reason: str, advice: str = "", *, strongest: bool = False) -> None:
        for key in keys[1:]:
            self._leader[self._find(key)] = self._find(keys[0])
        if len(keys) > 1:
            self._reasons.insert(0 if strongest else len(self._reasons), (keys[0], (reason, advice)))

    def _find(self, key: NodeKey) -> NodeKey:
        # Halves the way for the next call, which keeps long chains short.
        while self._leader[key] != key:
            self._leader[key] = key = self._leader[self._leader[key]]
        return key

    def _node(self, key: NodeKey) -> Node:
        number, index = key
        return self._steps[number].nodes[index]


def _users(steps: Sequence[TracedGraph]) -> dict[str, list[NodeKey]]:
    """Return the users of each parameter, and of each buffer that some step writes."""
    written = {name for step in steps for node in step.nodes for name in node.written_buffers}
    users: dict[str, list[NodeKey]] = defaultdict(list)
    for number, step in enumerate(steps):
        for node in step.nodes:
            for name in dict.fromkeys(node.tensor_names):
                if name in node.parameters or name in written:
                    users[name].append((number, node.index))
    return users


def _moved(node: Node, index: int, *, offset: int, share: float) -> Node:
    """Return a copy of a node at another index of the merged list."""
    forward, backward = share * node.cost.forward_seconds, share * node.cost.backward_seconds
    # Without its result: the list is only partitioned, never executed.
    return replace(
        node,
        index=index,
        inputs=tuple(value + offset for value in node.inputs),
        result=None,
        has_plain=False,
        outputs=tuple(NodeOutput(output.value + offset, output.requires_grad) for output in node.outputs),
        written=tuple(value + offset for value in node.written),
        cost=replace(node.cost, forward_seconds=forward, backward_seconds=backward),
    )
