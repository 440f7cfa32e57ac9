"""A loss that is not finite is reported with its step, its rank and its samples, by every rank alike."""

import math
import random
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Fitting, fit
from trainkit import Data, Trainer, UserError
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import NonFiniteLoss
from trainkit.report.record import read_curves
from trainkit.testing import run_ranks

NUM_SAMPLES = 22  # five batches of 4 and one of 2


def still(task: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(task.parameters(), lr=0.0)


def report_of(strategy: Any, bad: int, log_every: str) -> str:
    """Return the messages of a run in which one sample is infinite."""

    class Samples(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return (torch.tensor([float("inf")]),) if index == bad else super().__getitem__(index)

    data = Data(train=Samples(torch.ones(NUM_SAMPLES, 1)), batch_size=4)
    with pytest.raises(NonFiniteLoss) as caught:
        fit(strategy, Fitting(nn.Linear(1, 1), still), data, max_duration="3epoch", log_every=log_every)
    return str(caught.value)


def on_two_ranks(bad: int) -> str:
    return report_of(DDPStrategy(device="cpu"), bad, "4step")


class Summing(Fitting):
    """Keeps a sum of its inputs, on which its loss does not depend."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("sum", torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        self.sum += batch[0].sum()
        return super().training_step([batch[0].nan_to_num(posinf=0.0)])


class Unseeded(Sampler[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Any:
        return iter(random.SystemRandom().sample(range(NUM_SAMPLES), NUM_SAMPLES))


def of_one_rank_alone() -> list[str]:
    """Return the messages of a rank about a loss, a buffer and a sampler that are bad or differ on rank 1."""
    inputs = torch.ones(NUM_SAMPLES, 1)
    inputs[5] = float("inf")  # in step 2, on rank 1
    told = []
    for task in (kind(nn.Linear(1, 1), still) for kind in (Fitting, Summing)):
        strategy = DDPStrategy(device="cpu", broadcast_buffers=False, timeout_seconds=120)
        callbacks = [Checkpoint(every="1step", save_last_k=None)]
        trainer = Trainer(strategy, log_every="5step", callbacks=callbacks, loggers=[], run_dir=type(task).__name__)
        with pytest.raises(NonFiniteLoss) as caught:
            trainer.fit(task, Data(train=TensorDataset(inputs), batch_size=4, shuffle=False))
        told.append(str(caught.value))
    loader = DataLoader(TensorDataset(inputs), batch_size=4, sampler=Unseeded())
    with pytest.raises(UserError) as refused:
        fit(DDPStrategy(device="cpu"), Fitting(nn.Linear(1, 1), still), Data(train=loader))
    return [*told, str(refused.value)]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("log_every", ["1step", "4step", "9step", "1epoch"])
@pytest.mark.parametrize("bad", [0, 5, 21])
def test_the_samples_of_the_step_are_named(bad, log_every):
    report = report_of(SingleStrategy(device="cpu"), bad, log_every)
    step, samples = re.search(r"at step (\d+)[ .,].*The samples were (.*)\.$", report).groups()
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
    start = order.index(bad) // 4 * 4
    assert int(step) == start // 4 + 1
    assert [int(sample) for sample in samples.split(", ")] == order[start : start + 4]


@pytest.mark.parametrize("log_every", ["50step", "4step"])
def test_the_losses_up_to_the_first_that_is_not_finite_are_in_the_report(log_every, tmp_path):
    class Until(Fitting):
        def training_step(self, batch):
            return super().training_step(batch) * (math.nan if int(batch[0][0]) == 6 else 1.0)

    samples = TensorDataset(torch.arange(22.0)[:, None])
    data = Data(train=samples, batch_size=2, shuffle=False)
    settings = {"callbacks": [], "loggers": ["jsonl"], "run_dir": tmp_path / "run", "log_every": log_every}
    with pytest.raises(NonFiniteLoss) as caught:
        Trainer(SingleStrategy(device="cpu"), max_duration="1epoch", **settings).fit(
            Until(nn.Linear(1, 1), still), data
        )
    curve = read_curves(tmp_path / "run")["train/loss"]
    steps = range(1, 12) if log_every == "50step" else range(1, 5)
    assert curve.steps == [*steps]
    assert [step for step, loss in zip(curve.steps, curve.values, strict=True) if not math.isfinite(loss)] == [*steps][
        3:
    ]
    (note,) = caught.value.__notes__
    assert note.startswith(f"rank 0, after step {len(steps)}")
    assert note.endswith(f"\nreport: {tmp_path / 'run' / 'report.html'}")


def test_the_losses_before_an_error_are_in_the_report_weighted_by_their_samples(tmp_path):
    class Fails(Fitting):
        def training_step(self, batch):
            if 9 in batch[0]:
                raise RuntimeError("a fault of the step")
            return {"loss": super().training_step(batch) * 0 + batch[0].mean(), "weight": batch[0].sum()}

    data = Data(train=TensorDataset(torch.arange(12.0)[:, None]), batch_size=3, shuffle=False)
    settings = {"callbacks": [], "loggers": ["jsonl"], "run_dir": tmp_path / "run", "log_every": "2step"}
    strategy = SingleStrategy(device="cpu", accumulate=3)
    with pytest.raises(RuntimeError, match="a fault of the step"):
        Trainer(strategy, max_duration="1epoch", **settings).fit(Fails(nn.Linear(1, 1), still), data)
    curve = read_curves(tmp_path / "run")["train/loss"]
    assert curve.steps == [2, 3]
    assert curve.values == pytest.approx([(0 + 1 + 4 + 9 + 16 + 25) / 15, (36 + 49 + 64) / 21])


def test_every_rank_names_the_rank_that_had_the_sample():
    reports = run_ranks(on_two_ranks, 2, 5)
    assert reports[0] == reports[1]
    step, rank, samples = re.search(r"at step (\d+) on rank (\d)[ .,].*The samples were (.*)\.$", reports[0]).groups()
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
    place = order.index(5)
    assert (int(step), int(rank)) == (place // 4 + 1, place % 2)
    assert "5" in samples.split(", ") and len(samples.split(", ")) == 2


def test_what_one_rank_alone_has_before_a_save_all_ranks_refuse():
    one, other = run_ranks(of_one_rank_alone, 2)
    assert one == other
    loss, buffer, sampler = one
    assert "at step 2 on rank 1" in loss and loss.endswith("The samples were 5, 7.")
    assert buffer.startswith("step 2 left sum not finite")
    assert "the sampler Unseeded draws another order on each rank" in sampler
    for run_dir in ("Fitting", "Summing"):
        assert [entry.step for entry in CheckpointStore(f"{run_dir}/checkpoints").entries()] == [1]
