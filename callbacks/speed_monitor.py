"""Speed of training: samples per second, seconds of each part of a step, hours so far."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from trainkit.callback import Callback
from trainkit.console import clock, say
from trainkit.devices import has_streams
from trainkit.files import open_to_append, optional_file
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.step_timer import StepTimer

from .device_stats import resident_bytes

FILENAME = "step_times.jsonl"
MAX_DATA_WAIT = 0.2  # fraction of the time that the loop may wait for data without a warning
SLOW_INTERVALS_TO_WARN = 3  # in a row above `MAX_DATA_WAIT`: one alone may be the start of workers
MIN_INTERVAL_SECONDS = 0.5  # such an interval may span several log intervals

logger = logging.getLogger(__name__)


class SpeedMonitor(Callback):
    """Adds `train/samples_per_second` and `train/steps_per_second` since the last log point, without evaluations.

    `train/data_wait_fraction` is the fraction of that time in which the loop waited for this rank's samples. If it
    stays above a fifth, one warning says what to change. Nothing here waits for the device.

    Args:
        step_times: Write the seconds of each part of a step (data, copy to the device, forward, backward, exposed
            communication, optimizer, rest) and the memory in use to `step_times.jsonl` at each log point, for the
            report, with those of each callback's hooks.
        log_step_times: Log them too, as `time/data` and so on, in milliseconds per step.
        log_hours: Log `time/hours` and `time/evaluation_hours`, including those before a resume, and print them at the
            end.

    """

    def __init__(self, *, step_times: bool = True, log_step_times: bool = False, log_hours: bool = False) -> None:
        check_arguments(SpeedMonitor.__init__, locals(), of="speed_monitor")
        self.step_times = step_times or log_step_times
        self.log_step_times = log_step_times
        self.log_hours = log_hours
        self._timer: StepTimer | None = None
        self._path = Path(FILENAME)
        self._file: int | None = None
        # Since the last log point.
        self._start = self._evaluation_seconds = self._waited = 0.0
        self._step = self._samples = 0
        self._evaluation_start = 0.0
        # Since the last check for slow data.
        self._check_waited = self._check_seconds = 0.0
        self._slow_intervals = 0
        self._all_evaluation_seconds = 0.0  # of the whole run

    def on_fit_start(self, run: Run) -> None:
        if self.step_times:
            assert run.loader is not None
            self._timer = run.step_timer = StepTimer(run.strategy, run.precision, run.loader)
            if run.is_main and run.run_dir is not None:
                self._path = run.run_dir / FILENAME
                with optional_file(self._path):
                    self._file = open_to_append(self._path)
        if self.log_hours and run.resumed_from is None:
            self._all_evaluation_seconds = 0.0
        self._start_interval(run, time.monotonic())

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._evaluation_start = time.monotonic()

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        seconds = time.monotonic() - self._evaluation_start
        self._evaluation_seconds += seconds
        if stage != "sanity":
            self._all_evaluation_seconds += seconds

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        seconds = now - self._start - self._evaluation_seconds
        steps = run.state.step - self._step
        if self.log_hours:
            metrics["time/hours"] = run.state.seconds / 3600
            metrics["time/evaluation_hours"] = self._all_evaluation_seconds / 3600
        if steps > 0 and seconds > 0:
            metrics["train/samples_per_second"] = (run.state.samples - self._samples) / seconds
            metrics["train/steps_per_second"] = steps / seconds
            self._check_data_wait(run, metrics, seconds)
        if self._timer is not None and self._timer.steps:
            self._write_step_times(run, metrics, self._timer, seconds)
        elif steps == 0:
            return  # a second log point after one step: the interval goes on
        self._start_interval(run, now)

    def on_fit_end(self, run: Run) -> None:
        if self.log_hours and run.is_main:
            say(
                f"trained for {clock(run.state.seconds)}, of which {clock(self._all_evaluation_seconds)} in evaluations"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"evaluation_seconds": self._all_evaluation_seconds}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._all_evaluation_seconds = saved["evaluation_seconds"]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _start_interval(self, run: Run, now: float) -> None:
        self._start, self._evaluation_seconds = now, 0.0
        run.callback_seconds.clear()
        self._step, self._samples = run.state.step, run.state.samples
        self._waited = 0.0 if run.loader is None else run.loader.seconds_waited

    def _check_data_wait(self, run: Run, metrics: dict[str, float], seconds: float) -> None:
        if run.loader is None:
            return
        waited = run.loader.seconds_waited - self._waited
        metrics["train/data_wait_fraction"] = min(1.0, waited / seconds)
        self._check_waited += waited
        self._check_seconds += seconds
        if self._check_seconds < MIN_INTERVAL_SECONDS:
            return
        fraction = min(1.0, self._check_waited / self._check_seconds)
        self._check_waited = self._check_seconds = 0.0
        self._slow_intervals = self._slow_intervals + 1 if fraction > MAX_DATA_WAIT else 0
        if self._slow_intervals == SLOW_INTERVALS_TO_WARN:
            logger.warning("%s", _bottleneck(fraction, run.loader.stage_data.num_workers))

    def _write_step_times(self, run: Run, metrics: dict[str, float], timer: StepTimer, seconds: float) -> None:
        steps, parts = timer.steps, timer.take(seconds)
        if self.log_step_times:
            metrics.update({f"time/{part}": value / steps * 1e3 for part, value in parts.items()})
        if self._file is None:
            return
        line: dict[str, Any] = {
            "step": run.state.step,
            "steps": steps,
            "seconds": {part: round(value, 7) for part, value in parts.items()},
            "callbacks": {name: round(value, 7) for name, value in run.callback_seconds.items() if name},
            "memory": {},
        }
        resident = resident_bytes()
        if resident is not None:
            line["memory"]["host"] = resident
        if has_streams(run.strategy.device):
            line["memory"]["device"] = run.peak_memory.between_logs(run.state.step)
        if self._evaluation_seconds:
            line["evaluation"] = round(self._evaluation_seconds, 7)
        with optional_file(self._path):
            # One write for a line: a kill leaves at most a last line that is cut off, which readers skip.
            os.write(self._file, f"{json.dumps(line)}\n".encode())


def _bottleneck(fraction: float, num_workers: int) -> str:
    remedy = (
        "the training process reads them itself: set data.num_workers=2 or more"
        if num_workers == 0
        else f"{num_workers} worker{'s read' if num_workers > 1 else ' reads'} them: raise data.num_workers, or "
        "make the dataset's __getitem__ faster (decode less, read from a faster disk, prepare samples beforehand)"
    )
    return f"data is the bottleneck: {100 * fraction:.0f} % of the time the loop waits for samples; {remedy}."
