"""Device statistics, the timer, the memory report and the garbage collector."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit.callbacks.device_stats import DeviceStats, resident_bytes
from trainkit.callbacks.garbage_collection import GarbageCollection
from trainkit.callbacks.memory_report import MemoryReport
from trainkit.callbacks.speed_monitor import SpeedMonitor

from tests.tasks import Recorder, Regression, StopAt, regression_data
from trainkit import Callback, Data
from trainkit.profiling.memory import PeakMemoryTracker


def data() -> Data:
    return Data(train=regression_data(32), validation=regression_data(8), batch_size=8)


def test_memory_and_load_of_the_process_are_logged(make_trainer: Any) -> None:
    recorder = Recorder()
    kept: list[torch.Tensor] = []

    class Holds(Callback):
        def on_step_end(self, run: Any) -> None:
            if run.state.step == 1:
                kept.append(torch.ones(64 * 2**20, dtype=torch.uint8))

    make_trainer(callbacks=[DeviceStats(), recorder, Holds()], log_every="1step").fit(Regression(), data())

    first, *_, last = [row["host/memory_mib"] for row in recorder.logged]
    assert 60 < last - first < 200
    assert all(row["host/cpu_percent"] >= 0 for row in recorder.logged)
    assert resident_bytes() is not None


def test_time_in_evaluations_is_counted_over_a_resume(make_trainer: Any, tmp_path: Path) -> None:
    class Slow(Regression):
        def validation_step(self, batch: Any) -> Any:
            time.sleep(0.1)
            return super().validation_step(batch)

    settings = {"evaluate_every": "2step", "log_every": "1step", "run_dir": tmp_path}
    make_trainer(callbacks=[SpeedMonitor(log_hours=True), StopAt(2)], **settings).fit(Slow(), data())
    recorder = Recorder()
    make_trainer(callbacks=[SpeedMonitor(log_hours=True), recorder], **settings).fit(Slow(), data(), resume=tmp_path)

    assert recorder.logged[0]["time/evaluation_hours"] * 3600 >= 0.1
    assert recorder.logged[0]["time/hours"] >= recorder.logged[0]["time/evaluation_hours"]


@pytest.mark.parametrize(("stage", "counts"), [("sanity", False), ("validation", True)])
def test_the_batches_that_are_tried_before_training_are_no_evaluation(stage: str, counts: bool) -> None:
    timer: Any = SpeedMonitor(log_hours=True)
    timer.on_evaluation_start(None, stage)
    time.sleep(0.01)
    timer.on_evaluation_end(None, stage, {})
    assert (timer.state_dict()["evaluation_seconds"] > 0) == counts


def test_garbage_is_collected_at_its_steps_only_and_all_is_as_before(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []

    class Looks(Callback):
        def on_step_end(self, run: Any) -> None:
            seen.append((len(collected), gc.isenabled()))

    collected: list[int] = []
    original = gc.collect

    def collect(generation: int = 2) -> int:
        collected.append(generation)
        return original(generation)

    monkeypatch.setattr(gc, "collect", collect)
    make_trainer(callbacks=[GarbageCollection(every=2), Looks()]).fit(Regression(), data())

    assert seen == [(1, False), (2, False), (2, False), (3, False)]
    assert collected == [2, 1, 1]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_running_out_of_memory_leaves_a_report_with_what_to_change(make_trainer: Any, tmp_path: Path) -> None:
    class Large(Regression):
        steps = 0

        def training_step(self, batch: Any) -> Any:
            self.steps += 1
            if self.steps == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(batch)

    task = Large(lambda task: torch.optim.AdamW(task.parameters()), hidden=3)
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(callbacks=[MemoryReport()], run_dir=tmp_path / "run").fit(task, data())

    report = (tmp_path / "run" / "out_of_memory_rank_0.txt").read_text()
    assert report.startswith("out of memory at step 3 on process 0: CUDA out of memory.")
    assert "now: global batch 8 = 1 rank x 1 micro-batch x 8 samples" in report
    assert "strategy.micro_batch_size=4: the same global batch" in report
    assert "strategy.micro_batch_size=auto" in report
    assert "trainer.precision=bf16-mixed" in report


def test_the_memory_table_adds_up(make_trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """19 parameters of four bytes; Adam keeps two numbers for each, and a step count."""
    task = Regression(lambda task: torch.optim.AdamW(task.parameters()), hidden=3)
    make_trainer(callbacks=[MemoryReport()]).fit(task, data())

    rows = {line.rsplit(maxsplit=2)[0].strip(): line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert rows["parameters"] == ["76", "B"]
    assert rows["gradients, in a step"] == ["76", "B"]
    assert rows["optimizer"] == [str(2 * 76 + 4 * 4), "B"]


class Allocator:
    """Torch's counter of a CUDA device, in place of a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.now))

    def use(self, size: int) -> None:
        self.peak = max(self.peak, self.now + size)


def test_peaks_between_log_points_are_the_same_for_all_who_ask_and_that_of_the_run_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter, peaks = Allocator(monkeypatch), PeakMemoryTracker(torch.device("cuda"))
    seen = []
    for step, size in ((10, 500), (20, 900), (30, 200)):
        counter.use(size)
        seen.append((peaks.between_logs(step), peaks.between_logs(step), peaks.of_run()))
    counter.use(300)

    assert seen == [(500, 500, 500), (900, 900, 900), (200, 200, 900)]
    assert peaks.of_run() == 900
