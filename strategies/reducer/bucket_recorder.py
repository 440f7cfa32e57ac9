"""Timeline of the buckets of a step: their trace, how much backward hid, and suggested changes."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from trainkit.files import write_optional
from trainkit.profiling import Overlap, TimelineFigure, TimelineSpan, Track, covered_seconds
from trainkit.profiling import Timeline as DrawnTimeline

from ..transports.hosts import Link, slow_host
from .unused_parameters import make_plan

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
    """One step: the forward and backward of its last micro-batch, its buckets, and when each gradient arrived."""

    step: int
    begin: float
    backward_end: float
    end: float
    buckets: tuple[BucketTimes, ...]
    forward_end: float | None = None  # `None`: not known, everything counts as backward
    arrivals: Mapping[str, float] = field(default_factory=dict)  # by parameter; those without a gradient are missing

    @property
    def backward_begin(self) -> float:
        """Start of backward."""
        return self.begin if self.forward_end is None else self.forward_end

    @property
    def backward(self) -> float:
        """Seconds of backward."""
        return self.backward_end - self.backward_begin

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
    """Records the times of the last steps of one rank, in which a bucket is called `word`.

    The advice names the settings `size_key`, the size of a bucket in MiB, and `compressed`, which reduces the bytes; it
    is empty if none does.
    """

    def __init__(
        self,
        rank: int,
        word: str = "bucket",
        *,
        size_key: str = "strategy.bucket_cap_mb",
        compressed: str = "strategy.reduce_dtype=bf16",
    ) -> None:
        self.rank, self.word, self.size_key, self.compressed = rank, word, size_key, compressed
        self.steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self.forward_began = 0.0  # set where a forward comes before the Reducer's step
        self.links: list[Link] = []  # between hosts, of all ranks; known at the end of training
        self._backward_began = 0.0
        self._reducer: Reducer | None = None  # recorded last

    def mark_backward(self) -> None:
        """Record the end of a forward and the start of its backward."""
        self._backward_began = time.perf_counter()

    def record(self, reducer: Reducer) -> None:
        """Record the step that the Reducer has just finished."""
        buckets = tuple(BucketTimes(b.ready_at, b.launched_at, b.finished_at, b.num_bytes) for b in reducer.buckets)
        # A mark may be of an earlier step, or of a micro-batch that was only accumulated.
        marked = reducer.began_at < self._backward_began < reducer.backward_ended_at
        forward_end = self._backward_began if marked else None
        begin, backward_end, end = reducer.began_at, reducer.backward_ended_at, reducer.ended_at
        # In the drop-in the Reducer's step begins with backward, under a strategy with the forward before it.
        if self.forward_began:
            begin, forward_end, self.forward_began = self.forward_began, begin, 0.0
        # Not strict: the list is empty for a step that had begun before recording did.
        arrivals = {entry.name: at for entry, at in zip(reducer.entries, reducer.arrived_at, strict=False) if at}
        # The Reducer counts a step before it is recorded.
        self.steps.append(StepTimes(reducer.step - 1, begin, backward_end, end, buckets, forward_end, arrivals))
        self._reducer = reducer

    def arrivals(self) -> dict[str, float]:
        """Return the seconds from the start of backward to each gradient, in order: means over the recorded steps."""
        times_by_name: dict[str, list[float]] = {}
        for step in self.steady_steps():
            for name, at in step.arrivals.items():
                times_by_name.setdefault(name, []).append(at - step.backward_begin)
        return dict(sorted(((name, mean(times)) for name, times in times_by_name.items()), key=lambda item: item[1]))

    def ideal_buckets(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket if these were filled in the order of `arrivals`.

        Parameters without a gradient come last. Empty before the second recorded step.
        """
        arrivals = self.arrivals()
        if self._reducer is None or not arrivals:
            return []
        entries = self._reducer.entries
        names = [entry.name for entry in entries]
        # Without a gradient in reverse order, as in the plan that the Reducer makes.
        order = sorted(range(len(names)), key=lambda index: (arrivals.get(names[index], float("inf")), -index))
        unused = [index for index, name in enumerate(names) if name not in arrivals]
        plan = make_plan(entries, settings=self._reducer.settings, order=order, apart=unused)
        return [[names[index] for index in bucket.parameters] for bucket in plan.buckets]

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
        last, slow = steps[-1], slow_host(self.links)
        advice = [] if slow is None else [slow]
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
        elif exposed > 0.5 and matters and last.communication > last.backward:
            compressed = f"{self.compressed}, or " if self.compressed else ""
            advice.append(
                f"Communication takes longer than backward, so it cannot be hidden. Try {compressed}"
                "more samples in a step (strategy.accumulate)."
            )
        blocked = [number for number, b in enumerate(last.buckets) if b.launched - b.ready > 0.25 * last.backward]
        if blocked:
            advice.append(
                f"{self.word.capitalize()} {blocked[0]} was ready long before it was started: an earlier one waited "
                "for parameters that get no gradient in most steps. Try strategy.find_unused_parameters=graph."
            )
        return advice

    def summary(self) -> list[str]:
        """Return the hidden share and the advice, to be logged; empty without steps."""
        steps = self.steady_steps()
        if not steps:
            return []
        milliseconds = 1e3 * sum(step.communication for step in steps) / len(steps)
        hidden = f"{self.hidden_share:.0%} of communication ({milliseconds:.1f} ms a step) ran behind backward"
        return [hidden, *self.advice()]

    def figure(self, *, strategy: str) -> DrawnTimeline | None:
        """Return the step of median length for the report; `None` without steps."""
        steps = self.steady_steps()
        if not steps:
            return None
        step = sorted(steps, key=lambda step_times: step_times.end - step_times.begin)[len(steps) // 2]
        last, count = steps[-1], len(steps)
        communication = sum(step.communication for step in steps) / count
        waited = sum(step.end - step.backward_end for step in steps) / count
        plural = "s" * (len(last.buckets) > 1)
        figures = [
            TimelineFigure("communication hidden behind backward", self.hidden_share, note=f"over {count} steps"),
            TimelineFigure("communication of a step", communication, "seconds"),
            TimelineFigure("waited after backward", waited, "seconds"),
            TimelineFigure(
                f"gradients in {len(last.buckets)} {self.word}{plural}", sum(b.num_bytes for b in last.buckets), "bytes"
            ),
        ]
        # The length varies from step to step, so one step is drawn; the figures are means.
        title = f"Forward and backward of the last micro-batch on rank {self.rank}, and its {self.word}s"
        tracks = self._tracks(step)[: MAX_TRACKS + 1]
        return DrawnTimeline(strategy, title, tracks, step.step + 1, figures, self.advice())

    def trace(self) -> dict[str, Any]:
        """Return the steps as a Chrome trace, to be opened in chrome://tracing or ui.perfetto.dev."""
        # Chrome's trace format: "X" is a bar with a duration, "i" an instant; times are in microseconds.
        events = [
            {
                "name": f"step {step.step}: {span.kind} {span.name}",
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": max(span.end - span.start, 0.0) * 1e6,
                "pid": self.rank,
                "tid": track.name,
            }
            for step in self.steps
            for track in self._tracks(step)
            for span in track.spans
        ]
        events += [
            {"name": name, "ph": "i", "s": "t", "ts": at * 1e6, "pid": self.rank, "tid": "gradients"}
            for step in self.steps
            for name, at in step.arrivals.items()
        ]
        other = {"hidden_share": self.hidden_share, "advice": self.advice(), "ideal_buckets": self.ideal_buckets()}
        other["links"] = [f"{link.host} to {link.peer}: {link.megabits:.0f} Mbit/s" for link in self.links]
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def write(self, path: Path) -> None:
        """Write the trace to `path`."""
        write_optional(path, json.dumps(self.trace()))

    def steady_steps(self) -> list[StepTimes]:
        """Return the steps without the first, which is reduced at its end only."""
        return [step for step in self.steps if step.step > 0]

    def _tracks(self, step: StepTimes) -> list[Track]:
        spans = [
            TimelineSpan("backward", step.backward_begin, step.backward_end),
            TimelineSpan("wait", step.backward_end, step.end, "waits for communication"),
        ]
        if step.forward_end is not None:
            spans.insert(0, TimelineSpan("forward", step.begin, step.forward_end))
        tracks = [Track("compute", spans)]
        for number, bucket in enumerate(step.buckets):
            name = f"{bucket.num_bytes / MIB:.2f} MiB"
            spans = [TimelineSpan("communication", bucket.launched, bucket.finished, name)]
            if bucket.launched - bucket.ready > 1e-5:  # seconds; a bucket that is started at once takes less
                why = f"{name} ready, an earlier one is not"
                spans.insert(0, TimelineSpan("blocked", bucket.ready, bucket.launched, why))
            tracks.append(Track(f"{self.word} {number}", spans))
        return tracks


class OverlapMeter:
    """Measures how much of the reductions backward hides, until it is closed.

    There is one Reducer for each phase of a task; `timeline` is empty.
    """

    def __init__(self, reducers: Collection[Reducer], timeline: Timeline) -> None:
        self._reducers, self._timeline = reducers, timeline
        for reducer in reducers:
            reducer.after_step.append(timeline.record)

    def close(self, steps: int) -> Overlap | None:
        """Stop measuring and return the means over `steps`; `None` without measured steps, or on a CUDA device."""
        for reducer in self._reducers:
            reducer.after_step.remove(self._timeline.record)
        measured = self._timeline.steady_steps()
        # On CUDA these times are those at which kernels were queued, not run.
        if not steps or not measured or any(reducer.device.type != "cpu" for reducer in self._reducers):
            return None
        communication = sum(step.communication for step in measured) / steps
        hidden = sum(step.hidden for step in measured) / steps
        return Overlap(communication - hidden, communication, steps, note="behind backward, on this rank")


def logging_times(steps: Sequence[StepTimes]) -> dict[str, int]:
    """Return the times of the last step and their means, in nanoseconds, under the names of PyTorch's logging data."""
    if not steps:
        return {}
    last, buckets = steps[-1], steps[-1].buckets
    times = {
        "forward_compute_time": [step.backward_begin - step.begin for step in steps],
        "backward_compute_time": [step.backward for step in steps],
        "backward_comm_time": [step.communication for step in steps],
        "backward_compute_comm_overlap_time": [step.hidden for step in steps],
    }
    moments = {
        "forward_compute_time_start": last.begin,
        "backward_compute_time_start": last.backward_begin,
        "backward_compute_time_end": last.backward_end,
        "backward_comm_time_start": min(bucket.launched for bucket in buckets),
        "backward_comm_time_end": max(bucket.finished for bucket in buckets),
    }
    fields = {"iteration": last.step} | {name: int(1e9 * values[-1]) for name, values in times.items()}
    fields |= {f"avg_{name}": int(1e9 * mean(values)) for name, values in times.items()}
    return fields | {name: int(1e9 * value) for name, value in moments.items()}
