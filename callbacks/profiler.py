"""A short window of training under torch's profiler, and how much of the device's speed is used."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from trainkit.callback import Callback
from trainkit.console import Table, show
from trainkit.errors import UserError
from trainkit.step_cost import FlopCount

from .device_peaks import peak_of
from .overlap_window import OverlapWindow

if TYPE_CHECKING:
    from trainkit.run import Run

logger = logging.getLogger(__name__)

RECORD = "profile.json"
TRACE = "profile_trace_rank_{rank}.json"
_ROWS = 15
_NAME_LENGTH = 60


class Profiler(Callback):
    """Profiles some steps, writes a Chrome trace of them, and shows the operations that took most time.

        step    5 ... 8   9             10 ... 15            16
                overlap   counts FLOPs  recorded, main rank  trace and table are written

    Overlap is how much of the communication is hidden behind computation, in one line for each strategy.

    Adds `train/flops_per_second` to what is logged afterwards, and `train/mfu`, its share of the peak of all devices,
    where that is known. Steps count from where this part of the run began. Recorded steps are slower than others.

    Args:
        first: The first step that is recorded.
        last: The last one.
        memory: Whether to record what operations allocate.
        stacks: Whether to record where in the source operations were called.
        peak_tflops: What one device can do at most in the run's precision, in 1e12 operations a second; `None`: as the
            maker says for this model, where that is known.

    """

    def __init__(
        self,
        *,
        first: int = 10,
        last: int = 15,
        memory: bool = False,
        stacks: bool = False,
        peak_tflops: float | None = None,
    ) -> None:
        if not 3 <= first <= last:
            raise UserError(f"profiler.first={first} and last={last}: 3 <= first <= last is needed; write first=10.")
        if peak_tflops is not None and not peak_tflops > 0:
            raise UserError(f"profiler.peak_tflops must be above 0, got {peak_tflops}.")
        self.first, self.last = first, last
        self.memory, self.stacks = memory, stacks
        self.peak_tflops = peak_tflops
        self._overlap = OverlapWindow(end=first - 2)
        self._began = 0
        self._counting: ExitStack | None = None
        self._counted: list[int] = []
        self._profile: Any = None
        self._own_flops: float | None = None
        self._flops: float | None = None  # of one step, on all ranks
        self._record: dict[str, Any] = {}
        self._since, self._since_step = 0.0, 0
        self._evaluating_since = self._evaluating = 0.0

    def on_fit_start(self, run: Run) -> None:
        self._began = run.state.step
        self._overlap = OverlapWindow(end=self.first - 2)
        self._own_flops = self._flops = None
        self._record = {}
        self._since, self._since_step = time.perf_counter(), run.state.step

    def on_step_end(self, run: Run) -> None:
        step = run.state.step - self._began
        if step > self.last:
            return
        self._overlap.on_step_end(run, step)
        if step == self.first - 2:
            self._start_counting(run)
        elif step == self.first - 1:
            self._stop_counting()
            if run.is_main and run.run_dir is not None:
                self._start_recording(run)
        elif step == self.last:
            self._stop_recording(run)

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._stop_counting()  # the step has been made
        self._evaluating_since = time.perf_counter()
        self._overlap.on_evaluation_start()

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._evaluating += time.perf_counter() - self._evaluating_since
        self._overlap.on_evaluation_end()

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        if self._flops is None and run.state.step - self._began >= self.first:
            # Every rank comes here after the same step, and with pipelines each has counted its own stages.
            self._flops = sum(run.strategy.comm.all_gather_object(self._own_flops or 0.0))
        now, steps = time.perf_counter(), run.state.step - self._since_step
        seconds = now - self._since - self._evaluating
        # The steps that were recorded are slower than others.
        recorded = self._since_step - self._began < self.last
        if self._flops and not recorded and steps > 0 and seconds > 0:
            self._measure(run, metrics, self._flops * steps / seconds)
        self._since, self._since_step, self._evaluating = now, run.state.step, 0.0

    def on_fit_end(self, run: Run) -> None:
        self._stop_counting()
        self._stop_recording(run)
        if self._flops:
            self._record["flops_per_step"] = self._flops
        if self._overlap.record:
            self._record["overlap"] = self._overlap.record
        self._write(run)

    def close(self) -> None:
        self._stop_counting()
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._profile = None

    # ---- Arithmetic

    def _start_counting(self, run: Run) -> None:
        counted, thread = self._counted, get_ident()
        counted.clear()

        def in_a_replicas_thread() -> FlopCount | None:
            return None if get_ident() == thread else FlopCount(counted.append)

        self._counting = ExitStack()
        self._counting.enter_context(FlopCount(counted.append))
        self._counting.callback(run.precision.surround(in_a_replicas_thread))

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.close()
            self._own_flops = float(sum(self._counted))
            self._counting = None

    def _measure(self, run: Run, metrics: dict[str, float], flops_per_second: float) -> None:
        metrics["train/flops_per_second"] = self._record["flops_per_second"] = flops_per_second
        peak, note = self._peak(run)
        if peak is not None:
            metrics["train/mfu"] = self._record["mfu"] = flops_per_second / (peak * run.strategy.comm.num_devices)
            self._record["peak_note"] = note

    def _peak(self, run: Run) -> tuple[float | None, str]:
        if self.peak_tflops is not None:
            return self.peak_tflops * 1e12, f"of {self.peak_tflops:g} TFLOP/s for each device, as given"
        return peak_of(run.strategy.device, precision=run.precision.name, tf32=run.precision.tf32)

    # ---- Operations

    def _start_recording(self, run: Run) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if run.strategy.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        recording: AbstractContextManager[Any] = profile(
            activities=activities, profile_memory=self.memory, with_stack=self.stacks
        )
        recording.__enter__()
        self._profile = recording

    def _stop_recording(self, run: Run) -> None:
        if self._profile is None:
            return
        recording, self._profile = self._profile, None
        if run.strategy.device.type == "cuda":
            torch.cuda.synchronize(run.strategy.device)  # the trace is to hold what was started
        recording.__exit__(None, None, None)
        assert run.run_dir is not None
        trace = run.run_dir / TRACE.format(rank=run.strategy.comm.process)
        recording.export_chrome_trace(str(trace))
        on_device = run.strategy.device.type == "cuda"
        operations = _operations(recording.key_averages(), on_device=on_device)
        self._record.update(
            first_step=self._began + self.first,
            last_step=min(run.state.step, self._began + self.last),
            on_device=on_device,
            operations=operations,
            peak_bytes=run.peak_memory.of_run() if on_device else None,
            overlap=self._overlap.record,
        )
        self._write(run)
        logger.info("the trace of steps %d to %d is in %s", self._began + self.first, self._began + self.last, trace)
        rows: list[Sequence[str]] = [
            [row["name"], str(row["calls"]), f"{1e3 * row['self_seconds']:.2f}", f"{row['share']:.1%}"]
            for row in operations
        ]
        show(Table("operations", ["name", "calls", "own ms", "share"], rows[:_ROWS]))

    def _write(self, run: Run) -> None:
        if run.is_main and run.run_dir is not None and self._record:
            (run.run_dir / RECORD).write_text(json.dumps(self._record, indent=2) + "\n", encoding="utf-8")


def _operations(averages: Any, *, on_device: bool) -> list[dict[str, Any]]:
    """Return the operations that took most time of their own, the longest first."""
    name = "self_device_time_total" if on_device else "self_cpu_time_total"
    found = [(float(getattr(event, name)), event) for event in averages]
    total = sum(time_of for time_of, _ in found) or 1.0
    longest = sorted(found, key=lambda pair: -pair[0])[:_ROWS]
    return [
        {
            "name": str(event.key)[:_NAME_LENGTH],
            "calls": int(event.count),
            "self_seconds": time_of / 1e6,
            "share": time_of / total,
        }
        for time_of, event in longest
        if time_of > 0
    ]
