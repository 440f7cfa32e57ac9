"""Errors of the healthy ranks when another one fails, is killed or hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from trainkit.strategies.fusion.strategy import FusionStrategy

from tests.equality import Perceptron, numbers
from tests.strategies.fusion.training import train
from trainkit import Data
from trainkit.distributed.failure_store import RankError
from trainkit.testing import rank_outcomes

HANG_SECONDS = 4.0
LIMITS = {"timeout": 400.0, "patience": 400.0}  # below the strategy's own
TRANSPORTS = pytest.mark.parametrize(
    ("transport", "thread"), [("shared_memory", False), ("shared_memory", True), ("exchange", False)]
)


class FailingOnOne(Perceptron):
    """Its third step fails on one rank."""

    rank, fault = 1, "raise"
    until = Path()

    def training_step(self, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3 and dist.get_rank() == self.rank:
            _fail(self.fault, self.until)
        return super().training_step(batch)


def _fail(fault: str, until: Path) -> None:
    if fault == "raise":
        raise ZeroDivisionError(f"rank {dist.get_rank()} cannot go on")
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while not until.exists():
        time.sleep(0.05)
    os._exit(0)


def failing(fault, transport, thread, run_dir):
    """Train; return this rank's error and the seconds until it was raised."""
    task = FailingOnOne()
    task.fault, task.until = fault, Path(run_dir) / "noticed"
    strategy = FusionStrategy(
        device="cpu",
        transport=transport,
        communication_thread=thread,
        shard_optimizer=True,
        timeout_seconds=HANG_SECONDS if fault == "hang" else 600.0,
    )
    start = time.monotonic()
    try:
        train(strategy, task, Data(train=numbers(24), batch_size=6), run_dir=run_dir, steps=6)
    except RankError as error:
        seconds = time.monotonic() - start
        task.until.touch()
        return str(error), seconds
    return "no error", 0.0


@TRANSPORTS
def test_one_ranks_exception_ends_the_others_with_its_text(transport, thread, tmp_path):
    outcomes = rank_outcomes(failing, 2, "raise", transport, thread, tmp_path, **LIMITS)
    assert "ZeroDivisionError: rank 1 cannot go on" in outcomes[1].failure
    message, _ = outcomes[0].value
    assert "rank 1" in message and "cannot go on" in message


@TRANSPORTS
def test_a_killed_rank_ends_the_others(transport, thread, tmp_path):
    outcomes = rank_outcomes(failing, 2, "die", transport, thread, tmp_path, **LIMITS)
    assert outcomes[1].failure == "the process was killed by SIGKILL"
    message, _ = outcomes[0].value
    assert "stopped while waiting in backward of step 2, bucket 0 of 1" in message and "gone" in message


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "thread"), [("shared_memory", False), ("exchange", True)])
def test_a_timeout_names_the_waiting_rank_the_operation_and_the_absent_rank(transport, thread, tmp_path):
    outcomes = rank_outcomes(failing, 2, "hang", transport, thread, tmp_path, **LIMITS)
    message, seconds = outcomes[0].value
    assert (
        f"rank 0 timed out after {HANG_SECONDS:.0f} s in backward of step 2, bucket 0 of 1. Position of each rank:"
        in message
    )
    assert "rank 1: has not come" in message
    assert seconds > HANG_SECONDS
