"""What a run came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.run import Run
from trainkit.state import TrainState


@dataclass
class FitResult:
    """What a run came to."""

    metrics: dict[str, float]
    """The latest value of every metric."""
    steps: int
    epochs: float
    samples: int
    seconds: float
    samples_per_second: float
    exit_reason: str
    run_dir: Path | None
    weights: dict[str, Any] | None = field(default=None, repr=False)


class Progress(NamedTuple):
    """How far a run had come when this part of it began."""

    seconds: float = 0.0
    samples: int = 0

    @classmethod
    def of(cls, state: TrainState) -> Progress:
        """Return how far a run has come now."""
        return cls(state.own_seconds, state.samples)


def result_of(run: Run, *, since: Progress) -> FitResult:
    """Return what a run has come to; its speed is that of the part `since` the given point."""
    state = run.state
    seconds = state.own_seconds - since.seconds
    return FitResult(
        metrics=dict(state.metrics),
        steps=state.step,
        epochs=state.epochs,
        samples=state.samples,
        seconds=state.own_seconds,
        samples_per_second=(state.samples - since.samples) / seconds if seconds > 0 else 0.0,
        exit_reason=run.stop_reason or "finished",
        run_dir=run.run_dir,
    )
