"""Workers that stay, several validation sets, and the time that is waited for data."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from trainkit.callbacks.ema import EMA

from tests.tasks import FakeRank, Recorder, Regression, StopAt, assert_same_bits, regression_data
from trainkit import Data
from trainkit.data.open_loader import open_loader


class Noisy(Dataset[Any]):
    """Tells who read it, with noise of the worker's own generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), float(os.getpid()), torch.randn(()).item()])


def read(data: Data, *epochs: tuple[int, int], abandon: int | None = None) -> list[torch.Tensor]:
    loader = open_loader(data.stage_data("train"), FakeRank(), seed=0)
    if abandon is not None:
        step_batches = loader.step_batches(0, 0)
        for _ in range(abandon):
            next(step_batches)
        del step_batches
    try:
        return [torch.cat([m.batch for w in loader.step_batches(*epoch) for m in w.micro_batches]) for epoch in epochs]
    finally:
        loader.close()


def test_workers_stay_over_epochs_and_what_they_read_is_the_same() -> None:
    settings: dict[str, Any] = {"train": Noisy(), "batch_size": 2}

    kept = read(Data(**settings, num_workers=2), (0, 0), (1, 4))
    anew = read(Data(**settings, num_workers=1, persistent_workers=False), (0, 0), (1, 4))

    pids = [set(epoch[:, 1].tolist()) for epoch in kept]
    assert pids[0] == pids[1]
    assert len(pids[0]) == 2
    assert set(anew[0][:, 1].tolist()).isdisjoint(anew[1][:, 1].tolist())
    for one, other in zip(kept, anew, strict=True):
        assert torch.equal(one[:, [0, 2]], other[:, [0, 2]])


def test_an_epoch_that_was_left_in_its_middle_leaves_nothing_behind() -> None:
    """As at the end of a run by steps, or after an example was read."""
    settings: dict[str, Any] = {"train": Noisy(), "batch_size": 2, "num_workers": 2}

    (after,) = read(Data(**settings), (1, 0), abandon=2)
    (fresh,) = read(Data(**settings), (1, 0))

    assert torch.equal(after[:, [0, 2]], fresh[:, [0, 2]])


def test_a_run_with_workers_that_stay_resumes_to_the_bit_and_leaves_no_process(
    make_trainer: Any, tmp_path: Any
) -> None:
    import multiprocessing

    data = Data(train=regression_data(20), validation=regression_data(6), batch_size=4, num_workers=1)
    full, resumed = Regression(), Regression()
    settings = {"max_duration": "2epoch", "evaluate_every": "4step"}

    make_trainer(**settings).fit(full, data)
    make_trainer(**settings, run_dir=tmp_path, callbacks=[StopAt(7)]).fit(Regression(), data)
    make_trainer(**settings, run_dir=tmp_path).fit(resumed, data, resume=tmp_path)

    assert_same_bits(resumed, full)
    assert multiprocessing.active_children() == []


def test_each_validation_set_has_its_own_metrics_and_callbacks_see_one_evaluation(make_trainer: Any) -> None:
    sets = {"small": regression_data(5, seed=1), "large": regression_data(9, seed=2)}
    recorder, task = Recorder(), Regression()
    data = Data(train=regression_data(16), validation=sets, batch_size=4)

    result = make_trainer(callbacks=[recorder]).fit(task, data)

    for name, dataset in sets.items():
        inputs, targets = dataset.tensors
        expected = float((task(inputs) - targets).square().mean().detach())
        assert result.metrics[f"validation/{name}/loss"] == pytest.approx(expected, rel=1e-5)
    assert "validation/loss" not in result.metrics
    assert recorder.steps_of("on_evaluation_start validation") == [4]
    assert len(recorder.evaluations) == 1
    metrics = make_trainer().validate(task, data)
    assert set(metrics) == {f"validation/{name}/{kind}" for name in sets for kind in ("loss", "absolute")}
    make_trainer(callbacks=[EMA()], evaluate_every="2step").fit(Regression(), data)


class Slow(Dataset[Any]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.samples = regression_data(64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        import time

        time.sleep(self.seconds)
        return self.samples[index]


@pytest.mark.parametrize("seconds", [0.004, 0.0])
def test_a_run_that_waits_for_its_data_is_told_once_what_to_change(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    monkeypatch.setattr("trainkit.callbacks.speed_monitor.MIN_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr("trainkit.callbacks.speed_monitor.MAX_DATA_WAIT", 0.6)
    recorder = Recorder()
    trainer = make_trainer(callbacks=["speed_monitor", recorder], log_every="3step")

    class Computes(Regression):
        def training_step(self, batch: Any) -> Any:
            import time

            time.sleep(0.002 if seconds else 0.03)  # where data are quick, much beside what a worker's queue takes
            return super().training_step(batch)

    trainer.fit(Computes(), Data(train=Slow(seconds), batch_size=4))

    waits = [row["train/data_wait_fraction"] for row in recorder.logged if "train/data_wait_fraction" in row]
    told = [r.getMessage() for r in caplog.records if "data is the bottleneck" in r.getMessage()]
    if seconds:
        assert 0.6 < min(waits[1:]) <= max(waits) <= 1
        assert len(told) == 1
        assert "the training process reads them itself: set data.num_workers=2 or more" in told[0]
    else:
        assert max(waits[1:]) < 0.6
        assert told == []
