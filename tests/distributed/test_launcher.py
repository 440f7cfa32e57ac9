"""Local launcher: ranks started by this process, and their end when one fails or hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy

from trainkit import Data, TaskModule, Trainer
from trainkit.distributed.failure_store import RankError
from trainkit.distributed.launcher import _describe, _raise_failure, launch_ranks


def stopped_while_starting():
    """Launch ranks, and send this process SIGTERM once the first of them is there."""

    def send():
        while not multiprocessing.active_children():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    launch_ranks(partial(time.sleep, 120), num_ranks=4, enter=id, log_dir=None)


def test_a_signal_during_the_launch_ends_it_without_waiting():
    code = "from tests.distributed.test_launcher import stopped_while_starting; stopped_while_starting()"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 143, ended.stderr


BEGINNING = """
import os, pickle, sys
from functools import partial
from pathlib import Path
from trainkit.distributed.launcher import RankEnvironment, _run_rank

folder = sys.argv[1]
run = partial(Path(folder + ".ran").touch)
Path(folder + ".up").touch()
_run_rank(pickle.dumps((id, run)), RankEnvironment(0, 2, 0, os.getppid(), folder, None, 1, None))
"""


def test_a_rank_begins_once_all_are_started_and_exits_if_the_launch_is_aborted(tmp_path):
    folder, up, ran = (tmp_path / name for name in ("launch", "launch.up", "launch.ran"))
    folder.mkdir()
    rank = subprocess.Popen([sys.executable, "-c", BEGINNING, str(folder)])
    try:
        deadline = time.monotonic() + 60
        while not up.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        assert rank.poll() is None
        folder.rmdir()
        assert rank.wait(timeout=20) == 1
        assert not ran.exists()
    finally:
        rank.kill()
        rank.wait()


def test_the_first_failure_of_any_rank_is_raised_and_not_its_consequences(tmp_path):
    for rank, error in ((2, RankError("rank 1 is gone")), (1, KeyError("first")), (0, ValueError("second"))):
        (tmp_path / f"failure_{rank}.pickle").write_bytes(_describe(rank, error))
        time.sleep(0.01)
    names = {rank: f"rank {rank}" for rank in range(3)}

    with pytest.raises(KeyError, match="first") as raised:
        _raise_failure(tmp_path, names, dict.fromkeys(names, 1), [])

    assert "rank 1: KeyError: 'first'" in str(raised.value.__cause__)


class Hanging(TaskModule):
    """Leaves each rank's process id in `folder`; rank 1 never returns from its third step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.folder, self.steps = folder, 0

    def training_step(self, batch: Any) -> Any:
        rank = os.environ["RANK"]
        (self.folder / f"rank_{rank}.pid").write_text(str(os.getpid()))
        self.steps += 1
        if self.steps == 3 and rank == "1":
            time.sleep(600)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_line_and_all_ranks_end(tmp_path):
    strategy = DDPStrategy(devices=2, device="cpu", timeout_seconds=5.0)
    trainer = Trainer(strategy, max_duration="10step", callbacks=[], loggers=[], run_dir=tmp_path / "run")
    data = Data(train=TensorDataset(torch.randn(64, 4)), batch_size=4)
    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        trainer.fit(Hanging(tmp_path), data)
    assert time.monotonic() - start < 60
    message = str(raised.value)
    assert "rank 0 timed out after 5 s in backward of step 2, bucket 0 of 1. Position of each rank:" in message
    assert "rank 1: has not come; it is in step 2, Hanging.training_step, " in message
    assert "test_launcher.py:" in message
    pids = [int((tmp_path / f"rank_{rank}.pid").read_text()) for rank in range(2)]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
