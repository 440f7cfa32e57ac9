"""Any number of ranks measures what one device measures, whatever number of samples is left over (contract C5)."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from trainkit import Data, TaskModule, Trainer
from trainkit.data.loader import open_loader
from trainkit.testing import run_ranks

SIZES = range(1, 14)


class Classifier(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = nn.Linear(4, 3, dtype=torch.float64)

    def validation_step(self, batch: Any) -> Any:
        inputs, classes, _ = batch
        right = (self.network(inputs).argmax(1) == classes).double().mean()
        return {"loss": nn.functional.cross_entropy(self.network(inputs), classes), "accuracy": right}

    def test_step(self, batch: Any) -> Any:
        """Weigh whole numbers, whose sums are exact in any order."""
        _, _, counts = batch
        return {"value": (counts * counts).sum() / counts.sum(), "weight": counts.sum()}

    def predict_step(self, batch: Any) -> Any:
        return batch[2], self.network(batch[0]).argmax(1)


def evaluate(strategy: Any, num_samples: int) -> tuple[dict[str, float], dict[str, float], Any]:
    generator = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    classes = torch.randint(3, (num_samples,), generator=generator)
    dataset = TensorDataset(inputs, classes, 1.0 + torch.arange(num_samples, dtype=torch.float64))
    data = Data(validation=dataset, test=dataset, predict=dataset, batch_size=5)
    trainer = Trainer(strategy, callbacks=[], loggers=[])
    task = Classifier()
    return trainer.validate(task, data), trainer.test(task, data), trainer.predict(task, data)


def on_ranks() -> list[Any]:
    return [evaluate(DDPStrategy(device="cpu"), num_samples) for num_samples in SIZES]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_measure_and_predict_what_one_device_does(num_ranks):
    alone = [evaluate(SingleStrategy(device="cpu"), num_samples) for num_samples in SIZES]
    ranks = run_ranks(on_ranks, num_ranks)
    for num_samples, expected, *measured in zip(SIZES, alone, *ranks, strict=True):
        samples, classes = expected[2]
        assert samples.tolist() == list(range(1, num_samples + 1))
        for validation, test, _ in measured:  # on every rank
            assert set(validation) == {"validation/loss", "validation/accuracy"}
            assert validation == pytest.approx(expected[0], rel=1e-14, abs=0)
            assert test == expected[1]
        predicted = measured[0][2]
        assert torch.equal(predicted[0], samples)
        assert torch.equal(predicted[1], classes)
        assert all(len(prediction) == 0 for _, _, prediction in measured[1:])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", ["samples", "stream", "pre-batched"])
def test_rank_r_evaluates_every_wth_sample_from_the_rth_on_whatever_sizes_batches_have(kind, num_ranks):
    sizes = [5, 5, 4] if kind != "pre-batched" else [5, 1, 4, 4]
    numbers = torch.arange(sum(sizes))
    whole = {"samples": TensorDataset(numbers), "stream": Numbers(), "pre-batched": numbers.split(sizes)}[kind]
    data = Data(validation=whole, batch_size=None if kind == "pre-batched" else 5)
    for rank in range(num_ranks):
        strategy = SingleStrategy(device="cpu")
        strategy.comm.rank, strategy.comm.world_size = rank, num_ranks
        read = [batch.batch for batch in open_loader(data.stage_data("validation"), strategy, seed=0).batches()]
        own = [row for batch in read for row in (batch[0] if kind == "samples" else batch).tolist()]
        assert own == numbers[rank::num_ranks].tolist()


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(14))
