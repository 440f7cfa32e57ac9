"""Under torchrun a killed rank leads to a restart that continues to the weights of an uninterrupted run."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy

from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.checkpoint.store import load_from
from trainkit.testing import run_ranks

ELASTIC = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Regression(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))

    def training_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class NoteStart(Callback):
    def on_fit_start(self, run: Any) -> None:
        if run.is_main:
            with open(run.run_dir / "starts.txt", "a", encoding="utf-8") as file:
                file.write(f"{run.state.step} ")


class KillAt(Callback):
    """Kills one rank, in its first life."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, run: Any) -> None:
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first_life and run.strategy.comm.rank == self.rank and run.state.step == self.step:
            os.kill(os.getpid(), 9)


def train(run_dir: Path, *callbacks: Callback) -> None:
    inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    data = Data(train=TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    trainer = Trainer(
        DDPStrategy(device="cpu"),
        max_duration="3epoch",
        callbacks=[NoteStart(), *callbacks, Checkpoint(every="3step")],
        loggers=[],
        run_dir=run_dir,
    )
    trainer.fit(Regression(), data, resume="auto")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_restart_after_a_killed_rank_ends_with_the_weights_of_an_uninterrupted_run(tmp_path, rank):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {key: value for key, value in os.environ.items() if key not in ELASTIC}
    process = subprocess.Popen(
        [*command, __file__, str(tmp_path / "run"), str(rank)],
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # so that its ranks can be ended with it
    )
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, errors
    assert (tmp_path / "run" / "starts.txt").read_text() == "0 6 "
    run_ranks(train, 2, tmp_path / "whole")
    whole, restarted = (load_from(tmp_path / name).payload for name in ("whole", "run"))
    assert restarted["state"]["step"] == whole["state"]["step"] == 12
    assert all(torch.equal(restarted["task"][name], tensor) for name, tensor in whole["task"].items())


if __name__ == "__main__":
    train(Path(sys.argv[1]), KillAt(int(sys.argv[2]), 7))
