"""Failure store and watchdog: the step, phase and line of a rank that hangs."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.tasks import Fitting, on_cpu
from trainkit import Data, Trainer
from trainkit.distributed import failure_store
from trainkit.distributed.collectives import ProcessGroupCollectives
from trainkit.distributed.failure_store import (
    FailureStore,
    Host,
    RankError,
    RankWatchdog,
    is_lost,
    is_of_this_machine,
    place_of,
)
from trainkit.run_dir.failure import phase_in
from trainkit.testing import rank_outcomes, run_ranks

LIMIT = 10.0  # seconds; every collective before the hang has to end within it


class Hanging(Fitting):
    """Rank 1 hangs, in the third step or in the validation after it, until the other has ended."""

    def __init__(self, *, where: str, until: Path) -> None:
        super().__init__(nn.Linear(4, 1))
        self.where, self.until, self.calls = where, until, 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.calls += 1
        if self.where == "training" and self.calls == 3:
            self.hang()
        return super().training_step(batch)

    def validation_step(self, batch: list[Tensor]) -> Tensor:
        if self.where == "validation" and self.calls:
            self.hang()
        return super().training_step(batch)

    def hang(self) -> None:
        if dist.get_rank() == 1:
            while not self.until.exists():
                time.sleep(0.02)
            os._exit(0)


def fit_until_rank_1_hangs(strategy: str, where: str, folder: str) -> str:
    failure_store.POLL_SECONDS, failure_store.ANSWER_SECONDS = 0.05, 300.0  # both ranks answer
    # The limit of gloo itself is that of the group, which a strategy makes by itself where ranks are started.
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    data = Data(train=TensorDataset(torch.ones(12, 4)), validation=TensorDataset(torch.ones(4, 4)), batch_size=4)
    made = on_cpu(strategy, timeout_seconds=LIMIT, process_group=group)
    trainer = Trainer(made, max_duration="1epoch", callbacks=[], loggers=[], run_dir=folder)
    ended = Path(folder) / "ended"
    try:
        trainer.fit(Hanging(where=where, until=ended), data)
    except RankError as error:
        ended.touch()
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("strategy", "where", "waits", "hangs"),
    [
        ("ddp", "training", "backward of step 2, bucket 0 of 1", "step 2, Hanging.training_step"),
        pytest.param(
            "ddp",
            "validation",
            " after step 3. Position of each rank:",
            "step 2, Hanging.validation_step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fsdp",
            "training",
            "forward and backward of step 2. Position",
            "step 2, Hanging.training_step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fsdp",
            "validation",
            " after step 3. Position of each rank:",
            "step 2, Hanging.validation_step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "torch_ddp",
            "training",
            "forward and backward of step 2. Position",
            "step 2, Hanging.training_step",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_timeout_reports_the_position_of_the_rank_that_hangs(strategy, where, waits, hangs, tmp_path):
    message = rank_outcomes(fit_until_rank_1_hangs, 2, strategy, where, str(tmp_path), patience=60)[0].value
    assert message.startswith(f"rank 0 timed out after {LIMIT:g} s in ")
    assert waits in message
    assert "rank 0: waits" in message
    assert f"rank 1: has not come; it is in {hangs}" in message, message
    assert f"{__file__}:" in message, "the line that hangs"


def answers_to_two_questions() -> list[str]:
    failure_store.POLL_SECONDS, failure_store.ANSWER_SECONDS = 0.01, 300.0  # both ranks answer
    store = FailureStore(dist.group.WORLD, token="test")
    there = RankWatchdog(store, step=lambda: 7 + dist.get_rank(), describe=phase_in)
    dist.barrier()
    positions = [store.who_waits() for _ in range(2)] if dist.get_rank() == 0 else []
    dist.barrier()
    there.close()
    there.close()
    assert not any(thread.name == "trainkit-watchdog" for thread in threading.enumerate())
    return positions


def test_every_question_is_answered_and_no_thread_remains():
    for positions in run_ranks(answers_to_two_questions, 2)[0]:
        assert positions.splitlines()[0] == "  rank 0: waits"
        assert "rank 1: has not come; it is in step 8, " in positions


def test_a_position_is_the_innermost_line_of_the_users_code():
    def here() -> Any:
        return sys._getframe()

    assert place_of(here(), phase_in) == f"{__file__}:{here().f_lineno}"


def test_only_errors_of_broken_collectives_mean_a_lost_rank():
    assert is_lost(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"))
    assert not is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost(ValueError("Connection closed by peer"))


# ---- Machines and links that are down


class SilentStore:
    """A store on a machine that no longer sends."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return True


def cause_with_a_silent_store() -> tuple[str | None, str | None]:
    failure_store.STORE_SECONDS = 0.1
    store = FailureStore(dist.group.WORLD, token="silent")
    store.store = SilentStore()
    first = store.root_cause()
    store.store = None  # and nobody asks it again
    return first, store.root_cause()


def test_a_store_that_does_not_answer_is_the_cause_and_is_asked_once() -> None:
    first, second = run_ranks(cause_with_a_silent_store, 1)[0]
    assert first == second
    assert "has not answered for 0 s: its machine or the link to it is down" in str(first)


def cause_with_the_store_on_a_host(has_store: str) -> str:
    """Return why three ranks on two hosts stop when the store does not answer; `has_store` is its host."""
    name = "host0" if dist.get_rank() < 2 else "host1"
    failure_store.STORE_SECONDS = 0.1
    failure_store.socket.gethostname = lambda: name
    failure_store.is_of_this_machine = lambda address: address == "127.0.0.1" and name == has_store
    joined = ProcessGroupCollectives.join(
        dist.group.WORLD, device=torch.device("cpu"), timeout_seconds=LIMIT, step=lambda: 0
    )
    store = joined.failure_store
    assert store is not None
    store.store = SilentStore()
    return str(store.root_cause())


@pytest.mark.parametrize(
    ("has_store", "place", "ranks"),
    [
        ("host0", "host0", "; ranks there: 0, 1"),
        ("host1", "host1", "; ranks there: 2"),
        ("one without ranks", "127.0.0.1", ""),
    ],
)
def test_the_host_of_a_store_that_does_not_answer_is_named_with_its_ranks(has_store, place, ranks) -> None:
    for cause in run_ranks(cause_with_the_store_on_a_host, 3, has_store):
        assert cause == (
            f"the process that kept the ranks' store on {place}, rank 0 or the one that started them, has not answered "
            f"for 0 s: its machine or the link to it is down{ranks}"
        )


def test_the_address_of_another_machine_is_not_of_this_one() -> None:
    assert is_of_this_machine("127.0.0.1") and is_of_this_machine("localhost")
    assert not is_of_this_machine("192.0.2.1"), "an address for documentation"
    assert not is_of_this_machine(""), "a store without a network"


def errors_of_two_hosts() -> tuple[str, str]:
    failure_store.ANSWER_SECONDS = failure_store.POLL_SECONDS = 0.2
    hosts = [Host("host0", has_store=True), Host("host1", has_store=False)]
    store = FailureStore(dist.group.WORLD, token="hosts", hosts=hosts)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()
        return "", ""
    watchdog = RankWatchdog(store, step=lambda: 7, describe=lambda frames: "somewhere")
    gone, late = (
        str(store.broken(RuntimeError(text), where="a sum", seconds=3.0))
        for text in ("Connection closed by peer", "Timed out waiting 3000ms")
    )
    watchdog.close()
    dist.barrier()
    return gone, late


def test_the_host_of_a_rank_that_does_not_answer_is_named() -> None:
    gone, late = run_ranks(errors_of_two_hosts, 2)[0]
    assert gone == (
        "stopped while waiting in a sum, because a rank is gone (Connection closed by peer); no answer from "
        "rank 1 on host1"
    )
    assert "rank 0 timed out after 3 s in a sum" in late
    assert late.endswith("  rank 0 on host0: waits\n  rank 1 on host1: has not come, and does not answer")
