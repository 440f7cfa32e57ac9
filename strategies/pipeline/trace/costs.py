"""Costs of a traced step by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from .graph import FlopCounter, NodeCost


@dataclass(slots=True)
class ModuleCall:
    """Total cost of the calls of one module, and the modules that its code calls."""

    cost: NodeCost = field(default_factory=NodeCost)
    num_calls: int = 0
    callees: set[str] = field(default_factory=set)


class ModuleCosts:
    """The costs of a step by module, and the modules that run: `path` ends with the innermost one."""

    def __init__(self) -> None:
        self.counter = FlopCounter()
        self.path: list[str] = [""]
        self.calls: dict[str, ModuleCall] = {"": ModuleCall(self.counter.total, num_calls=1)}

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Count what the block costs as a call of the module `name`."""
        call = self.calls.setdefault(name, ModuleCall())
        self.calls[self.path[-1]].callees.add(name)
        call.num_calls += 1
        cost_before = self.now()
        self.path.append(name)
        try:
            yield
        finally:
            # Also after an error, which the step may catch to go on.
            self.path.pop()
            self.add_since(cost_before, call.cost)

    def now(self) -> NodeCost:
        """Return the cost of the step so far."""
        return replace(self.counter.total)  # a copy, as the counter adds in place

    def add_since(self, cost_before: NodeCost, cost: NodeCost) -> None:
        """Add to `cost` what the step has cost since `cost_before`."""
        total = self.counter.total
        cost.flops += total.flops - cost_before.flops
        cost.moved_bytes += total.moved_bytes - cost_before.moved_bytes
        cost.num_calls += total.num_calls - cost_before.num_calls
        cost.activation_bytes += total.activation_bytes - cost_before.activation_bytes
