"""Several recorded steps of one task as one list of events, so that one cut goes through all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush

from .events import RETURN, Bond, Event, Product, Recording, Value
from .partition import Partition, with_replicas

RETURN_TOGETHER = "all steps return in the last stage"


@dataclass(frozen=True, slots=True)
class Joint:
    """The steps of a task's phases in one list, in which each step keeps its order.

        step of phase a    G1  G2          D  return            G1: an event that uses the parameters of G1
        step of phase b    G1  G2  G1  G2  D  return
        joint              [G1 G2 G1 G2 G1 G2] [D D] [return return]

    Events that must be in one stage are neighbours in a bond: those that one step holds together, and the users of a
    parameter in all steps. So every cut that tears no bond puts each parameter in one stage.
    """

    recording: Recording
    places: tuple[tuple[int, ...], ...]
    """For each step, where its events are in the list."""

    def partitions(self, whole: Partition, steps: Sequence[Recording]) -> list[Partition]:
        """Return how a partition of the list cuts each step; a stage may have no events of a step."""
        if len(steps) == 1:
            return [whole]
        return [
            with_replicas(step, [bisect_left(places, cut) for cut in whole.cuts])
            for step, places in zip(steps, self.places, strict=True)
        ]


def join(steps: Sequence[Recording], shares: Sequence[float]) -> Joint:
    """Return the steps in one list; `shares` are how often each is made, for one of the task's steps.

    The order does not depend on what events cost. One step alone is its own list, with no bonds added.
    """
    if len(steps) == 1:
        return Joint(steps[0], (tuple(range(len(steps[0].events))),))
    ties = _Ties(steps)
    pieces = ties.pieces()
    places: list[list[int]] = [[0] * len(step.events) for step in steps]
    events: list[Event] = []
    bonds: list[Bond] = []
    offsets = [sum(len(step.values) for step in steps[:number]) for number in range(len(steps))]
    for piece, reason in zip(pieces, ties.reasons(pieces), strict=True):
        heaviest = _heaviest(piece, steps)
        first = len(events)
        for step, index in piece:
            places[step][index] = len(events)
            event = _moved(steps[step].events[index], len(events), offset=offsets[step], share=shares[step])
            if step != heaviest:  # phases are on one after the other, and so is what they keep for backward
                event.cost.activation_bytes = 0.0
            events.append(event)
        if len(piece) > 1:
            bonds.append(Bond(first, len(events) - 1, *reason))
    end = next(number for number, piece in enumerate(pieces) if any(_is_return(steps, node) for node in piece))
    start = sum(len(piece) for piece in pieces[:end])
    only_returns = all(_is_return(steps, node) for node in pieces[end])  # and a stage does more than return
    bonds.append(Bond(start - only_returns, len(events) - 1, RETURN_TOGETHER))
    values: list[Value] = [value for step in steps for value in step.values]
    whole = Recording(
        events,
        values,
        bonds,
        steps[0].parameter_bytes,
        frozenset().union(*(step.trainable for step in steps)),
        measured=all(step.measured for step in steps),
    )
    return Joint(whole, tuple(map(tuple, places)))


Node = tuple[int, int]
"""A step and an event of it."""
Reason = tuple[str, str]
"""Why events stay together, and what to do about it where that is known."""


class _Ties:
    """Which events of some steps must be in one stage, and why."""

    def __init__(self, steps: Sequence[Recording]) -> None:
        self._steps = steps
        self._leader: dict[Node, Node] = {
            (number, index): (number, index) for number, step in enumerate(steps) for index in range(len(step.events))
        }
        self._reasons: list[tuple[Node, Reason]] = []  # the strongest first
        for number, step in enumerate(steps):
            for bond in sorted(step.bonds, key=lambda bond: bond.first - bond.last):
                self._tie([(number, index) for index in range(bond.first, bond.last + 1)], bond.reason, bond.advice)
        self._tie([(number, len(step.events) - 1) for number, step in enumerate(steps)], RETURN_TOGETHER)
        for name, users in _users(steps).items():
            described = " and ".join(dict.fromkeys(str(self._event(user)) for user in (users[0], users[-1])))
            self._tie(users, f"'{name}' is used by {described}")

    def pieces(self) -> list[list[Node]]:
        """Return the events in pieces that stay together, ordered such that every step keeps its own order."""
        while True:
            self._close_gaps()
            members: dict[Node, list[Node]] = defaultdict(list)
            for node in self._leader:
                members[self._find(node)].append(node)
            before: dict[Node, set[Node]] = {leader: set() for leader in members}
            for number, index in self._leader:
                if index:
                    earlier, later = self._find((number, index - 1)), self._find((number, index))
                    if earlier != later:
                        before[later].add(earlier)
            sorter = TopologicalSorter(before)
            try:
                sorter.prepare()
            except CycleError as error:
                self._tie_cycle(error.args[1], members)
                continue
            return self._in_order(sorter, members)

    def reasons(self, pieces: Sequence[Sequence[Node]]) -> list[Reason]:
        """Return why each piece stays together, and what to do about it; nothing of one event alone."""
        strongest: dict[Node, Reason] = {}
        for node, reason in self._reasons:
            strongest.setdefault(self._find(node), reason)
        return [strongest.get(self._find(piece[0]), ("", "")) for piece in pieces]

    def _in_order(self, sorter: TopologicalSorter[Node], members: dict[Node, list[Node]]) -> list[list[Node]]:
        def rank(leader: Node) -> tuple[bool, float]:
            last = any(_is_return(self._steps, node) for node in members[leader])
            return last, min(index / len(self._steps[number].events) for number, index in members[leader])

        ready: list[tuple[tuple[bool, float], Node]] = []
        pieces = []
        while sorter.is_active():
            for leader in sorter.get_ready():
                heappush(ready, (rank(leader), leader))
            _, leader = heappop(ready)
            pieces.append(sorted(members[leader]))
            sorter.done(leader)
        return pieces

    def _close_gaps(self) -> None:
        """Tie what lies between two events of a piece to them."""
        changed = True
        while changed:
            changed = False
            for number, step in enumerate(self._steps):
                ends: dict[Node, int] = {}
                for index in range(len(step.events)):
                    ends[self._find((number, index))] = index
                reach, leader = -1, (number, 0)
                for index in range(len(step.events)):
                    node = (number, index)
                    if index <= reach and self._find(node) != self._find(leader):
                        reach = max(reach, ends.get(self._find(node), index))
                        self._leader[self._find(node)] = self._find(leader)
                        changed = True
                    elif index > reach:
                        leader, reach = node, ends[self._find(node)]

    def _tie_cycle(self, cycle: Sequence[Node], members: dict[Node, list[Node]]) -> None:
        first, second = (self._event(members[leader][0]) for leader in cycle[:2])
        self._tie(cycle, f"the steps come to {first} and {second} in different orders", strongest=True)

    def _tie(self, nodes: Sequence[Node], reason: str, advice: str = "", *, strongest: bool = False) -> None:
        for node in nodes[1:]:
            self._leader[self._find(node)] = self._find(nodes[0])
        if len(nodes) > 1:
            self._reasons.insert(0 if strongest else len(self._reasons), (nodes[0], (reason, advice)))

    def _find(self, node: Node) -> Node:
        while self._leader[node] != node:
            self._leader[node] = node = self._leader[self._leader[node]]
        return node

    def _event(self, node: Node) -> Event:
        number, index = node
        return self._steps[number].events[index]


def _is_return(steps: Sequence[Recording], node: Node) -> bool:
    number, index = node
    return steps[number].events[index].name == RETURN


def _users(steps: Sequence[Recording]) -> dict[str, list[Node]]:
    """Return the users of each parameter, and of each buffer that some step writes."""
    written = {name for step in steps for event in step.events for name in event.written_buffers}
    users: dict[str, list[Node]] = defaultdict(list)
    for number, step in enumerate(steps):
        for event in step.events:
            for name in dict.fromkeys((*event.parameters, *event.buffers, *event.written_buffers)):
                if name in event.parameters or name in written:
                    users[name].append((number, event.index))
    return users


def _heaviest(piece: Sequence[Node], steps: Sequence[Recording]) -> int:
    """Return the step that keeps most for the backward of a piece."""
    kept: dict[int, float] = defaultdict(float)
    for number, index in piece:
        kept[number] += steps[number].events[index].cost.activation_bytes
    return max(kept, key=lambda number: kept[number])


def _moved(event: Event, index: int, *, offset: int, share: float) -> Event:
    """Return an event at another place of a longer list."""
    cost = replace(
        event.cost,
        forward_seconds=share * event.cost.forward_seconds,
        backward_seconds=share * event.cost.backward_seconds,
    )
    return replace(
        event,
        index=index,
        inputs=tuple(value + offset for value in event.inputs),
        outputs=None,
        has_plain=False,
        products=tuple(Product(product.value + offset, product.requires_grad) for product in event.products),
        written=tuple(value + offset for value in event.written),
        cost=cost,
    )
