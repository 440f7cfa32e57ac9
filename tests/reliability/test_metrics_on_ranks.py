"""Metric objects, ours and torchmetrics', give on any number of ranks and under any strategy what one device gives."""

import functools
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Recorder
from trainkit import Data, TaskModule, Trainer
from trainkit.metrics.metric import Metric
from trainkit.testing import run_ranks

pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="needs torchmetrics")
SIZES = (1, 2, 3, 4, 5, 7, 11)


class Order(Metric):
    """Knows which samples came, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.int64))
        self.add_state("numbers", [], "cat")

    def update(self, numbers: torch.Tensor) -> None:
        self.total += numbers.sum()
        self.numbers.append(numbers)

    def compute(self) -> Any:
        numbers = torch.cat(self.numbers)
        in_order = torch.equal(numbers, torch.arange(len(numbers)))
        return {"total": self.total, "count": len(numbers), "in_order": float(in_order)}


class Classifier(TaskModule):
    def __init__(self, *, with_collection: bool = True) -> None:
        from torchmetrics import MeanMetric, MetricCollection
        from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)
        self.network = nn.Sequential(*layers).double()
        self.order = Order()
        self.auroc = BinaryAUROC(validate_args=False)
        self.accuracy = MulticlassAccuracy(3, average="micro", validate_args=False)
        self.both = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)]) if with_collection else None
        self.mean = MeanMetric()

    def training_step(self, batch: Any) -> Any:
        inputs, classes, numbers = batch
        scores = self.network(inputs)
        self.order.update(numbers)
        self.auroc.update(scores[:, 0].sigmoid(), (classes == 0).long())
        self.accuracy.update(scores, classes)
        self.mean.update(numbers.double())
        known = {name: getattr(self, name) for name in ("order", "auroc", "accuracy", "mean")}
        if self.both is not None:
            self.both.update(scores, classes)
            known["both"] = self.both
        return {"loss": nn.functional.cross_entropy(scores, classes), **known}

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def data(num_samples: int) -> Data:
    generator = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    classes = torch.randint(3, (num_samples,), generator=generator)
    dataset = TensorDataset(inputs, classes, torch.arange(num_samples))
    return Data(train=dataset, validation=dataset, batch_size=min(5, num_samples), shuffle=False)


def evaluate(strategy: Any, num_samples: int, **settings: Any) -> dict[str, float]:
    return Trainer(strategy, callbacks=[], loggers=[]).validate(Classifier(**settings), data(num_samples))


def trained(strategy: Any) -> list[dict[str, float]]:
    """Return what two log intervals of training gave, of which the second ends with a short batch."""
    recorder = Recorder()
    trainer = Trainer(strategy, callbacks=[recorder], loggers=[], log_every="2step", run_dir="run")
    trainer.fit(Classifier(), Data(train=data(16).dataset("train"), batch_size=5, shuffle=False))
    return recorder.logged


def on_ranks() -> Any:
    measured = [evaluate(DDPStrategy(device="cpu"), num_samples) for num_samples in SIZES]
    each_alone = [evaluate(DDPStrategy(device="cpu", micro_batch_size=1), num_samples) for num_samples in SIZES]
    trained_on_ranks = trained(FusionStrategy(device="cpu"))
    return measured, each_alone, trained_on_ranks, on_stages(["network.2"]), refusal_on_stages()


def on_stages(cuts: list[str] | None) -> dict[str, float]:
    return evaluate(PipelineStrategy(stages=2, device="cpu", split_points=cuts), 11, with_collection=False)


def refusal_on_stages() -> str:
    with pytest.raises(Exception) as raised:  # what one rank refuses ends the other
        on_stages(None)
    return str(raised.value)


@functools.cache
def found_on_ranks() -> Any:
    """Return what each of two ranks found; they import torchmetrics once for all tests."""
    return run_ranks(on_ranks, 2)


def assert_equal(actual: dict[str, float], expected: dict[str, float], *, close: tuple[str, ...]) -> None:
    """Fail unless numbers are the same bits, but for those whose batches were computed in other shapes."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name] == (pytest.approx(value, rel=1e-5) if name.endswith(close) else value), name


def without_order(metrics: dict[str, float]) -> dict[str, float]:
    """Leave out whether samples came in order: only an evaluation on ranks of one task each brings them in order."""
    return {name: value for name, value in metrics.items() if not name.endswith("in_order")}


@pytest.fixture(autouse=True)
def _quiet_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
@pytest.mark.slow
def test_ranks_compute_what_one_device_does():
    alone = [evaluate(SingleStrategy(device="cpu"), num_samples) for num_samples in SIZES]
    each_alone = [evaluate(SingleStrategy(device="cpu", micro_batch_size=1), num_samples) for num_samples in SIZES]
    training = trained(SingleStrategy(device="cpu"))
    for measured, each, logged, *_ in found_on_ranks():
        for num_samples, expected, actual in zip(SIZES, alone, measured, strict=True):
            assert actual["validation/order/count"] == num_samples
            assert_equal(actual, expected, close=("loss",))
        for expected, actual in zip(each_alone, each, strict=True):  # the same batches: the same bits
            assert_equal(actual, expected, close=())
        for expected, actual in zip(training, logged, strict=True):
            assert_equal(without_order(actual), without_order(expected), close=("loss",))
    assert [row["train/order/total"] for row in training] == [sum(range(10)), sum(range(10, 16))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
def test_replicas_of_dp_compute_what_one_device_does():
    for num_samples in SIZES:
        expected = evaluate(SingleStrategy(device="cpu"), num_samples)
        actual = evaluate(DataParallelStrategy(devices=["cpu"] * 3), num_samples)
        assert_equal(without_order(actual), without_order(expected), close=("loss",))
    alone, together = trained(SingleStrategy(device="cpu")), trained(DataParallelStrategy(devices=["cpu"] * 2))
    for expected, actual in zip(alone, together, strict=True):
        assert_equal(without_order(actual), without_order(expected), close=("loss",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
def test_metrics_of_the_last_stage_are_those_of_the_whole():
    expected = evaluate(SingleStrategy(device="cpu"), 11, with_collection=False)
    for *_, actual, _ in found_on_ranks():
        assert_equal(actual, expected, close=("loss",))
    failures = [failure for *_, failure in found_on_ranks()]
    assert any("is updated by calls of which an earlier stage than the last makes some" in text for text in failures)
