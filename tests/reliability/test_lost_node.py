"""Two machines under torchrun train together, and one continues alone when the other is lost."""

import json
import os
import signal
import socket
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
from trainkit.strategies.single import SingleStrategy

from trainkit import Callback, Data, Strategy, TaskModule, Trainer
from trainkit.checkpoint.store import load_from

LOST_AT = 7
ELASTIC = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Regression(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class NoteStart(Callback):
    def on_fit_start(self, run: Any) -> None:
        if run.is_main:
            start = {"step": run.state.step, "ranks": run.strategy.comm.world_size, "batch": run.plan.batch_size}
            with open(run.run_dir / "starts.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(start) + "\n")


class LoseMachine(Callback):
    """Kills the agent of this machine and then its rank, as if the power had failed."""

    def on_step_end(self, run: Any) -> None:
        if os.environ.get("MACHINE") == "lost" and run.state.step == LOST_AT:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def train(run_dir: Path, strategy: Strategy, *callbacks: Callback) -> None:
    inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        strategy,
        max_duration="3epoch",
        callbacks=[NoteStart(), *callbacks, Checkpoint(every="3step")],
        loggers=[],
        run_dir=run_dir,
    )
    data = Data(train=TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    trainer.fit(Regression(), data, resume="auto")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def agent(machine: str, port: int, run_dir: Path, log: Path) -> "subprocess.Popen[bytes]":
    """Start what is typed on each machine; `kept` is the one where the ranks meet."""
    settings = f"last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5,is_host={int(machine == 'kept')}"
    environment = {key: value for key, value in os.environ.items() if key not in ELASTIC}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=lost", "--local-addr=127.0.0.1"),
        *(f"--rdzv-conf={settings}", __file__, str(run_dir)),
    ]
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env={**environment, "OMP_NUM_THREADS": "1", "MACHINE": machine},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its ranks can be ended with it
        )


def exit_codes(folder: Path, *machines: str) -> dict[str, int]:
    """Run an agent for each machine, and return how they ended; no process is left."""
    port = free_port()
    agents = {name: agent(name, port, folder / "run", folder / f"{name}.log") for name in machines}
    try:
        return {name: process.wait(120) for name, process in agents.items()}
    finally:
        for process in agents.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def starts(folder: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (folder / "run" / "starts.jsonl").read_text().splitlines()]


def assert_trained_as_one_process(folder: Path) -> None:
    train(folder / "whole", SingleStrategy(device="cpu"))
    whole, trained = (load_from(folder / name).payload for name in ("whole", "run"))
    assert trained["state"]["step"] == whole["state"]["step"] == 12
    torch.testing.assert_close(trained["task"], dict(whole["task"]), check_device=False)


@pytest.mark.slow
def test_a_run_on_two_machines_that_loses_one_continues_to_the_weights_of_an_uninterrupted_run(tmp_path):
    codes = exit_codes(tmp_path, "lost", "kept")
    assert codes == {"lost": -signal.SIGKILL, "kept": 0}, (tmp_path / "kept.log").read_text()
    assert starts(tmp_path) == [{"step": 0, "ranks": 2, "batch": 8}, {"step": 6, "ranks": 1, "batch": 8}]
    assert_trained_as_one_process(tmp_path)


if __name__ == "__main__":
    train(Path(sys.argv[1]), DDPStrategy(device="cpu"), LoseMachine())
