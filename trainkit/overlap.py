"""How much of a step is communication, and how much of that goes on behind computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a strategy measured on this rank, in seconds of one step."""

    exposed: float
    """In which this rank did nothing but communicate, or wait for others."""
    communication: float | None = None
    """In which something was under way; `None` where only what was waited for is known, 0 where nothing is sent."""
    steps: int = 0
    """Over which these are means."""
    note: str = ""
    """What is to be known of it."""

    @property
    def hidden_share(self) -> float | None:
        """Share of communication behind which computation went on; `None` where there is none, or it is not known."""
        return 1.0 - self.exposed / self.communication if self.communication else None

    def line(self, *, strategy: str, step_seconds: float) -> str:
        """Return all of it in one line, beside how long a whole step takes."""
        if self.communication == 0:
            return f"overlap: {strategy} has no communication here{self._more()}"
        taken = self.exposed if self.communication is None else self.communication
        share = f"{1e3 * taken:.2f} ms ({taken / step_seconds:.0%}) of a step"
        if self.hidden_share is None:
            return f"overlap: {strategy} waits for others in {share}{self._more()}"
        return f"overlap: {strategy} communicates in {share}, {self.hidden_share:.0%} of it hidden{self._more()}"

    def record(self, *, strategy: str, step_seconds: float) -> dict[str, Any]:
        """Return the numbers and the line, to be kept with the run."""
        return {
            "communication_seconds": self.communication,
            "exposed_seconds": self.exposed,
            "hidden_share": self.hidden_share,
            "step_seconds": step_seconds or None,
            "steps": self.steps,
            "line": self.line(strategy=strategy, step_seconds=step_seconds),
        }

    def _more(self) -> str:
        return f" ({self.note})" if self.note else ""


NO_COMMUNICATION = Overlap(0.0, communication=0.0, note="one process, one device")
