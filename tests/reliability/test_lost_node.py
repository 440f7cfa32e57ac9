"""Two machines under torchrun train together, and one continues alone when the other is lost."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed import run as torchrun
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.program import Program, wait_until
from tests.tasks import Regression, adamw, fit, regression_data
from trainkit import Callback, Data, Strategy
from trainkit.checkpoint.store import load_from

LOST_AT = 7
RENDEZVOUS, NOBODY = "torch.rendezvous.lost", b"Y2FuaW1hZGFt"  # torch's key of the machines that are there
ELASTIC = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    data = Data(train=regression_data(30), batch_size=8)
    callbacks = (NoteStart(), *callbacks, Checkpoint(every="3step"))
    settings = {"max_duration": "3epoch", "run_dir": run_dir, "resume": "auto"}
    fit(strategy, Regression(adamw, hidden=16), data, *callbacks, **settings)


def agent(machine: str, port: int, run_dir: Path, log: Path) -> Program:
    """Start what is typed on each machine."""
    # Who comes first decides how long the second is waited for: for both machines to start, but not for the lost one.
    last_call = 1 if machine == "kept" else 120
    settings = f"last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=15,is_host=0"
    environment = {key: value for key, value in os.environ.items() if key not in ELASTIC}
    command = [
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=lost"),
        *(f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", f"--rdzv-conf={settings}"),
        *("-m", __name__, str(run_dir)),
    ]
    with log.open("wb") as file:
        streams = (0, file.fileno(), file.fileno())
        return Program(torchrun.main, command, streams=streams, environment={**environment, "MACHINE": machine})


def exit_codes(folder: Path) -> dict[str, int]:
    """Run an agent for each machine, and return how they ended; no process is left."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where the ranks meet
    with agent("lost", store.port, folder / "run", folder / "lost.log") as lost:
        wait_until(
            lambda: store.check([RENDEZVOUS]) and store.get(RENDEZVOUS) != NOBODY,
            runs=lambda: lost.exit_code is None,
            said=(folder / "lost.log").read_text,
        )
        with agent("kept", store.port, folder / "run", folder / "kept.log") as kept:
            return {"lost": lost.wait(), "kept": kept.wait()}


def starts(folder: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (folder / "run" / "starts.jsonl").read_text().splitlines()]


def assert_trained_as_one_process(folder: Path) -> None:
    train(folder / "whole", SingleStrategy(device="cpu"))
    whole, trained = (load_from(folder / name).payload for name in ("whole", "run"))
    assert trained["state"]["step"] == whole["state"]["step"] == 12
    torch.testing.assert_close(trained["task"], dict(whole["task"]), check_device=False)


@pytest.mark.slow
def test_a_run_on_two_machines_that_loses_one_continues_to_the_weights_of_an_uninterrupted_run(tmp_path):
    codes = exit_codes(tmp_path)
    assert codes == {"lost": -signal.SIGKILL, "kept": 0}, (tmp_path / "kept.log").read_text()
    assert starts(tmp_path) == [{"step": 0, "ranks": 2, "batch": 8}, {"step": 6, "ranks": 1, "batch": 8}]
    assert_trained_as_one_process(tmp_path)


if __name__ == "__main__":
    train(Path(sys.argv[1]), DDPStrategy(device="cpu"), LoseMachine())
