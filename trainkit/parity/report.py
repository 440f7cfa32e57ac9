"""ParityReport: a row for each strategy that was compared, as a table or as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Difference:
    """The largest difference from `single`, relative to the scale of what is compared."""

    value: float = 0.0
    step: int = 0
    parameter: str = ""
    """The parameter that differs; of losses and norms the phase, where the task has several."""


@dataclass(frozen=True)
class ParityRow:
    """How one strategy compares with `single`."""

    strategy: str
    verdict: str
    """`reference`, `equal`, `different` or `failed`."""
    layout: str = ""
    loss: Difference = field(default_factory=Difference)
    grad_norm: Difference = field(default_factory=Difference)
    weights: Difference = field(default_factory=Difference)
    seconds_a_step: float = math.nan
    bytes_a_step: int | None = None
    """Bytes that a rank sends in a step, where the strategy reports them."""
    error: str = ""


@dataclass(frozen=True)
class ParityReport:
    """The comparison of several strategies."""

    rows: tuple[ParityRow, ...]
    steps: int
    precision: str
    tolerance: float
    notes: tuple[str, ...] = ()
    """Whether the task does not compute in fp64, and which of its modules explain a difference."""

    @property
    def is_equal(self) -> bool:
        """Whether every strategy agrees with `single` to the tolerance."""
        return all(row.verdict in ("reference", "equal") for row in self.rows)

    def as_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(_without_nan({**asdict(self), "is_equal": self.is_equal}), indent=2, allow_nan=False)

    def as_table(self) -> str:
        """Return the report as text: a row for each strategy, then the notes."""
        head = ("strategy", "layout", "loss", "gradient norm", "weights", "where", "ms a step", "MB a step", "verdict")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        kind = "all equal" if self.is_equal else "not equal"
        lines.append(
            f"{kind}: {self.steps} steps in {self.precision}, tolerance {self.tolerance:.0e} relative to single"
        )
        lines += [f"{row.strategy} failed: {row.error}" for row in self.rows if row.error]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _cells(row: ParityRow) -> tuple[str, ...]:
    if row.error:
        return (row.strategy, *[""] * 7, row.verdict)
    worst = max((row.weights, row.loss, row.grad_norm), key=_order)
    where = "" if worst.value == 0 else f"step {worst.step} {worst.parameter}".strip()
    sent = "" if row.bytes_a_step is None else f"{row.bytes_a_step / 1e6:.2f}"
    differences = [f"{difference.value:.1e}" for difference in (row.loss, row.grad_norm, row.weights)]
    milliseconds = f"{1000 * row.seconds_a_step:.2f}"
    return (row.strategy, row.layout, *differences, where, milliseconds, sent, row.verdict)


def _order(difference: Difference) -> float:
    return math.inf if math.isnan(difference.value) else difference.value


def _without_nan(value: Any) -> Any:
    """Return a tree with null in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
