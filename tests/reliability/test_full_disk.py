"""A run on a disk that is full for a while."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint

from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.checkpoint.store import CheckpointStore


def test_training_continues_while_the_disk_is_full_and_saves_when_there_is_room(small_disk: Path) -> None:
    filler = small_disk / "filler"

    class Cleaner(Callback):
        def on_step_end(self, run: Any) -> None:
            if run.state.step == 2:
                filler.write_bytes(bytes(9 * 2**20 - 2**17 - sum(p.stat().st_size for p in small_disk.rglob("*.*"))))
            elif run.state.step == 5:
                filler.unlink()

    class Wide(TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 100_000)

        def training_step(self, batch: Any) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callbacks = [Cleaner(), Checkpoint(every="2step", save_last_k=None, retry_every="1step")]
    trainer = Trainer(callbacks=callbacks, loggers=[], run_dir=small_disk, report=False)
    trainer.fit(Wide(), Data(train=TensorDataset(torch.ones(8, 1)), batch_size=1))
    assert [entry.step for entry in CheckpointStore(small_disk / "checkpoints").entries()] == [5, 6, 8]
