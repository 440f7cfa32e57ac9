"""Timeline of the buckets of a step: their trace, how much backward hid, and suggested changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.profiling import Overlap, TimelineFigure, TimelineSpan, Track, covered_seconds
from trainkit.profiling import Timeline as DrawnTimeline

if TYPE_CHECKING:
    from .reducer import Reducer

MAX_STEPS = 200  # recorded
MAX_TRACKS = 60  # buckets in the figure
SMALL_SECONDS = 0.0003  # a shorter reduction costs more to start than to run
MIN_ADVICE_FRACTION = 0.03  # of a step; exposed communication below it gets no advice
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
    """One step: the forward and backward of its last micro-batch, and its buckets."""

    step: int
    begin: float
    backward_end: float
    end: float
    buckets: tuple[BucketTimes, ...]
    forward_end: float | None = None
    """Start of backward; `None`: not known, everything counts as backward."""

    @property
    def backward_begin(self) -> float:
        """Start of backward."""
        return self.begin if self.forward_end is None else self.forward_end

    @property
    def communication(self) -> float:
        """Seconds in which any bucket was under way."""
        return covered_seconds(self._spans())

    @property
    def hidden(self) -> float:
        """Seconds of communication during backward."""
        return covered_seconds([(start, min(end, self.backward_end)) for start, end in self._spans()])

    def _spans(self) -> list[tuple[float, float]]:
        return [(bucket.launched, bucket.finished) for bucket in self.buckets]


class Timeline:
    """Records the times of the last steps of one rank.

    Args:
        rank: This rank.
        word: Name of a bucket in the picture.
        size_key: Config key of the size of a bucket in MiB.
        compressed: Setting that reduces the bytes, for the advice.

    """

    def __init__(
        self,
        *,
        rank: int,
        word: str = "bucket",
        size_key: str = "strategy.bucket_cap_mb",
        compressed: str = "strategy.comm_hook=bf16",
    ) -> None:
        self.rank = rank
        self.word, self.size_key = word, size_key
        self.compressed = compressed
        self.steps: list[StepTimes] = []
        self._backward_began = 0.0

    def mark_backward(self) -> None:
        """Record the end of a forward and the start of its backward."""
        self._backward_began = time.perf_counter()

    def record(self, reducer: Reducer) -> None:
        """Record the step that the Reducer has just finished."""
        buckets = tuple(BucketTimes(b.ready_at, b.launched_at, b.finished_at, b.num_bytes) for b in reducer.buckets)
        marked = reducer.began_at < self._backward_began < reducer.backward_ended_at
        times = StepTimes(
            reducer.step - 1,
            reducer.began_at,
            reducer.backward_ended_at,
            reducer.ended_at,
            buckets,
            forward_end=self._backward_began if marked else None,
        )
        self.steps.append(times)
        if len(self.steps) > MAX_STEPS:
            del self.steps[0]

    @property
    def hidden_share(self) -> float:
        """Fraction of communication that ran behind backward, over all recorded steps; 1.0 without communication."""
        steps = self.steady_steps()
        total = sum(step.communication for step in steps)
        return sum(step.hidden for step in steps) / total if total else 1.0

    def advice(self) -> list[str]:
        """Return sentences that name settings to change; empty if none would help."""
        steps = self.steady_steps()
        if not steps:
            return []
        last, advice = steps[-1], []
        sizes = [bucket.num_bytes for bucket in last.buckets]
        exposed = 1.0 - self.hidden_share
        waited = sum(step.communication - step.hidden for step in steps)
        matters = waited > MIN_ADVICE_FRACTION * sum(step.end - step.begin for step in steps)
        short = [b for b in last.buckets if b.finished - b.launched < SMALL_SECONDS]
        if len(sizes) == 1 and exposed > 0.5 and matters:
            advice.append(
                f"All gradients are in one {self.word}, which can only start at the end of backward. "
                f"Try {self.size_key}={max(sizes[0] / MIB / 4, 0.1):.1f}."
            )
        elif len(short) > 8 and len(short) > len(sizes) / 2:
            advice.append(
                f"{len(short)} of {len(sizes)} {self.word}s take less than 0.3 ms each. "
                f"Try {self.size_key}={4 * sum(sizes) / len(sizes) / MIB:.1f}."
            )
        elif exposed > 0.5 and matters and last.communication > _backward(last):
            advice.append(
                f"Communication takes longer than backward, so it cannot be hidden. Try {self.compressed}, "
                "or more samples in a step (strategy.accumulate)."
            )
        blocked = [number for number, b in enumerate(last.buckets) if b.launched - b.ready > 0.25 * _backward(last)]
        if blocked:
            advice.append(
                f"{self.word.capitalize()} {blocked[0]} was ready long before it was started: an earlier one waited "
                "for parameters that get no gradient in most steps. Try strategy.find_unused_parameters=graph."
            )
        return advice

    def summary(self) -> list[str]:
        """Return the hidden share, a picture of the last step, and the advice, to be logged; empty without steps."""
        steps = self.steady_steps()
        if not steps:
            return []
        milliseconds = 1e3 * sum(step.communication for step in steps) / len(steps)
        hidden = f"{self.hidden_share:.0%} of communication ({milliseconds:.1f} ms a step) ran behind backward"
        return [f"{hidden}; one step:\n{self.draw()}", *self.advice()]

    def figure(self, *, strategy: str) -> DrawnTimeline | None:
        """Return the step of median length for the report; `None` without steps."""
        steps = self.steady_steps()
        if not steps:
            return None
        step = sorted(steps, key=lambda one: one.end - one.begin)[len(steps) // 2]
        shown = step.buckets[:MAX_TRACKS]
        tracks = [Track("compute", _compute_spans(step))]
        tracks += [Track(f"{self.word} {number}", _bucket_spans(bucket)) for number, bucket in enumerate(shown)]
        return DrawnTimeline(
            strategy,
            f"Forward and backward of the last micro-batch on rank {self.rank}, and its {self.word}s",
            tracks,
            step.step + 1,
            _figures(steps, self.hidden_share, word=self.word),
            self.advice(),
        )

    def trace(self) -> dict[str, Any]:
        """Return the steps as a Chrome trace, to be opened in chrome://tracing or ui.perfetto.dev."""
        events: list[dict[str, Any]] = []
        for step in self.steps:
            if step.forward_end is not None:
                events.append(self._event(f"step {step.step}: forward", "backward", step.begin, step.forward_end))
            name = f"step {step.step}: backward"
            events.append(self._event(name, "backward", step.backward_begin, step.backward_end))
            events.append(self._event(f"step {step.step}: wait", "backward", step.backward_end, step.end))
            for number, bucket in enumerate(step.buckets):
                row = f"{self.word} {number}"
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
        """Return the last step as a picture: `=` under way, `.` ready but not started, `|` the end of backward.

        A `-` is the forward before it.
        """
        if not self.steps:
            return ""
        step = self.steps[-1]
        scale = width / max(step.end - step.begin, 1e-9)

        def column(moment: float) -> int:
            return min(max(int((moment - step.begin) * scale), 0), width)

        forward = column(step.backward_begin)
        lines = [f"backward  {'-' * forward}{'#' * (column(step.backward_end) - forward)}|"]
        for number, bucket in enumerate(step.buckets):
            ready, launched, finished = (column(t) for t in (bucket.ready, bucket.launched, bucket.finished))
            bar = " " * ready + "." * (launched - ready) + "=" * max(finished - launched, 1)
            lines.append(f"{self.word} {number:<3}{bar}")
        return "\n".join(lines)

    def steady_steps(self) -> list[StepTimes]:
        """Return the steps without the first, which is reduced at its end only."""
        return [step for step in self.steps if step.step > 0]

    def _event(self, name: str, row: str, start: float, end: float) -> dict[str, Any]:
        duration = max(end - start, 0.0)
        return {"name": name, "ph": "X", "ts": start * 1e6, "dur": duration * 1e6, "pid": self.rank, "tid": row}


class OverlapMeter:
    """Measures how much of the reductions backward hides, until it is closed; `after_step` hooks stay in place.

    Args:
        reducers: One for each phase of a task.
        timeline: An empty timeline for the measured steps.

    """

    def __init__(self, reducers: Collection[Reducer], timeline: Timeline) -> None:
        self._timeline = timeline
        self._before = [(reducer, reducer.after_step) for reducer in reducers]
        for reducer, hook in self._before:
            reducer.after_step = timeline.record if hook is None else partial(_call_both, hook, timeline.record)

    def close(self, steps: int) -> Overlap | None:
        """Stop measuring and return the means over `steps`; `None` without measured steps, or on a CUDA device."""
        for reducer, hook in self._before:
            reducer.after_step = hook
        measured = self._timeline.steady_steps()
        if not steps or not measured or self._before[0][0].device.type != "cpu":
            return None
        communication = sum(step.communication for step in measured) / steps
        hidden = sum(step.hidden for step in measured) / steps
        return Overlap(communication - hidden, communication, steps, note="behind backward, on this rank")


def _backward(step: StepTimes) -> float:
    return step.backward_end - step.backward_begin


def _compute_spans(step: StepTimes) -> list[TimelineSpan]:
    spans = [
        TimelineSpan("backward", step.backward_begin, step.backward_end),
        TimelineSpan("wait", step.backward_end, step.end, "waits for communication"),
    ]
    return spans if step.forward_end is None else [TimelineSpan("forward", step.begin, step.forward_end), *spans]


def _bucket_spans(bucket: BucketTimes) -> list[TimelineSpan]:
    name = f"{bucket.num_bytes / MIB:.2f} MiB"
    spans = [TimelineSpan("communication", bucket.launched, bucket.finished, name)]
    if bucket.launched - bucket.ready > 1e-5:
        spans.insert(0, TimelineSpan("blocked", bucket.ready, bucket.launched, f"{name} ready, an earlier one is not"))
    return spans


def _figures(steps: list[StepTimes], hidden_share: float, *, word: str) -> list[TimelineFigure]:
    last, count = steps[-1], len(steps)
    total = sum(bucket.num_bytes for bucket in last.buckets)
    return [
        TimelineFigure("communication hidden behind backward", hidden_share, note=f"over {count} steps"),
        TimelineFigure("communication of a step", sum(step.communication for step in steps) / count, "seconds"),
        TimelineFigure("waited after backward", sum(step.end - step.backward_end for step in steps) / count, "seconds"),
        TimelineFigure(f"gradients in {len(last.buckets)} {word}{'s' * (len(last.buckets) > 1)}", total, "bytes"),
    ]


def _call_both(first: Callable[[Reducer], None], second: Callable[[Reducer], None], reducer: Reducer) -> None:
    first(reducer)
    second(reducer)
