"""Profiled steps, counted FLOPs and the parts of a step."""

import json
import time

import pytest
import torch
from trainkit.callbacks.profiler import Profiler, peak_of_model
from trainkit.callbacks.speed_monitor import SpeedMonitor
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy

from tests.tasks import Clock, EachStep, FakeRank, Regression, regression_data
from trainkit import Data, Trainer, UserError
from trainkit.cli.main import main
from trainkit.data.loader import open_loader
from trainkit.distributed.collectives import Collectives
from trainkit.optim.precision import Precision
from trainkit.step_timer import PARTS, StepTimer
from trainkit.testing import run_ranks


def test_steps_are_recorded_and_their_flops_counted(make_trainer):
    trainer = make_trainer(
        max_duration="12step",
        log_every="2step",
        loggers=["jsonl"],
        callbacks=[Profiler(start_step=4, end_step=6, peak_tflops=1.0)],
    )
    result = trainer.fit(Regression(), Data(train=regression_data(96), batch_size=8))
    trace = json.loads((trainer.run_dir / "profile_trace_rank_0.json").read_text())
    steps = [event for event in trace["traceEvents"] if event.get("name") == "aten::addmm"]
    assert len(steps) == 3
    record = json.loads((trainer.run_dir / "profile.json").read_text())
    assert (record["first_step"], record["last_step"]) == (4, 6)
    # A linear layer of 4 x 1 on 8 samples: 2 * 8 * 4 forward, and as much for the gradient of its weights.
    assert record["flops_per_step"] == 2 * (2 * 8 * 4)
    assert "aten::addmm" in [row["name"] for row in record["operations"]]
    assert sum(row["share"] for row in record["operations"]) <= 1.0 + 1e-9
    assert result.metrics["train/mfu"] == pytest.approx(result.metrics["train/flops_per_second"] / 1e12)
    text = (trainer.run_dir / "report.html").read_text()
    assert "Operations of steps 4 to 6" in text and "128 FLOP" in text


def test_flops_of_replicas_count_and_those_of_an_evaluation_do_not(make_trainer):
    """As many operations as on one device; the peak is that of one device, which both replicas share."""
    trainer = make_trainer(
        DataParallelStrategy(devices=["cpu", "cpu"]),
        max_duration="9step",
        log_every="3step",
        evaluate_every="3step",
        callbacks=[Profiler(start_step=4, end_step=6, peak_tflops=1.0)],
    )
    data = Data(train=regression_data(96), validation=regression_data(8), batch_size=8)
    result = trainer.fit(Regression(), data)
    record = json.loads((trainer.run_dir / "profile.json").read_text())
    assert record["flops_per_step"] == 2 * (2 * 8 * 4)
    assert result.metrics["train/mfu"] == pytest.approx(result.metrics["train/flops_per_second"] / 1e12)


def test_the_peak_is_that_of_every_device_of_the_process(make_trainer):
    class OnTwoDevices(DataParallelStrategy):
        def setup(self, precision):
            super().setup(precision)
            self.comm = Collectives(num_devices=2)  # as of two GPUs

    trainer = make_trainer(
        OnTwoDevices(devices=["cpu", "cpu"]),
        max_duration="6step",
        log_every="3step",
        callbacks=[Profiler(start_step=3, end_step=3, peak_tflops=1.0)],
    )
    result = trainer.fit(Regression(), Data(train=regression_data(96), batch_size=8))
    assert result.metrics["train/mfu"] == pytest.approx(result.metrics["train/flops_per_second"] / 2e12)


def profile_on_two_ranks(folder):
    trainer = Trainer(
        DDPStrategy(device="cpu"),
        run_dir=folder,
        max_duration="6step",
        log_every="3step",
        loggers=[],
        callbacks=[Profiler(start_step=3, end_step=3, peak_tflops=1.0)],
    )
    return trainer.fit(Regression(), Data(train=regression_data(96), batch_size=8)).metrics


@pytest.mark.slow
def test_flops_and_peak_are_those_of_all_ranks(tmp_path):
    metrics = run_ranks(profile_on_two_ranks, 2, tmp_path)[0]
    record = json.loads((tmp_path / "profile.json").read_text())
    assert record["flops_per_step"] == 2 * (2 * 8 * 4)
    assert metrics["train/mfu"] == pytest.approx(metrics["train/flops_per_second"] / 2e12)


@pytest.mark.parametrize("own", [False, True])
def test_profile_true_adds_a_profiler_unless_there_is_one(own, make_trainer):
    callbacks = [Profiler(start_step=4, end_step=6)] if own else []
    trainer = make_trainer(profile=True, max_duration="20step", callbacks=callbacks)
    trainer.fit(Regression(), Data(train=regression_data(96), batch_size=8))
    record = json.loads((trainer.run_dir / "profile.json").read_text())
    assert (record["first_step"], record["last_step"]) == ((4, 6) if own else (10, 15))
    assert [type(callback) for callback in trainer.callbacks] == [Profiler]


@pytest.mark.slow
def test_profile_true_on_the_command_line_records_steps(tmp_path):
    settings = ["recipe=digits", "task.width=4", "data.num_train=256", "data.batch_size=16", "trainer.profile=true"]
    assert main(["fit", *settings, "trainer.max_duration=16step", f"run_dir={tmp_path / 'run'}"]) == 0
    record = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert (record["first_step"], record["last_step"]) == (10, 15)


def test_the_profiler_stops_if_the_run_ends_early(make_trainer):
    trainer = make_trainer(max_duration="5step", callbacks=[Profiler(start_step=5, end_step=9)])
    trainer.fit(Regression(), Data(train=regression_data(96), batch_size=8))
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("settings", [{"start_step": 1}, {"start_step": 9, "end_step": 8}, {"peak_tflops": 0}])
def test_impossible_steps_are_rejected(settings):
    with pytest.raises(UserError, match="profiler"):
        Profiler(**settings)


def test_the_peak_depends_on_the_longest_matching_name_and_the_precision():
    assert peak_of_model("NVIDIA H100 80GB HBM3", precision="bf16-mixed", tf32=False)[0] == 989.4e12
    assert peak_of_model("NVIDIA H100 PCIe", precision="bf16-mixed", tf32=False)[0] == 756e12
    assert peak_of_model("NVIDIA A100-SXM4-80GB", precision="fp32", tf32=True)[0] == 156e12
    assert peak_of_model("Some Other 9000", precision="fp32", tf32=False)[0] is None
    assert peak_of_model("Tesla T400", precision="fp32", tf32=False)[0] is None


class _SlowTask(Regression):
    def training_step(self, batch):
        self.clock.sleep(0.02)
        return super().training_step(batch)


def test_the_seconds_of_a_step_are_those_of_its_parts(make_trainer, monkeypatch):
    task = _SlowTask()
    task.clock = clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr("trainkit.step_timer._clock", clock)

    def slow_collate(samples):
        clock.sleep(0.03)
        return torch.utils.data.default_collate(samples)

    trainer = make_trainer(
        max_duration="8step", log_every="4step", callbacks=[SpeedMonitor(log_step_times=True)], loggers=["jsonl"]
    )
    data = Data(train=regression_data(32), batch_size=4, collate_fn=slow_collate)
    result = trainer.fit(task, data)
    lines = [json.loads(line) for line in (trainer.run_dir / "step_times.jsonl").read_text().splitlines()]
    assert [(line["step"], line["steps"]) for line in lines] == [(4, 4), (8, 4)]
    seconds = lines[-1]["seconds"]
    assert set(seconds) <= set(PARTS)
    assert seconds["data"] == pytest.approx(4 * 0.03)
    assert seconds["forward"] == pytest.approx(4 * 0.02)
    assert seconds["backward"] == seconds["optimizer"] == 0
    assert result.metrics["time/data"] == pytest.approx(seconds["data"] / 4 * 1e3, rel=1e-3)
    assert lines[-1]["memory"]["host"] > 10**7


def test_one_step_in_sixteen_is_measured_and_stands_for_the_others(make_trainer, monkeypatch):
    class Task(_SlowTask):
        reads = 0

        def training_step(self, batch):
            self.reads = 0
            return super().training_step(batch)

    task = Task()
    task.clock = clock = Clock()
    reads = EachStep(lambda run: task.reads > 0)

    def read():
        task.reads += 1
        return clock.now

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr("trainkit.step_timer._clock", read)
    trainer = make_trainer(max_duration="100step", log_every="50step", callbacks=[SpeedMonitor(), reads])
    trainer.fit(task, Data(train=regression_data(400), batch_size=4))
    assert [step for step, has_read in enumerate(reads.seen, 1) if has_read] == [*range(1, 17), 32, 48, 51, 67, 83, 99]
    lines = [json.loads(line) for line in (trainer.run_dir / "step_times.jsonl").read_text().splitlines()]
    assert [line["seconds"]["forward"] for line in lines] == [pytest.approx(50 * 0.02)] * 2


def test_the_timer_is_removed_from_forwards_after_a_fit(make_trainer):
    trainer = make_trainer(max_duration="2step", callbacks=[SpeedMonitor()])
    before = trainer.fit_config.precision._autocast
    trainer.fit(Regression(), Data(train=regression_data(16), batch_size=4))
    assert trainer.fit_config.precision._autocast is before  # or each fit would add a layer


class DeviceThatWorked:
    """Fixed measurements in place of events on a device."""

    def take(self, steps):
        return {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}


def test_waiting_for_other_ranks_does_not_count_as_backward():
    class Waits(FakeRank):
        waited_seconds = 0.0

        def start_overlap_profile(self):
            pass

        def stop_overlap_profile(self, steps):
            return None

    strategy = Waits()
    loader = open_loader(Data(train=regression_data(8), batch_size=4).stage_data("train"), strategy, seed=0)
    watch = StepTimer(strategy, Precision(), loader)
    watch._device = DeviceThatWorked()
    Waits.waited_seconds = 0.75
    assert watch.take(10.0)["communication"] == 0.75
    Waits.waited_seconds += 100.0  # never more than the backward that it was in
    parts = watch.take(10.0)
    assert (parts["communication"], parts["backward"], parts["forward"]) == (2.0, 0.0, 1.0)
    assert sum(parts.values()) == 10.0
