"""What goes wrong on a device that is busy or full: saves while it computes, and micro-batches that do not fit."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.gpu.figures import figure
from tests.marks import gpus
from tests.tasks import EachStep, assert_close, assert_same_bits, fit, weights
from trainkit import Data, TaskModule
from trainkit.checkpoint.store import CheckpointStore

pytestmark = gpus()
PRETENDED = "pretended_torch" in sys.modules
WIDTH, BATCH_SIZE, HIDDEN = 16, 16, 4


class Noisy(TaskModule):
    """Dropout, batch norm and `size` times as many products as it needs."""

    def __init__(self, size: int = WIDTH) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = nn.Sequential(
                nn.Linear(WIDTH, size), nn.BatchNorm1d(size), nn.Tanh(), nn.Dropout(0.3), nn.Linear(size, 1)
            )

    def training_step(self, batch: Any) -> Any:
        return (self.network(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Wide(TaskModule):
    """Keeps `size` numbers for each sample until backward, a few times over; writes the sizes of its batches."""

    def __init__(self, size: int, file: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(WIDTH, HIDDEN)
        self.size, self.file = size, str(file)

    def training_step(self, batch: Any) -> Any:
        with open(self.file, "a", encoding="utf-8") as file:  # which all ranks share
            file.write(f"{len(batch[0])}\n")
        hidden = self.layer(batch[0])
        spread = torch.linspace(0.5, 1.5, self.size // HIDDEN, device=hidden.device, dtype=hidden.dtype)
        return (hidden.unsqueeze(2) * spread).tanh().mean(2).sub(batch[0].mean(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(num_samples: int = 64) -> Data:
    inputs = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(1))
    return Data(train=TensorDataset(inputs), batch_size=BATCH_SIZE)


def test_checkpoints_that_are_written_while_the_device_is_busy_have_the_weights_of_their_steps(tmp_path):
    size = 256 if PRETENDED else 1 << 20
    kept = EachStep(lambda run: weights(run.task))
    saving = Checkpoint(every="1step", async_save=True, save_last_k=None)
    fit(SingleStrategy(device="cuda"), Noisy(size), data(), kept, saving, run_dir=tmp_path, max_duration="8step")
    store = CheckpointStore(tmp_path / "checkpoints")
    entries = {entry.step: entry for entry in store.entries()}
    figure("checkpoints of 8 steps", len(entries))
    assert 8 in entries
    for step, entry in entries.items():
        assert_same_bits(store.load(entry)["task"], {name: t.cpu() for name, t in kept.seen[step - 1].items()})


def test_a_run_resumed_on_the_device_is_bit_equal_with_dropout(tmp_path):
    whole, resumed = Noisy(), Noisy()
    settings = {"max_duration": "10step"}
    fit(SingleStrategy(device="cuda"), whole, data(), run_dir=tmp_path / "whole", **settings)
    part = {"max_duration": "6step", "run_dir": tmp_path / "part"}
    fit(SingleStrategy(device="cuda"), Noisy(), data(), Checkpoint(every="3step", async_save=True), **part)
    fit(SingleStrategy(device="cuda"), resumed, data(), resume=tmp_path / "part", run_dir=tmp_path / "rest", **settings)
    assert_same_bits(resumed, whole)


@pytest.fixture
def room(request):
    """Fill the device but for some bytes, and return how many are left."""
    if PRETENDED:
        import pretended_torch

        pretended_torch.device.set_memory_limit(request.param >> 5)
        yield request.param >> 5
        pretended_torch.device.set_memory_limit(8 << 30)
        return
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(max(free - request.param, 0), dtype=torch.uint8, device="cuda")
    yield request.param
    del ballast
    torch.cuda.empty_cache()


def sizes(file: Any) -> list[int]:
    return [int(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("room", [1 << 30], indirect=True)
def test_micro_batches_that_fit_into_a_full_device_have_the_weights_of_a_run_that_started_with_them(room, tmp_path):
    size = room // (4 * BATCH_SIZE)  # a tensor of all samples would take all the room
    found, given = Wide(size, tmp_path / "found"), Wide(size, tmp_path / "given")
    strategy = SingleStrategy(device="cuda", micro_batch_size="auto")
    fit(strategy, found, data(), run_dir=tmp_path / "auto", max_duration="3step")
    first, *_, fitting = sizes(tmp_path / "found")
    figure("samples that fit of 16", fitting)
    assert first == BATCH_SIZE > fitting
    strategy = SingleStrategy(device="cuda", micro_batch_size=fitting)
    fit(strategy, given, data(), run_dir=tmp_path / "whole", max_duration="3step")
    assert_same_bits(found, given)


# More room: the ranks have contexts of their own there.
@pytest.mark.parametrize("room", [6 << 30], indirect=True)
def test_two_ranks_on_a_full_device_have_the_weights_of_one_process(room, tmp_path):
    size = room // (2 * BATCH_SIZE)
    found, given = Wide(size, tmp_path / "found"), Wide(4096, tmp_path / "given")
    strategy = DDPStrategy(device="cuda", devices=2, backend="gloo", micro_batch_size="auto")
    fit(strategy, found, data(), run_dir=tmp_path / "auto", max_duration="3step")
    fitting = sizes(tmp_path / "found")[-1]
    figure("samples of each of two ranks that fit of 8", fitting)
    assert fitting < BATCH_SIZE // 2 or PRETENDED  # where ranks share no memory
    # The mean over `spread` hardly depends on its number of points.
    fit(SingleStrategy(device="cpu"), given, data(), run_dir=tmp_path / "whole", max_duration="3step")
    assert_close(found.cpu(), given, rtol=1e-3, atol=1e-4)
