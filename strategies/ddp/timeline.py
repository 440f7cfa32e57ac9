"""When each bucket was ready, started and done: a trace to look at, and what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .reducer import Reducer

MAX_STEPS = 200  # kept
SMALL_SECONDS = 0.0003  # a reduction this short costs more to start than to do
WORTH_ADVICE = 0.03  # of a step; communication that costs less is left alone
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """One bucket in one step, in seconds of one clock."""

    ready: float
    launched: float
    finished: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step: its backward and its buckets."""

    step: int
    begin: float
    backward_end: float
    end: float
    buckets: tuple[BucketTimes, ...]

    @property
    def communication(self) -> float:
        """Seconds in which some bucket was under way."""
        return _length(self._spans())

    @property
    def hidden(self) -> float:
        """Seconds of communication during which backward went on."""
        return _length([(start, min(end, self.backward_end)) for start, end in self._spans()])

    def _spans(self) -> list[tuple[float, float]]:
        return [(bucket.launched, bucket.finished) for bucket in self.buckets]


class Timeline:
    """Keeps the times of the last steps of one rank."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        self.steps: list[StepTimes] = []

    def record(self, reducer: Reducer) -> None:
        """Keep the step that the Reducer has just finished."""
        buckets = tuple(
            BucketTimes(b.ready_at, b.launched_at, b.finished_at, b.layout.numel * reducer.element_size(b))
            for b in reducer.buckets
        )
        times = StepTimes(reducer.step - 1, reducer.began_at, reducer.backward_ended_at, reducer.ended_at, buckets)
        self.steps.append(times)
        if len(self.steps) > MAX_STEPS:
            del self.steps[0]

    @property
    def hidden_share(self) -> float:
        """Share of communication that ran behind backward, over all steps kept; 1.0 without communication."""
        steps = self._steady()
        total = sum(step.communication for step in steps)
        return sum(step.hidden for step in steps) / total if total else 1.0

    def advice(self) -> list[str]:
        """Return what could be changed, in sentences; nothing if all is well."""
        steps = self._steady()
        if not steps:
            return []
        last, advice = steps[-1], []
        sizes = [bucket.num_bytes for bucket in last.buckets]
        exposed = 1.0 - self.hidden_share
        waited = sum(step.communication - step.hidden for step in steps)
        matters = waited > WORTH_ADVICE * sum(step.end - step.begin for step in steps)
        short = [b for b in last.buckets if b.finished - b.launched < SMALL_SECONDS]
        if len(sizes) == 1 and exposed > 0.5 and matters:
            advice.append(
                f"All gradients are in one bucket, which can only start at the end of backward. "
                f"Try strategy.bucket_mb={max(sizes[0] / MIB / 4, 0.1):.1f}."
            )
        elif len(short) > 8 and len(short) > len(sizes) / 2:
            advice.append(
                f"{len(short)} of {len(sizes)} buckets take less than 0.3 ms each. "
                f"Try strategy.bucket_mb={4 * sum(sizes) / len(sizes) / MIB:.1f}."
            )
        elif exposed > 0.5 and matters and last.communication > last.backward_end - last.begin:
            advice.append(
                "Communication takes longer than backward, so it cannot be hidden. Try strategy.hook=bf16, "
                "or more samples in a step (strategy.accumulate)."
            )
        blocked = [number for number, b in enumerate(last.buckets) if b.launched - b.ready > 0.25 * _backward(last)]
        if blocked:
            advice.append(
                f"Bucket {blocked[0]} was ready long before it was started: an earlier one waited for parameters "
                "that get no gradient in most steps. Try strategy.unused=find."
            )
        return advice

    def summary(self) -> list[str]:
        """Return the hidden share, a picture of the last step and the advice, to be logged; nothing without steps."""
        steps = self._steady()
        if not steps:
            return []
        milliseconds = 1e3 * sum(step.communication for step in steps) / len(steps)
        share = f"{self.hidden_share:.0%} of communication ({milliseconds:.1f} ms a step) ran behind backward"
        return [f"{share}; one step:\n{self.draw()}", *self.advice()]

    def trace(self) -> dict[str, Any]:
        """Return the steps as a Chrome trace, to be opened in chrome://tracing or ui.perfetto.dev."""
        events: list[dict[str, Any]] = []
        for step in self.steps:
            events.append(self._event(f"step {step.step}: backward", "backward", step.begin, step.backward_end))
            events.append(self._event(f"step {step.step}: wait", "backward", step.backward_end, step.end))
            for number, bucket in enumerate(step.buckets):
                row = f"bucket {number}"
                if bucket.launched - bucket.ready > 1e-5:
                    events.append(self._event("blocked", row, bucket.ready, bucket.launched))
                name = f"all_reduce {bucket.num_bytes / MIB:.2f} MiB"
                events.append(self._event(name, row, bucket.launched, bucket.finished))
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"hidden_share": self.hidden_share, "advice": self.advice()},
        }

    def write(self, path: Path) -> None:
        """Write the trace to `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.trace()))

    def draw(self, *, width: int = 60) -> str:
        """Return the last step as a picture: `=` under way, `.` ready but not started, `|` the end of backward."""
        if not self.steps:
            return ""
        step = self.steps[-1]
        scale = width / max(step.end - step.begin, 1e-9)

        def column(moment: float) -> int:
            return min(max(int((moment - step.begin) * scale), 0), width)

        lines = [f"backward  {'#' * column(step.backward_end)}|"]
        for number, bucket in enumerate(step.buckets):
            ready, launched, finished = (column(t) for t in (bucket.ready, bucket.launched, bucket.finished))
            bar = " " * ready + "." * (launched - ready) + "=" * max(finished - launched, 1)
            lines.append(f"bucket {number:<3}{bar}")
        return "\n".join(lines)

    def _steady(self) -> list[StepTimes]:
        """Return the steps but the first, which is reduced at its end only."""
        return [step for step in self.steps if step.step > 0]

    def _event(self, name: str, row: str, start: float, end: float) -> dict[str, Any]:
        duration = max(end - start, 0.0)
        return {"name": name, "ph": "X", "ts": start * 1e6, "dur": duration * 1e6, "pid": self.rank, "tid": row}


def _backward(step: StepTimes) -> float:
    return step.backward_end - step.begin


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that the spans cover together."""
    total, covered = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total
