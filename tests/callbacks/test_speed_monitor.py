from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainkit.callbacks.speed_monitor import SpeedMonitor

from tests.tasks import Clock, Recorder, Regression, StopAt, regression_data
from trainkit import Data
from trainkit.trainer import FitResult

Fit = Callable[..., FitResult]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_steps_and_samples_are_counted_over_the_last_log_interval(fit: Fit, scripted: Any, clock: Clock) -> None:
    """The first five steps are slow; they do not show in the figures of the next five."""
    task, log = scripted(), Recorder()
    task.at_step = {step: partial(clock.sleep, 0.02 if step <= 5 else 0.001) for step in range(1, 21)}

    fit(task, SpeedMonitor(step_times=False), log, evaluate_every=None)

    slow, *fast = [entry["train/steps_per_second"] for entry in log.logged]
    assert slow == pytest.approx(50)
    assert fast == [pytest.approx(1000)] * 3
    first = log.logged[0]
    assert first["train/samples_per_second"] == pytest.approx(4 * first["train/steps_per_second"])


def test_steps_of_earlier_intervals_are_not_counted_again(fit: Fit, scripted: Any, clock: Clock) -> None:
    task, log = scripted(), Recorder()
    task.at_step = {step: partial(clock.sleep, 0.01) for step in range(1, 21)}

    fit(task, SpeedMonitor(step_times=False), log, evaluate_every=None)

    assert [entry["train/steps_per_second"] for entry in log.logged] == [pytest.approx(100)] * 4


def test_evaluation_time_does_not_count(fit: Fit, scripted: Any, clock: Clock) -> None:
    task, log = scripted(), Recorder()
    task.at_step = {step: partial(clock.sleep, 0.01) for step in range(1, 21)}
    validation_step = task.validation_step

    def slow_validation_step(batch: Any) -> Any:
        clock.sleep(0.2)
        return validation_step(batch)

    task.validation_step = slow_validation_step

    fit(task, SpeedMonitor(step_times=False), log, evaluate_every="4step", log_every="5step")

    assert [entry["train/steps_per_second"] for entry in log.logged] == [pytest.approx(100)] * 4


@pytest.mark.parametrize(("percent", "interval", "warns_at"), [(25, 0.05, 30), (25, 2.0, 3), (15, 0.05, None)])
def test_waiting_for_more_than_a_fifth_of_the_time_is_warned_about_once(
    percent: int, interval: float, warns_at: int | None, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    loader = SimpleNamespace(seconds_waited=0.0, stage_data=SimpleNamespace(num_workers=0))
    run: Any = SimpleNamespace(loader=loader, state=SimpleNamespace(step=0, samples=0), callback_seconds={})
    callback = SpeedMonitor(step_times=False)
    callback.on_fit_start(run)
    warned_at = []
    for number in range(1, 101):
        clock[0] += interval
        loader.seconds_waited += interval * percent / 100
        run.state.step += 1
        callback.on_log(run, {})
        warned_at += [number] * len(caplog.records)
        caplog.clear()

    assert warned_at == ([] if warns_at is None else [pytest.approx(warns_at, abs=3)])


def test_time_in_evaluations_is_counted_over_a_resume(make_trainer: Any, tmp_path: Path) -> None:
    class Slow(Regression):
        def validation_step(self, batch: Any) -> Any:
            time.sleep(0.1)
            return super().validation_step(batch)

    data = Data(train=regression_data(32), validation=regression_data(8), batch_size=8)
    settings = {"evaluate_every": "2step", "log_every": "1step", "run_dir": tmp_path}
    make_trainer(callbacks=[SpeedMonitor(log_hours=True), StopAt(2)], **settings).fit(Slow(), data)
    recorder = Recorder()
    make_trainer(callbacks=[SpeedMonitor(log_hours=True), recorder], **settings).fit(Slow(), data, resume=tmp_path)

    assert recorder.logged[0]["time/evaluation_hours"] * 3600 >= 0.1
    assert recorder.logged[0]["time/hours"] >= recorder.logged[0]["time/evaluation_hours"]


@pytest.mark.parametrize(("stage", "counts"), [("sanity", False), ("validation", True)])
def test_sanity_batches_do_not_count_as_evaluation_time(stage: str, counts: bool) -> None:
    timer: Any = SpeedMonitor(log_hours=True)
    timer.on_evaluation_start(None, stage)
    time.sleep(0.01)
    timer.on_evaluation_end(None, stage, {})
    assert (timer.state_dict()["evaluation_seconds"] > 0) == counts


class SlowWhereMeasured(Regression):
    """The steps that are measured after the warm-up take twenty milliseconds longer than the others."""

    steps, began, ended = 0, 0.0, 0.0

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        self.began, self.ended = self.began or self.ended, time.perf_counter()
        if self.steps in (32, 41, 57, 73):
            time.sleep(0.02)
        return super().training_step(batch)


def test_the_parts_of_the_steps_add_up_to_the_time_that_has_passed(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        max_duration="80step", log_every="40step", callbacks=[SpeedMonitor()], run_dir=tmp_path / "run", report=False
    )
    task = SlowWhereMeasured()
    trainer.fit(task, Data(train=regression_data(16), batch_size=4))
    lines = [json.loads(line) for line in (tmp_path / "run" / "step_times.jsonl").read_text().splitlines()]
    assert [line["steps"] for line in lines] == [40, 40]
    for line in lines:
        assert set(line["seconds"]) == {"data", "forward", "backward", "optimizer", "rest"}
        assert line["seconds"]["forward"] > 0.02
    # From the first step to the last; the first interval begins a little earlier.
    assert sum(sum(line["seconds"].values()) for line in lines) < task.ended - task.began + 0.5
