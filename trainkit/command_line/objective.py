"""What a sweep looks for: the metric that its runs monitor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Objective:
    """A metric, and which of its values are good."""

    metric: str
    mode: str = "min"

    def value(self, metrics: Mapping[str, float | None]) -> float | None:
        """Return the metric's latest value, that of training where nothing was validated; `None` where it is none."""
        value = metrics.get(self.metric, metrics.get(f"train/{self.metric.partition('/')[2]}"))
        return value if value is not None and math.isfinite(value) else None

    def best(self, values: Sequence[float | None]) -> int | None:
        """Return the index of the best value."""
        sign = 1 if self.mode == "min" else -1
        known = [(sign * value, index) for index, value in enumerate(values) if value is not None]
        return min(known)[1] if known else None


def objective_of(tree: Mapping[str, Any]) -> Objective:
    """Return what a run's checkpoints are chosen by, or what ends it early; the loss where neither says so."""
    callbacks = tree.get("callbacks") or {}
    nodes = [node for node in callbacks.values() if isinstance(node, Mapping) and isinstance(node.get("monitor"), str)]
    if nodes:
        return Objective(nodes[0]["monitor"], str(nodes[0].get("mode", "min")))
    return Objective("validation/loss")
