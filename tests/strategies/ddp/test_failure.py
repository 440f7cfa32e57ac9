"""Failures of a rank: the error of the healthy ranks, which do not wait for the timeout."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainkit.strategies.reducer.reducer import Reducer, ReducerSettings
from trainkit.strategies.transports.process_group import WatchedWork
from trainkit.strategies.transports.selection import open_transport

from trainkit.cli import main as cli
from trainkit.distributed.failure_store import FailureStore, RankError
from trainkit.testing import rank_outcomes, run_ranks

HANG_SECONDS = 4.0
LIMITS = {"timeout": 400.0, "patience": 400.0}  # below the reducers' own
TRANSPORTS = pytest.mark.parametrize("transport", ["process_group", "shared_memory"])


def fail_in_step_2(transport: str, fault: str, folder: Path) -> tuple[str, float]:
    """Train with a failure of rank 1 in step 2. Return the error of the others, and the seconds until it was raised."""
    model = nn.Linear(8, 8)
    settings = ReducerSettings(timeout_seconds=HANG_SECONDS if fault == "hang" else 600.0)
    reducer = Reducer(
        list(model.named_parameters()),
        group=dist.group.WORLD,
        settings=settings,
        open_transport=partial(open_transport, name=transport),
    )
    rank = dist.get_rank()
    dist.barrier()  # a rank that is started late has not failed
    start = time.monotonic()
    try:
        for step in range(4):
            if step == 2:
                dist.barrier()  # the others have left step 1
            if rank == 1 and step == 2:
                _fail(reducer, fault, folder)
            with reducer.session():
                loss = model(torch.ones(2, 8)).sum()
                start = time.monotonic()
                loss.backward()
                if rank == 1 and step == 2 and fault == "leave":
                    raise ValueError("bad batch in shard 17")
    except RankError as error:
        seconds = time.monotonic() - start
        with pytest.raises(RuntimeError, match="cannot be reduced any more: "):
            reducer.start()
        (folder / f"{rank}_has_ended").touch()
        return str(error), seconds
    except ValueError:
        _take_no_part(folder)
    return "no error", time.monotonic() - start


def _take_no_part(folder: Path) -> None:
    """Stay alive until the others have ended."""
    while len(list(folder.iterdir())) < dist.get_world_size() - 1:
        time.sleep(0.02)
    os._exit(0)


def _fail(reducer: Reducer, fault: str, folder: Path) -> None:
    if fault == "raise":
        reducer.publish_failure("ValueError: bad batch in shard 17")
        _take_no_part(folder)
    elif fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang":
        _take_no_part(folder)
    elif fault == "slow":
        time.sleep(1.5)


@pytest.mark.parametrize(
    ("transport", "fault", "waits"),
    [("process_group", "raise", "2"), ("shared_memory", "raise", "2"), ("shared_memory", "leave", "[23]")],
)
def test_the_root_cause_reaches_ranks_that_wait(transport, fault, waits, tmp_path):
    # A session that fails after its bucket has been started: the others wait for its shard of that bucket, or, if that
    # is summed already, in the next step.
    outcomes = rank_outcomes(fail_in_step_2, 2, transport, fault, tmp_path, **LIMITS)
    message, _ = outcomes[0].value
    assert "rank 1 failed in step 2: ValueError: bad batch in shard 17" in message
    assert re.search(rf"backward of step {waits}, bucket 0 of 1", message)


@TRANSPORTS
def test_a_killed_rank_is_noticed(transport, tmp_path):
    outcomes = rank_outcomes(fail_in_step_2, 2, transport, "die", tmp_path, **LIMITS)
    assert outcomes[1].failure == "the process was killed by SIGKILL"
    message, _ = outcomes[0].value
    assert "gone" in message


@pytest.mark.slow
@TRANSPORTS
def test_a_timeout_reports_the_position_of_each_rank(transport, tmp_path):
    outcomes = rank_outcomes(fail_in_step_2, 3, transport, "hang", tmp_path, **LIMITS)
    for rank in (0, 2):
        message, seconds = outcomes[rank].value
        assert (
            "timed out after 4 s in backward of step 2, bucket 0 of 1" in message or "stopped while waiting" in message
        )
        assert seconds > HANG_SECONDS - 0.5
    messages = outcomes[0].value[0] + outcomes[2].value[0]
    assert "rank 1: has not come" in messages


@TRANSPORTS
def test_a_slow_rank_is_waited_for(transport, tmp_path):
    assert [message for message, _ in run_ranks(fail_in_step_2, 2, transport, "slow", tmp_path)] == ["no error"] * 2


def test_the_command_line_shows_a_failure_of_another_rank_without_a_traceback(monkeypatch, capsys):
    message = "stopped while waiting in step 3, because rank 1 failed in step 3: ValueError: bad batch"

    def wait(argv: list[str]) -> int:
        raise RankError(message)

    monkeypatch.setattr(cli, "_run", wait)
    assert cli.main([]) == 1
    assert capsys.readouterr().err == f"{message}\n"


class EndsBetween:
    """A collective that ends well just after the time slice of a wait has run out."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, limit: object) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return True


class NothingKnown:
    def root_cause(self) -> None:
        return None

    def note_waiting(self, where: str) -> None:
        pass


def test_a_collective_that_ends_just_after_a_slice_has_not_failed():
    work = WatchedWork(EndsBetween(), where="the test", failure_store=NothingKnown(), timeout_seconds=5.0)
    work.wait()
    assert work.work.waits > 1


class _Group:
    """The parts of a process group that a failure store uses."""

    group_name = "ranks"

    def __init__(self, port: int) -> None:
        self._port = port

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def get_group_store(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self._port, is_master=False)


def test_a_failure_store_keeps_the_first_cause_and_reports_when_its_process_is_gone(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = _Group(server.port)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", group.get_group_store)  # before torch 2.9
    failure_store, other = FailureStore(group, token="gone"), FailureStore(group, token="gone")
    assert failure_store.root_cause() is None
    other.publish("the cause")
    failure_store.publish("what followed from it")
    assert failure_store.root_cause() == other.root_cause() == "the cause"
    del server
    failure_store.publish("nobody reads this")
    assert (
        failure_store.root_cause()
        == "the process that kept the ranks' store on 127.0.0.1, rank 0 or the one that started them, is gone"
    )
