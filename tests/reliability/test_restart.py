"""Under torchrun a killed rank leads to a restart that continues to the weights of an uninterrupted run."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy

from tests.program import Program
from tests.tasks import Regression, adamw, fit, regression_data
from trainkit import Callback, Data
from trainkit.checkpoint.sharded_state import in_memory
from trainkit.checkpoint.store import load_from
from trainkit.distributed.fork_server import start_fork_server
from trainkit.testing import run_ranks

ELASTIC = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class NoteStart(Callback):
    def on_fit_start(self, run: Any) -> None:
        if run.is_main:
            with open(run.run_dir / "starts.txt", "a", encoding="utf-8") as file:
                file.write(f"{run.state.step} ")


class KillInTurn(Callback):
    """Kills rank 0 after step 4, and after the restart rank 1 after step 7."""

    def on_step_end(self, run: Any) -> None:
        restarts, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], run.strategy.comm.rank
        if (restarts, rank, run.state.step) in (("0", 0, 4), ("1", 1, 7)):
            os.kill(os.getpid(), 9)


def train(run_dir: Path, kind: str, *callbacks: Callback) -> None:
    strategy: Any = DDPStrategy(device="cpu")
    if kind != "ddp":
        from trainkit.strategies.fsdp.strategy import FSDPStrategy  # a second for each of the processes

        strategy = FSDPStrategy(device="cpu", units=["Linear"])
    task, data = Regression(adamw, hidden=16, dropout=0.3), Data(train=regression_data(30), batch_size=8)
    callbacks = (NoteStart(), *callbacks, Checkpoint(every="3step", sharded=kind == "fsdp, sharded"))
    fit(strategy, task, data, *callbacks, max_duration="3epoch", run_dir=run_dir, resume="auto")


def launch(*arguments: object) -> None:
    """Start two ranks by torchrun's agent, which restarts them at most twice; ranks are forked, not new programs."""
    start_fork_server(preload=[__name__, "trainkit.strategies.fsdp.strategy"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
        monitor_interval=0.1,
    )
    elastic_launch(config, train)(*arguments, KillInTurn())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp, sharded"])
def test_restarts_after_killed_ranks_end_with_the_weights_of_an_uninterrupted_run(kind, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in ELASTIC}
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        streams = (0, file.fileno(), file.fileno())
        with Program(launch, tmp_path / "run", kind, streams=streams, environment=environment) as program:
            code = program.wait()
    assert code == 0, log.read_text()
    assert (tmp_path / "run" / "starts.txt").read_text() == "0 3 6 "
    run_ranks(train, 2, tmp_path / "whole", kind)
    whole, restarted = (in_memory(load_from(tmp_path / name).payload) for name in ("whole", "run"))
    assert restarted["state"]["step"] == whole["state"]["step"] == 12
    assert all(torch.equal(restarted["task"][name], tensor) for name, tensor in whole["task"].items())
