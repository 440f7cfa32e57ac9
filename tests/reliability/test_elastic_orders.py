"""Runs over orders other than the plain one go on with what is left, on another number of ranks too (C2 and C6).

saved by ddp on 3 ranks, with worker processes    |    goes on under ddp on 2 ranks, and on 3 to the bit
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Regression, adamw, assert_same_bits, fit
from trainkit import Callback, Data, Mixture
from trainkit.testing import run_ranks

pytestmark = pytest.mark.slow

NUM_SAMPLES = 26  # four batches of 6 and one of 2: fewer than there are ranks
BATCH = 6
KINDS = {"augmented": 7, "weighted": 7, "mixture": 7, "stream": 7, "stream, at the end of an epoch": 5}  # saved after

Reads = dict[int, list[int]]  # step -> the samples that this rank trained on


def inputs_of(index: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Samples(Dataset[tuple[int, Tensor]]):
    def __init__(self, first: int = 0, count: int = NUM_SAMPLES) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return self.first + index, inputs_of(self.first + index)


class Augmented(Samples):
    def get_sample(self, index: int, seed: int) -> tuple[int, Tensor]:
        return index, inputs_of(index) + torch.randn(4, generator=torch.Generator().manual_seed(seed % 2**63))


class Stream(IterableDataset[tuple[int, Tensor]]):
    """Shuffles with a generator of its own, whose state goes on from one epoch to the next."""

    def __init__(self) -> None:
        self.generator, self.position = torch.Generator().manual_seed(0), 0
        self.order: list[int] = []

    def __iter__(self) -> Any:
        if self.position in (0, NUM_SAMPLES):
            self.order, self.position = torch.randperm(NUM_SAMPLES, generator=self.generator).tolist(), 0
        while self.position < NUM_SAMPLES:
            self.position += 1
            index = self.order[self.position - 1]
            yield index, inputs_of(index)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "position": self.position, "order": list(self.order)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.generator.set_state(saved["generator"])
        self.position, self.order = saved["position"], saved["order"]


def data(kind: str) -> Data:
    if kind == "augmented":
        return Data(train=Augmented(), batch_size=BATCH, num_workers=1)
    if kind == "weighted":
        return Data(train=Samples(), batch_size=BATCH, sample_weights=range(NUM_SAMPLES))
    if kind == "mixture":
        parts = [Samples(0, 5), Samples(5, NUM_SAMPLES - 5)]
        return Data(train=Mixture(parts, weights=[1, 1], num_samples=NUM_SAMPLES), batch_size=BATCH)
    return Data(train=Stream(), batch_size=BATCH)


class Reading(Regression):
    """Notes the samples that it is trained on."""

    def __init__(self) -> None:
        super().__init__(adamw, hidden=8)
        self.read: list[int] = []

    def training_step(self, batch: Any) -> Any:
        indices, inputs = batch
        self.read += indices.tolist()
        return super().training_step((inputs, inputs.sum(1, keepdim=True).sin()))


class Notes(Callback):
    def __init__(self, save_after: int | None) -> None:
        self.reads: Reads = {}
        self.save_after = save_after

    def on_step_end(self, run: Any) -> None:
        self.reads[run.state.step] = list(run.task.read)
        run.task.read.clear()
        if run.state.step == self.save_after:
            run.checkpointer.save(reason="test")
            run.request_stop("test")


def train(
    strategy: Any, kind: str, run_dir: Path, *, save_after: int | None = None, resume: Path | None = None
) -> tuple[dict[str, Tensor], Reads]:
    task, notes = Reading(), Notes(save_after)
    settings = {"max_duration": "3epoch", "run_dir": run_dir, "report": False}
    fit(strategy, task, data(kind), notes, resume=resume, **settings)
    return dict(task.state_dict()), notes.reads


def on_three_ranks(folder: Path) -> dict[str, Any]:
    """Leave runs that were saved in their middle; return what one that goes on and an uninterrupted one end with."""
    for kind, step in KINDS.items():
        train(DDPStrategy(device="cpu"), kind, folder / kind, save_after=step)
    whole = train(DDPStrategy(device="cpu"), "augmented", folder / "whole")[0]
    resumed = train(DDPStrategy(device="cpu"), "augmented", folder / "again", resume=folder / "augmented")[0]
    return {"whole": whole, "resumed": resumed}


def on_two_ranks(folder: Path) -> dict[str, tuple[dict[str, Tensor], Reads]]:
    return {
        kind: train(DDPStrategy(device="cpu"), kind, folder / f"{kind} on two", resume=folder / kind) for kind in KINDS
    }


def test_other_orders_go_on_with_what_is_left_on_another_number_of_ranks(tmp_path: Path) -> None:
    for ends in run_ranks(on_three_ranks, 3, tmp_path):
        assert_same_bits(ends["resumed"], ends["whole"])
    ranks = run_ranks(on_two_ranks, 2, tmp_path)
    for kind, step in KINDS.items():
        weights, reads = train(SingleStrategy(device="cpu"), kind, tmp_path / f"{kind} on one")
        (first, own), (second, others) = (rank[kind] for rank in ranks)
        assert_same_bits(first, second)
        expected = {number: samples for number, samples in reads.items() if number > step}
        assert {n: interleaved(own[n], others[n]) for n in own} == expected, kind
        torch.testing.assert_close(first, weights, rtol=1e-4, atol=1e-5)


def interleaved(first: list[int], second: list[int]) -> list[int]:
    whole = [-1] * (len(first) + len(second))
    whole[::2], whole[1::2] = first, second
    return whole
