"""What a cut may not separate, and what every stage computes: rules over the nodes of a traced step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

# Private: torch exports fake tensors nowhere else.
from .graph import (
    GRADIENT,
    NOMINAL,
    RETURN,
    CutConstraint,
    Node,
    Rates,
    Value,
    estimated_seconds,
)

CHEAP_SHARE = 0.01
"""Every stage computes the nodes that depend on the batch alone if they take less than this share of the step,"""


CHEAP_SECONDS = 1e-4
"""or less than this."""


def mark_batch_only_nodes(
    nodes: Sequence[Node],
    values: Sequence[Value],
    *,
    changed: frozenset[str] = frozenset(),
    rates: Rates = NOMINAL,
) -> None:
    """Mark the nodes and values that depend on the batch and constants alone, except expensive ones.

    State that this step changes, or another one by `changed`, is not constant.
    """
    states = changed.union(*(node.written_buffers for node in nodes))
    expensive = max(CHEAP_SHARE * sum(estimated_seconds(node.cost, rates) for node in nodes), CHEAP_SECONDS)
    tainted: set[int] = set()
    # In rounds, as a later node may write in place to a value that an earlier one uses. Each adds values, so this ends.
    while True:
        num_tainted = len(tainted)
        for node in nodes:
            made = {output.value for output in node.outputs}
            node.is_batch_only = not (
                node.parameters
                or node.written_buffers
                or states.intersection(node.buffers)
                or node.name == RETURN
                or (node.is_random and node.checkpoint is not None)  # draws after others of its stage
                or {*node.inputs, *made} & tainted
                or estimated_seconds(node.cost, rates) > expensive
            )
            if not node.is_batch_only:
                tainted.update(made)
        if len(tainted) == num_tainted:
            break
    for index, value in enumerate(values):
        value.local = index not in tainted


def written_buffer_constraints(nodes: Sequence[Node], kind_of: Callable[[str], str]) -> Iterator[CutConstraint]:
    """Yield a constraint for each parameter, buffer or attribute that is written, around all nodes that use it."""
    for name in dict.fromkeys(name for node in nodes for name in node.written_buffers):
        users = [node for node in nodes if name in node.tensor_names]
        if users[0] is not users[-1]:
            reason = f"{kind_of(name)} '{name}' is written and used by {users[0]} and {users[-1]}"
            advice = " Read and write it in one module's forward, or where they are close to each other."
            yield CutConstraint(users[0].index, users[-1].index, reason, advice)


def alias_constraints(nodes: Sequence[Node], writes: Sequence[tuple[Sequence[int], int]]) -> Iterator[CutConstraint]:
    """Yield constraints from the first of several views of one memory to a write through one of them.

    `writes` are pairs of the values that share memory and the index of the node that writes to it.
    """
    makers: dict[int, int] = {}
    for node in nodes:
        for output in node.outputs:
            makers.setdefault(output.value, node.index)
    for alias_set, writer in writes:
        if not nodes[writer].is_batch_only:
            # -1 for a value of the batch, which is there before the first node: no stage may begin up to the write.
            first = min(makers.get(value, -1) for value in alias_set)
            yield CutConstraint(first, writer, f"{nodes[writer]} writes in place to memory that several tensors share")


def gradient_constraints(nodes: Sequence[Node]) -> Iterator[CutConstraint]:
    """Yield constraints from the inputs by which a call of `torch.autograd.grad` differentiates to the call."""
    for node in nodes:
        if node.name == GRADIENT and not node.is_leaf_module:
            # Of a parameter the users are not followed: then everything before the call counts.
            first = 0 if node.parameters else _first_touched(nodes[: node.index], node.inputs)
            reason = f"{node} differentiates by what {nodes[first]} is given, and needs all nodes in between"
            yield CutConstraint(first, node.index, reason)


def _first_touched(nodes: Sequence[Node], values: Sequence[int]) -> int:
    """Return the index of the first node of one stage alone that makes or uses what depends on `values`."""
    followers = set(values)
    touching = []
    for node in nodes:
        made = {output.value for output in node.outputs}
        if followers & {*node.inputs, *made}:
            if followers.intersection(node.inputs):
                followers |= made
            if not node.is_batch_only:
                touching.append(node.index)
    return min(touching, default=len(nodes))


def checkpoint_constraints(nodes: Sequence[Node]) -> Iterator[CutConstraint]:
    """Yield a constraint around the nodes of each activation checkpoint, which backward runs again together."""
    calls: dict[int, list[Node]] = {}
    for node in nodes:
        if node.checkpoint is not None and not node.is_batch_only:
            calls.setdefault(node.checkpoint, []).append(node)
    for first, *rest in calls.values():
        if rest:
            reason = f"one checkpoint runs {first} and {rest[-1]} again in backward"
            yield CutConstraint(first.index, rest[-1].index, reason)
