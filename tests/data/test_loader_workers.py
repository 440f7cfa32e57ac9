"""Persistent workers, several validation sets, and the time that a run waits for data."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from trainkit.callbacks.ema import EMA

from tests.tasks import FakeRank, Recorder, Regression, StopAt, assert_same_bits, regression_data
from trainkit import Data
from trainkit.data.loader import open_loader
from trainkit.errors import Stopped


class Terminating(Dataset[Any]):
    """Sends the run SIGTERM from the worker that reads the first sample, while others are starting."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        return torch.zeros(4), torch.zeros(1)


class Noisy(Dataset[Any]):
    """Samples with the reader's process id and noise from the worker's generator."""

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


def test_persistent_workers_survive_epochs_and_read_the_same_samples() -> None:
    settings: dict[str, Any] = {"train": Noisy(), "batch_size": 2}

    kept = read(Data(**settings, num_workers=2), (0, 0), (1, 4))
    restarted = read(Data(**settings, num_workers=1, persistent_workers=False), (0, 0), (1, 4))

    pids = [set(epoch[:, 1].tolist()) for epoch in kept]
    assert pids[0] == pids[1]
    assert len(pids[0]) == 2
    assert set(restarted[0][:, 1].tolist()).isdisjoint(restarted[1][:, 1].tolist())
    for one, other in zip(kept, restarted, strict=True):
        assert torch.equal(one[:, [0, 2]], other[:, [0, 2]])


def test_workers_draw_other_random_numbers_in_each_epoch() -> None:
    first, second = read(Data(train=Noisy(), batch_size=2, shuffle=False, num_workers=1), (0, 0), (1, 0))

    assert torch.equal(first[:, 0], second[:, 0])
    assert (first[:, 2] != second[:, 2]).all()


def test_an_abandoned_epoch_does_not_change_the_next() -> None:
    """As at the end of a run by steps, or after an example was read."""
    settings: dict[str, Any] = {"train": Noisy(), "batch_size": 2, "num_workers": 2}

    (after,) = read(Data(**settings), (1, 0), abandon=2)
    (fresh,) = read(Data(**settings), (1, 0))

    assert torch.equal(after[:, [0, 2]], fresh[:, [0, 2]])


def test_a_run_with_persistent_workers_resumes_to_the_bit_and_leaves_no_process(
    make_trainer: Any, tmp_path: Any
) -> None:
    import multiprocessing

    gc.collect()  # which ends data workers of other tests
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
        time.sleep(self.seconds)
        return self.samples[index]


@pytest.mark.parametrize("seconds", [0.004, 0.0])
def test_a_run_that_waits_for_its_data_warns_once_with_what_to_change(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    for clock in ("monotonic", "perf_counter"):  # which only `sleep` advances
        monkeypatch.setattr(time, clock, lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr("trainkit.callbacks.speed_monitor.MIN_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr("trainkit.callbacks.speed_monitor.MAX_DATA_WAIT", 0.6)
    recorder = Recorder()
    trainer = make_trainer(callbacks=["speed_monitor", recorder], log_every="3step")

    class Computes(Regression):
        def training_step(self, batch: Any) -> Any:
            time.sleep(0.002)
            return super().training_step(batch)

    trainer.fit(Computes(), Data(train=Slow(seconds), batch_size=4))

    waits = [row["train/data_wait_fraction"] for row in recorder.logged if "train/data_wait_fraction" in row]
    warnings = [r.getMessage() for r in caplog.records if "data is the bottleneck" in r.getMessage()]
    if seconds:
        assert waits == [pytest.approx(0.016 / 0.018)] * len(waits) and waits
        assert len(warnings) == 1
        assert "the training process reads them itself: set data.num_workers=2 or more" in warnings[0]
    else:
        assert set(waits) == {0.0}
        assert warnings == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_signal_while_workers_start_ends_the_run_before_its_second_step(make_trainer: Any) -> None:
    recorder = Recorder()
    data = Data(train=Terminating(), batch_size=2, shuffle=False, num_workers=8)
    with pytest.raises(Stopped) as caught:
        make_trainer(callbacks=[recorder]).fit(Regression(), data)
    assert caught.value.exit_code == 143
    assert recorder.steps_of("on_step_end") == [1]


class Opened(Dataset[Any]):
    """Has samples once a worker has opened it."""

    opened = -1.0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.opened)


class OpenedStream(IterableDataset[Any]):
    opened, num_shards = -1.0, 1

    def shard(self, num_shards: int, index: int) -> Any:
        shard = OpenedStream()
        shard.opened = self.opened
        return shard

    def __iter__(self) -> Any:
        return iter([torch.tensor(self.opened)] * 2)


class OpenedShards(OpenedStream):
    num_shards = 2


def open_dataset(number: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == number
    info.dataset.opened = 7.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "dataset", [Opened(), OpenedStream(), OpenedShards()], ids=lambda dataset: type(dataset).__name__
)
def test_the_worker_init_fn_of_a_loader_is_called_with_its_dataset(dataset: Any) -> None:
    (batch,) = read(Data(train=DataLoader(dataset, 4, num_workers=1, worker_init_fn=open_dataset)), (0, 0))
    assert set(batch.tolist()) == {7.0}
    assert dataset.opened == -1.0
