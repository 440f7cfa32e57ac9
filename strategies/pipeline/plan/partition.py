"""Partition of a traced step into stages: balanced, or at the split points of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from trainkit.errors import UserError, nearest

from ..trace.graph import CutConstraint, Node, TracedGraph

SLACK = 0.04
"""Fraction by which the slowest stage may exceed the optimum for fewer bytes across cuts."""
SAME_STAGE_AT_MOST = 1.25
"""Users of a shared parameter stay in one stage unless that makes the slowest stage slower by this factor."""
MOST_CANDIDATES = 160  # for each stage every pair of them is tried: twice as many take four times as long

SharedParameters = Literal["auto", "same_stage", "replicated"]
"""Placement of a parameter that several nodes use; see `partition`."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A division of the nodes of a step into stages of consecutive nodes."""

    cuts: tuple[int, ...]
    """The first node of the second and later stages."""
    replicated: tuple[str, ...]
    """The parameters that more than one stage uses."""

    def stage_of(self, node: int) -> int:
        """Return the stage that runs a node."""
        return sum(cut <= node for cut in self.cuts)

    def bounds(self, num_nodes: int) -> list[tuple[int, int]]:
        """Return for each stage its first node and the node after its last."""
        return list(pairwise([0, *self.cuts, num_nodes]))


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """Memory that a stage keeps for a parameter and for a micro-batch."""

    in_flight: Sequence[int]
    """For each stage, the most micro-batches between forward and backward."""
    states: Mapping[str, int]
    """By name: the bytes of a parameter's gradient and optimizer state."""


@dataclass(slots=True)
class StageCosts:
    """Costs of stages as shares of the whole step, each found in constant time from running sums."""

    seconds: list[float]
    state_bytes: list[float]
    """Of parameters, with gradients and optimizer state."""
    activation_bytes: list[float]
    balance: float
    in_flight: Sequence[int]

    @classmethod
    def of(
        cls, graph: TracedGraph, *, num_stages: int, balance: float, memory: MemoryCosts | None = None
    ) -> StageCosts:
        """Return the costs of a graph's stages; `balance` is 0 for speed and 1 for memory.

        Without `memory` there is one micro-batch in flight, and parameters are all that a stage keeps.
        """
        if memory is None:
            memory = MemoryCosts([1] * num_stages, {})
        # A parameter counts at its first user only: that is exact where its users are in one stage.
        seen: set[str] = set()
        state_bytes = []
        for node in graph.nodes:
            new = set(node.parameters) - seen
            seen |= new
            state_bytes.append(float(sum(graph.parameter_bytes[name] + memory.states.get(name, 0) for name in new)))
        costs = [node.cost for node in graph.nodes]
        return cls(
            list(accumulate((cost.seconds for cost in costs), initial=0.0)),
            list(accumulate(state_bytes, initial=0.0)),
            list(accumulate((cost.activation_bytes for cost in costs), initial=0.0)),
            balance,
            memory.in_flight,
        )

    def __call__(self, stage: int, start: int, stop: int) -> float:
        """Return the cost of stage number `stage` with the nodes from `start` to before `stop`."""
        # Shares of the whole step, as seconds and bytes could not be added by `balance`; 1.0 for a step without costs.
        time = (self.seconds[stop] - self.seconds[start]) / (self.seconds[-1] or 1.0)
        states = self.state_bytes[stop] - self.state_bytes[start]
        activations = self.in_flight[stage] * (self.activation_bytes[stop] - self.activation_bytes[start])
        total = self.state_bytes[-1] + max(self.in_flight) * self.activation_bytes[-1]
        return (1.0 - self.balance) * time + self.balance * (states + activations) / (total or 1.0)

    def slowest(self, cuts: Sequence[int]) -> float:
        """Return the cost of the slowest stage of a partition with these cuts."""
        bounds = pairwise([0, *cuts, len(self.seconds) - 1])
        return max(self(stage, start, stop) for stage, (start, stop) in enumerate(bounds))


def partition(
    graph: TracedGraph,
    *,
    num_stages: int,
    balance: float = 0.0,
    shared_parameters: SharedParameters = "auto",
    memory: MemoryCosts | None = None,
) -> Partition:
    """Return the partition whose slowest stage is fastest, and among nearly equal ones the fewest bytes across cuts.

    All users of a shared parameter are in one stage (`same_stage`), or anywhere (`replicated`: stages have copies,
    whose gradients are summed), or in one stage unless that is much slower (`auto`).
    """
    costs = StageCosts.of(graph, num_stages=num_stages, balance=balance, memory=memory)
    crossing = crossing_bytes(graph)
    sharing = {} if shared_parameters == "replicated" else sharing_constraints(graph)
    while True:
        together = _best_cuts(graph, [*graph.constraints, *sharing.values()], num_stages, costs, crossing)
        if not sharing or shared_parameters == "same_stage":
            break
        apart = _best_cuts(graph, graph.constraints, num_stages, costs, crossing)
        # `None`, without enough cut points, is a reason to drop a constraint as well.
        if together and apart and costs.slowest(together) <= SAME_STAGE_AT_MOST * costs.slowest(apart):
            break
        # The widest forbids the most cuts; the others may then cost little. Each round has one fewer, so this ends.
        del sharing[max(sharing, key=lambda name: sharing[name].last - sharing[name].first)]
    if together is None:
        raise too_few_cut_points(graph, num_stages, sharing)
    return replicate_shared(graph, together)


def replicate_shared(graph: TracedGraph, cuts: Sequence[int]) -> Partition:
    """Return the partition with these cuts, in which every stage has a copy of the parameters that it uses."""
    stage_of = Partition(tuple(cuts), ()).stage_of
    shared = (name for name, users in graph.parameter_users.items() if len({stage_of(user) for user in users}) > 1)
    return Partition(tuple(cuts), tuple(shared))


def crossing_bytes(graph: TracedGraph) -> list[int]:
    """Return for each node the bytes that are sent across a cut before it."""
    num_nodes = len(graph.nodes)
    made: dict[int, int] = {}
    used: dict[int, int] = {}
    for node in graph.nodes:
        for value in node.inputs:
            used[value] = node.index
        # Later stages run such a node again, to have its number: what it reads is sent to all of them.
        if node.reads and not node.is_batch_only:
            used.update(dict.fromkeys(node.inputs, num_nodes))
        for output in node.outputs:
            made.setdefault(output.value, node.index)  # a write in place makes no other value
    # Differences, whose running sum is the answer: one pass, also where thousands of values cross many nodes.
    change = [0] * (num_nodes + 2)
    for value, last in used.items():
        if not graph.values[value].local and value in made:
            num_bytes = graph.values[value].num_bytes
            change[made[value] + 1] += num_bytes
            change[min(last, num_nodes) + 1] -= num_bytes
    return list(accumulate(change))[: num_nodes + 1]


def candidates(graph: TracedGraph, constraints: Sequence[CutConstraint], crossing: Sequence[int]) -> list[int]:
    """Return the nodes that may begin a stage; of many, the one with the fewest bytes between two leaf modules."""
    # Differences again; their running sum is the number of constraints that forbid a cut before a node.
    change = [0] * (len(graph.nodes) + 2)
    for constraint in constraints:
        change[constraint.first + 1] += 1
        change[constraint.last + 1] -= 1
    allowed = [depth == 0 for depth in accumulate(change)]
    # Not before `return`, the last node: a stage does more than return.
    positions = [position for position in range(1, len(graph.nodes) - 1) if allowed[position]]
    if len(positions) <= MOST_CANDIDATES:
        return positions
    leaf_modules = [node.index for node in graph.nodes if node.is_leaf_module or node.parameters]
    edges = sorted({0, *leaf_modules, len(graph.nodes) - 1})
    chosen = set()
    for first, last in pairwise(edges):
        positions = [position for position in range(first + 1, last + 1) if allowed[position]]
        if positions:
            # Of equally good ones the last: what is done to prepare a module's input stays in the stage before.
            chosen.add(min(positions, key=lambda position: (crossing[position], -position)))
        if allowed[last]:
            chosen.add(last)
    positions = sorted(chosen - {0, len(graph.nodes) - 1})
    if len(positions) > MOST_CANDIDATES:
        # Still too many leaf modules; every n-th of them keeps candidates in all parts of the step.
        stride = len(positions) / MOST_CANDIDATES
        positions = [positions[int(index * stride)] for index in range(MOST_CANDIDATES)]
    return positions


def too_few_cut_points(graph: TracedGraph, num_stages: int, sharing: Mapping[str, CutConstraint]) -> UserError:
    """Return the error for a step that has too few cut points; `sharing` are the constraints of shared parameters."""
    limit = len(candidates(graph, [*graph.constraints, *sharing.values()], crossing_bytes(graph))) + 1
    if sharing:
        names = ", ".join(f"'{name}'" for name in sharing)
        reason = f"The users of {names} must be in one stage; strategy.shared_parameters=auto lets stages have copies."
    elif graph.constraints:
        widest = max(graph.constraints, key=lambda constraint: constraint.last - constraint.first)
        reason = f"The longest stretch that cannot be cut: {widest.reason}.{widest.advice}"
    else:
        expensive = max(graph.nodes, key=lambda node: node.cost.seconds)
        reason = f"The most expensive node is {expensive}, which cannot be expanded."
    return UserError(
        f"the step can be partitioned into at most {limit} stages, but strategy.stages={num_stages}. {reason} Or type "
        f"strategy.stages={max(limit, 1)}."
    )


def sharing_constraints(graph: TracedGraph) -> dict[str, CutConstraint]:
    """Return for each parameter that several nodes use the constraint that keeps these in one stage."""
    return {
        name: CutConstraint(users[0], users[-1], f"parameter '{name}' is shared")
        for name, users in graph.parameter_users.items()
        if len(users) > 1
    }


def _best_cuts(
    graph: TracedGraph,
    constraints: Sequence[CutConstraint],
    num_stages: int,
    costs: StageCosts,
    crossing: Sequence[int],
) -> list[int] | None:
    positions = candidates(graph, constraints, crossing)
    if len(positions) < num_stages - 1:
        return None
    edges = [0, *positions, len(graph.nodes)]
    # The limit is relative to the fastest partition, which is found first, with cuts that cost no bytes.
    fastest = _fewest_bytes(edges, num_stages, costs, [0] * len(crossing), float("inf"))
    return _fewest_bytes(edges, num_stages, costs, crossing, costs.slowest(fastest) * (1.0 + SLACK))


def _fewest_bytes(
    edges: Sequence[int], num_stages: int, costs: StageCosts, crossing: Sequence[int], limit: float
) -> list[int]:
    """Return the cuts with the fewest bytes across, and of these the fastest, if no stage costs more than `limit`."""
    last = len(edges) - 1
    infinite = (float("inf"), float("inf"))
    # A shortest path over (stage, edge): O(num_stages x edges squared), where trying all cuts would be exponential.
    # best[stop]: bytes across and the cost of the slowest stage so far, if the stages end before edge `stop`
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [infinite] * last
    origins: list[list[int]] = []
    for stage in range(num_stages):
        reached = [infinite] * (last + 1)
        origin = [0] * (last + 1)
        for stop in range(1, last + 1):
            crossed = float(crossing[edges[stop]]) if stop < last else 0.0
            for start in range(stop):
                cost = costs(stage, edges[start], edges[stop])
                if cost <= limit and best[start] < infinite:
                    candidate = (best[start][0] + crossed, max(best[start][1], cost))
                    if candidate < reached[stop]:  # pairs are compared by bytes first, then by cost
                        reached[stop], origin[stop] = candidate, start
        best = reached
        origins.append(origin)
    cuts = []
    stop = last
    for origin in reversed(origins):
        stop = origin[stop]
        cuts.append(edges[stop])
    return cuts[-2::-1]  # without the last one, which is the start of the first stage


def manual_partition(
    graph: TracedGraph, split_points: Sequence[str], *, num_stages: int, shared_parameters: SharedParameters
) -> Partition:
    """Return the partition in which the modules named in `split_points` begin the second and later stages.

    Unless `shared_parameters` is `replicated`, no split point may be between the users of a parameter.
    """
    positions = [_first_node(graph, name) for name in split_points]
    if len(positions) != num_stages - 1:
        raise UserError(
            f"strategy.split_points names {len(positions)} modules, which makes {len(positions) + 1} stages, but "
            f"strategy.stages={num_stages}. Type strategy.stages={len(positions) + 1}, or name "
            f"{num_stages - 1} modules."
        )
    if positions != sorted(set(positions)) or 0 in positions:
        raise UserError(
            f"strategy.split_points={list(split_points)} must be in the order in which the step calls the modules, "
            "each once, without the first one: split points begin the second and later stages."
        )
    positions = [_with_preparation(graph, position, after=previous) for previous, position in pairwise([0, *positions])]
    sharing = {} if shared_parameters == "replicated" else sharing_constraints(graph)
    for name, constraint in sharing.items():
        for position in positions:
            if constraint.forbids(position):
                first, last = (_called(graph.nodes[index]) for index in (constraint.first, constraint.last))
                raise UserError(
                    f"strategy.split_points begins a stage at {_called(graph.nodes[position])}, between users of the "
                    f"parameter '{name}': {first} and {last}. Type strategy.shared_parameters=replicated to "
                    f"give each stage that uses it a copy, with gradients summed, or split before "
                    f"{first} or after {last}."
                )
    return replicate_shared(graph, positions)


def _with_preparation(graph: TracedGraph, position: int, *, after: int) -> int:
    """Return where the stage of a split point begins: at its node, or at calls before it that must be in its stage.

    Raises UserError if one of these is a module, uses a parameter, or is not `after` the split point before: they
    belong to the stage before.
    """
    first = position
    while constraint := next((constraint for constraint in graph.constraints if constraint.forbids(first)), None):
        preparation = graph.nodes[constraint.first : first]
        if constraint.first <= after or any(node.is_leaf_module or node.parameters for node in preparation):
            raise UserError(f"a stage cannot begin at {graph.nodes[position]}: {constraint.reason}.{constraint.advice}")
        first = constraint.first
    return first


def _called(node: Node) -> str:
    return f"'{node.name}'" if node.is_leaf_module else str(node)


def _first_node(graph: TracedGraph, name: str) -> int:
    # Not all modules of the task: a stage can begin only at one whose call, or a call in whose code, is a node.
    names = list(dict.fromkeys(name for node in graph.nodes for name in _ancestry(node)))
    matches = [module_name for module_name in names if module_name == name or module_name.endswith(f".{name}")]
    full = name if name in matches else matches[0] if len(matches) == 1 else None
    if full is None:
        problem = "more than one module" if matches else "no module that the step calls"
        # Parameters tell that a module is inside a node, whose calls are not traced.
        for node in graph.nodes:
            if node.is_opaque and any(parameter.startswith(f"{name}.") for parameter in node.parameters):
                problem = f"called inside {node}: that is one node, and a stage begins before or after it"
        raise UserError(f"strategy.split_points names '{name}', which is {problem}.{nearest(name, names)}")
    return min(node.index for node in graph.nodes if full in _ancestry(node))


def _ancestry(node: Node) -> list[str]:
    parts = (node.name if node.is_leaf_module else node.path).split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts)) if parts[0]]
