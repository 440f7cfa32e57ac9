"""Profile of some steps with torch.profiler, overlap of communication, and model FLOPs utilization."""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import ExitStack
from threading import get_ident
from typing import Annotated, Any

from annotated_types import Gt

from trainkit.callback import Callback
from trainkit.console import Table, say, show
from trainkit.devices import has_streams, name_of, profiled_by, synchronize
from trainkit.errors import UserError
from trainkit.files import open_new, optional_file, write_optional
from trainkit.model.flops import FlopCount
from trainkit.profiling import NO_COMMUNICATION
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.strategy import SupportsOverlapProfile

logger = logging.getLogger(__name__)

RECORD = "profile.json"
TRACE = "profile_trace_rank_{rank}.json"
_ROWS = 15
_NAME_LENGTH = 60
_OVERLAP_STEPS = 4
_MIN_OVERLAP_STEPS = 2  # some strategies report a step when the next one starts
_WARMUP_STEPS = 2  # until buckets keep their layout


# TFLOP/s in half precision (bf16, fp16), in TF32 and in fp32. The longest key in the device's name applies.
_PEAKS = {
    "V100": (125.0, 15.7, 15.7),
    "T4": (65.0, 8.1, 8.1),
    "A100": (312.0, 156.0, 19.5),
    "A10": (125.0, 62.5, 31.2),
    "A10G": (70.0, 35.0, 31.5),
    "A30": (165.0, 82.0, 10.3),
    "A40": (149.7, 74.8, 37.4),
    "L4": (121.0, 60.0, 30.3),
    "L40": (181.0, 90.5, 90.5),
    "L40S": (362.0, 183.0, 91.6),
    "H100": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H200": (989.4, 494.7, 66.9),
    "B200": (2250.0, 1125.0, 80.0),
    "RTX 3090": (71.0, 35.6, 35.6),
    "RTX 4090": (165.2, 82.6, 82.6),
}


class Profiler(Callback):
    """Profiles some steps, writes a Chrome trace, and prints the operations that took most time.

        step    5 ... 8   9             10 ... 15            16
                overlap   counts FLOPs  recorded, main rank  trace and table are written

    Overlap is the fraction of communication that is hidden behind computation.

    Later log points have `train/flops_per_second` and, if the peak of the devices is known, the fraction of it that is
    used, `train/mfu`. Steps count from the start or resume of this run. Recorded steps are slower than others.

    Args:
        start_step: First recorded step.
        end_step: Last recorded step.
        profile_memory: Record the allocations of operations.
        with_stack: Record the source lines of operations.
        peak_tflops: Peak of one device in the run's precision, in TFLOP/s; `None` takes the vendor's figure, if the
            device is known.

    """

    def __init__(
        self,
        *,
        start_step: int = 10,
        end_step: int = 15,
        profile_memory: bool = False,
        with_stack: bool = False,
        peak_tflops: Annotated[float, Gt(0)] | None = None,
    ) -> None:
        check_arguments(Profiler.__init__, locals(), of="profiler")
        if not 3 <= start_step <= end_step:
            raise UserError(
                f"profiler.start_step={start_step} and end_step={end_step}: 3 <= start_step <= end_step must hold; "
                "write start_step=10."
            )
        self.start_step, self.end_step = start_step, end_step
        self.profile_memory, self.with_stack = profile_memory, with_stack
        self.peak_tflops = peak_tflops
        # The step between is the one whose FLOPs are counted.
        self._overlap_end = start_step - 2  # before the slower recorded steps
        self._overlap_start = max(self._overlap_end - _OVERLAP_STEPS, _WARMUP_STEPS)
        self._overlap_since = 0.0
        self._first_step = 0
        self._counting: ExitStack | None = None
        self._counted: list[int] = []
        self._profile: Any = None
        self._local_flops: float | None = None
        self._flops: float | None = None  # of one step, on all ranks
        self._record: dict[str, Any] = {}
        self._since, self._since_step = 0.0, 0
        self._evaluating_since = self._evaluating = 0.0

    def on_fit_start(self, run: Run) -> None:
        self._first_step = run.state.step
        self._local_flops = self._flops = None
        self._record = {}
        self._since, self._since_step = time.perf_counter(), run.state.step

    def on_step_complete(self, run: Run) -> None:
        step = run.state.step - self._first_step
        if step > self.end_step:
            return
        self._profile_overlap(run, step)
        if step == self.start_step - 2:
            self._start_counting(run)
        elif step == self.start_step - 1:
            self._stop_counting()
            if run.is_main and run.run_dir is not None:
                self._start_recording(run)
        elif step == self.end_step:
            self._stop_recording(run)

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._stop_counting()  # the step has been made
        self._evaluating_since = time.perf_counter()

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        seconds = time.perf_counter() - self._evaluating_since
        self._evaluating += seconds
        self._overlap_since += seconds

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        if self._flops is None and run.state.step - self._first_step >= self.start_step:
            # Every rank is here after the same step; ranks of a pipeline have counted their own stages.
            self._flops = sum(run.strategy.comm.all_gather_object(self._local_flops or 0.0))
        now, steps = time.perf_counter(), run.state.step - self._since_step
        seconds = now - self._since - self._evaluating
        is_slowed = self._since_step - self._first_step < self.end_step  # by recording
        if self._flops and not is_slowed and steps > 0 and seconds > 0:
            self._measure(run, metrics, self._flops * steps / seconds)
        self._since, self._since_step, self._evaluating = now, run.state.step, 0.0

    def on_fit_end(self, run: Run) -> None:
        self._stop_counting()
        self._stop_recording(run)
        if self._flops:
            self._record["flops_per_step"] = self._flops
        self._write(run)

    def close(self) -> None:
        self._stop_counting()
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._profile = None

    # ---- Overlap

    def _profile_overlap(self, run: Run, step: int) -> None:
        """Start or finish the measurement; `step` counts from the start of this run."""
        has_room = self._overlap_end - self._overlap_start >= _MIN_OVERLAP_STEPS
        if step == self._overlap_start and has_room:
            if isinstance(run.strategy, SupportsOverlapProfile):
                run.strategy.start_overlap_profile()
            self._overlap_since = _now(run)
        elif step == self._overlap_end:
            self._finish_overlap(run, _now(run) - self._overlap_since, has_room=has_room)

    def _finish_overlap(self, run: Run, seconds: float, *, has_room: bool) -> None:
        steps = max(self._overlap_end - self._overlap_start, 1)
        if isinstance(run.strategy, SupportsOverlapProfile):
            overlap = run.strategy.stop_overlap_profile(steps)
        else:
            overlap = NO_COMMUNICATION if run.strategy.comm.num_processes == 1 else None
        name = type(run.strategy).__name__
        if overlap is not None:
            record = overlap.record(strategy=name, step_seconds=seconds / steps if has_room else 0.0)
        elif not has_room:
            record = {"line": "overlap: not measured; it needs profiler.start_step=6 or later"}
        else:
            record = {"line": f"overlap: unknown for {name} on {run.strategy.device.type}; see the trace"}
        if run.is_main:
            self._record["overlap"] = record
            say(record["line"])

    # ---- FLOPs

    def _start_counting(self, run: Run) -> None:
        counted, thread = self._counted, get_ident()
        counted.clear()

        def count_in_replica_thread() -> FlopCount | None:
            return None if get_ident() == thread else FlopCount(counted.append)

        self._counting = ExitStack()
        self._counting.enter_context(FlopCount(counted.append))
        self._counting.callback(run.precision.surround(count_in_replica_thread))

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.close()
            self._local_flops = float(sum(self._counted))
            self._counting = None

    def _measure(self, run: Run, metrics: dict[str, float], flops_per_second: float) -> None:
        metrics["train/flops_per_second"] = self._record["flops_per_second"] = flops_per_second
        device, note = run.strategy.device, ""
        peak: float | None = None
        if self.peak_tflops is not None:
            peak, note = self.peak_tflops * 1e12, f"of {self.peak_tflops:g} TFLOP/s per device, as given"
        elif has_streams(device):
            peak, note = peak_of_model(name_of(device), precision=run.precision.name, tf32=run.precision.tf32)
        if peak is not None:
            metrics["train/mfu"] = self._record["mfu"] = flops_per_second / (peak * run.strategy.comm.num_devices)
            self._record["peak_note"] = note

    # ---- Operations

    def _start_recording(self, run: Run) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *profiled_by(run.strategy.device)]
        self._profile = profile(
            activities=activities,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            acc_events=True,  # or torch 2.11 warns of cycles, of which there is one
        )
        self._profile.__enter__()

    def _stop_recording(self, run: Run) -> None:
        if self._profile is None:
            return
        recording, self._profile = self._profile, None
        on_device = bool(profiled_by(run.strategy.device))
        synchronize(run.strategy.device)  # or the trace lacks the last kernels
        recording.__exit__(None, None, None)
        assert run.run_dir is not None
        trace = run.run_dir / TRACE.format(rank=run.strategy.comm.process)
        with optional_file(trace):
            os.close(open_new(trace))
            # The file exists already, made by open_new, which follows no link.
            recording.export_chrome_trace(str(trace))
        first, last = self._first_step + self.start_step, min(run.state.step, self._first_step + self.end_step)
        operations = _operations(recording.key_averages(), on_device=on_device)
        self._record.update(
            first_step=first,
            last_step=last,
            on_device=on_device,
            operations=operations,
            peak_bytes=run.peak_memory.of_run() if on_device else None,
        )
        self._write(run)
        logger.info("the trace of steps %d to %d is in %s", first, last, trace)
        table = Table("operations", ["name", "calls", "self ms", "fraction"])
        for row in operations:
            table.rows.append(
                [row["name"], str(row["calls"]), f"{1e3 * row['self_seconds']:.2f}", f"{row['share']:.1%}"]
            )
        show(table)

    def _write(self, run: Run) -> None:
        if run.is_main and run.run_dir is not None and self._record:
            write_optional(run.run_dir / RECORD, json.dumps(self._record, indent=2) + "\n")


def _now(run: Run) -> float:
    # Kernels run later than Python: without this the time is that of their launch.
    synchronize(run.strategy.device)
    return time.perf_counter()


def _operations(averages: Any, *, on_device: bool) -> list[dict[str, Any]]:
    """Return the operations with the most self time, the longest first."""
    name = "self_device_time_total" if on_device else "self_cpu_time_total"
    timed = [(float(getattr(event, name)), event) for event in averages]  # microseconds
    total = sum(duration for duration, _ in timed) or 1.0
    return [
        {
            "name": str(event.key)[:_NAME_LENGTH],
            "calls": int(event.count),
            "self_seconds": duration / 1e6,
            "share": duration / total,
        }
        for duration, event in sorted(timed, key=lambda pair: -pair[0])[:_ROWS]
        if duration > 0
    ]


def peak_of_model(name: str, *, precision: str, tf32: bool) -> tuple[float | None, str]:
    """Return the peak of a device in FLOP/s by its name, `None` if it is unknown, and a note for the report."""
    # Between spaces, so that `A10` does not match `A100`.
    words = f" {name.replace('-', ' ')} "
    models = [model for model in _PEAKS if f" {model} " in words]
    if not models or precision == "fp64":
        return None, ""
    half, with_tf32, single = _PEAKS[max(models, key=len)]
    value = half if precision != "fp32" else with_tf32 if tf32 else single
    return value * 1e12, f"of {value:g} TFLOP/s per device ({name}, {precision}{' with TF32' if tf32 else ''})"
