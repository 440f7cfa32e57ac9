"""Local launcher: ranks started by this process, and their end when one fails or hangs."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy

from tests.program import Program, is_running, wait_until
from tests.tasks import Fitting, Regression, regression_data
from trainkit import Callback, Data, Trainer
from trainkit.distributed.failure_store import RankError
from trainkit.distributed.launcher import (
    _pickled_failure,
    _raise_first_failure,
    environment_of_caller,
    launch_ranks,
    run_processes,
)


def ended(function: Callable[[], None]) -> tuple[int, str]:
    """Return the exit code of a program, and what came from its standard error until nobody could write to it."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    text = b""
    with os.fdopen(reader, "rb", buffering=0) as errors, Program(function, streams=(0, 1, writer)) as program:
        os.close(writer)

        def is_closed() -> bool:
            nonlocal text
            while part := errors.read():
                text += part
            return part is not None

        wait_until(is_closed)
        return program.wait(), text.decode()


def stopped_while_starting():
    """Launch ranks, and send this process SIGTERM once the first of them is there."""

    def send():
        while not multiprocessing.active_children():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    launch_ranks(partial(time.sleep, 600), num_ranks=4, enter=id, log_dir=None)


def test_a_signal_during_the_launch_ends_it_without_waiting():
    code, errors = ended(stopped_while_starting)
    assert code == 143, errors


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        raise ValueError("a broken sample")


def fail_in_a_worker() -> None:
    subprocess.Popen(["sleep", "1000"])  # holds the output of the caller, as workers do
    list(DataLoader(Broken(), num_workers=2))


def launch_with_a_broken_worker() -> None:
    launch_ranks(fail_in_a_worker, num_ranks=2, enter=id, log_dir=None)


def test_a_failure_in_a_data_worker_leaves_no_process_and_its_traceback_is_the_last_output():
    code, errors = ended(launch_with_a_broken_worker)
    assert code == 1
    assert errors.rstrip().endswith("ValueError: a broken sample")


def start_method() -> str:
    return multiprocessing.get_start_method()


def test_a_rank_starts_processes_by_the_method_of_its_caller():
    (outcome,) = run_processes([start_method], patience=0.0)
    assert outcome.value == multiprocessing.get_start_method()


def test_the_first_failure_of_any_rank_is_raised_and_not_its_consequences():
    errors = (ValueError("second"), KeyError("first"), RankError("rank 1 is gone"))
    outcomes = [
        replace(pickle.loads(_pickled_failure(rank, error)), seconds=3.0 - rank) for rank, error in enumerate(errors)
    ]
    outcomes[1].seconds = 1.5

    with pytest.raises(KeyError, match="first") as raised:
        _raise_first_failure(outcomes, [], "rank {}".format)

    assert "rank 1: KeyError: 'first'" in str(raised.value.__cause__)


def fail_or_hang(rank: int) -> None:
    if rank == 0:
        raise ValueError("of rank 0")
    threading.Event().wait()


def test_a_failure_ends_ranks_that_hang():
    failed, hung = run_processes([partial(fail_or_hang, 0), partial(fail_or_hang, 1)], patience=0.1)
    assert "ValueError: of rank 0" in failed.failure
    assert "had not ended when the others were stopped" in hung.failure
    assert hung.is_consequence


def seen_by_rank(name: str) -> tuple[str | None, str]:
    print("printed by a rank")
    os.system("echo printed by a program of a rank")
    return os.environ.get(name), str(Path.cwd())


@pytest.fixture
def fork_server():
    run_processes([int], patience=0.0)


# The fork server is started before the output is captured, and has neither the variable nor the folder.
def test_ranks_have_the_environment_the_folder_and_the_output_of_their_caller(
    fork_server, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINKIT_LATE", "set after the fork server was started")

    (outcome,) = run_processes([partial(seen_by_rank, "TRAINKIT_LATE")], patience=0.0)

    assert outcome.value == ("set after the fork server was started", str(tmp_path))
    out = capfd.readouterr().out
    assert "printed by a rank" in out and "printed by a program of a rank" in out


def register_at_exit(path: Path) -> None:
    atexit.register(path.touch)


class Keys(Callback):
    """Writes the keys that another user of this machine sees in the ranks' store, and this process's environment."""

    def on_step_end(self, run: Any) -> None:
        run.strategy.comm.failure_store.note_waiting("a test")
        run.strategy.comm.barrier()
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        keys = dist.TCPStore("127.0.0.1", store.port, is_master=False).list_keys()
        seen = {"keys": keys, "environment": list(os.environ.values())}
        (run.run_dir / f"seen_{run.strategy.comm.rank}.json").write_text(json.dumps(seen))


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="stores list their keys from torch 2.13 on")
def test_every_key_of_the_ranks_begins_with_a_token_that_is_not_in_their_environment(make_trainer, tmp_path):
    trainer = make_trainer(DDPStrategy(device="cpu", devices=2), callbacks=[Keys()], run_dir=tmp_path)
    trainer.fit(Regression(), Data(train=regression_data(4), batch_size=4))
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"seen_{rank}.json").read_text())
        [token] = {key.partition("/")[0] for key in seen["keys"]}
        assert len(token) == 32 and not any(token in value for value in seen["environment"])
        assert any("waiting" in key for key in seen["keys"]) and any("/cpu/" in key for key in seen["keys"])


def test_token_is_another_one_for_each_launch_and_never_printed():
    environment = environment_of_caller(None)
    assert environment.store_token not in repr(environment)
    assert environment.store_token != environment_of_caller(None).store_token


def test_functions_registered_with_atexit_run_at_the_end_of_a_rank(tmp_path):
    run_processes([partial(register_at_exit, tmp_path / "done")], patience=0.0)
    assert (tmp_path / "done").exists()


def test_a_rank_does_not_search_what_was_imported_before_it_for_garbage():
    (outcome,) = run_processes([gc.get_freeze_count], patience=0.0)
    assert outcome.value > 0


def test_a_value_larger_than_a_pipe_holds_comes_back():
    (outcome,) = run_processes([partial(bytes, 1_000_000)], patience=0.0)
    assert outcome.value == bytes(1_000_000)


def write_pid(folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"])  # as a data worker
    for pid in (os.getpid(), child.pid):
        (Path(folder) / f"{pid}").touch()
    time.sleep(600)


def hold_the_interpreter(folder: str) -> None:
    (Path(folder) / f"{os.getpid()}").touch()
    ctypes.PyDLL(None).sleep(600)  # no other thread of Python runs, as in a call of CUDA that hangs


def run_two(rank: Callable[[str], None], folder: str) -> None:
    run_processes([partial(rank, folder)] * 2, patience=0.0)


@pytest.mark.parametrize(("rank", "number"), [(write_pid, 4), (hold_the_interpreter, 2)])
def test_no_rank_and_no_process_of_a_rank_outlives_a_caller_that_is_killed(tmp_path, rank, number):
    pids = tmp_path / "pids"
    pids.mkdir()
    with Program(run_two, rank, str(pids)) as caller:
        wait_until(lambda: len(list(pids.iterdir())) == number)
        os.kill(caller.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_running(int(pid.name)) for pid in pids.iterdir()))


class Hanging(Fitting):
    """Leaves each rank's process id in `folder`; rank 1 never returns from its third step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(nn.Linear(4, 1))
        self.folder, self.steps = folder, 0

    def training_step(self, batch: Any) -> Any:
        rank = os.environ["RANK"]
        (self.folder / f"rank_{rank}.pid").write_text(str(os.getpid()))
        self.steps += 1
        if self.steps == 3 and rank == "1":
            time.sleep(600)
        return super().training_step(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "waits"),
    [(DDPStrategy, "backward of step 2, bucket 0 of 1"), (FSDPStrategy, "forward and backward of step 2")],
)
def test_a_rank_that_hangs_is_named_with_its_line_and_all_ranks_end(kind, waits, tmp_path):
    strategy = kind(devices=2, device="cpu", timeout_seconds=5.0)
    trainer = Trainer(strategy, max_duration="10step", callbacks=[], loggers=[], run_dir=tmp_path / "run")
    data = Data(train=TensorDataset(torch.randn(64, 4)), batch_size=4)
    with pytest.raises(RankError) as raised:
        trainer.fit(Hanging(tmp_path), data)
    message = str(raised.value)
    assert f"rank 0 timed out after 5 s in {waits}. Position of each rank:" in message
    assert "rank 1: has not come; it is in step 2, Hanging.training_step, " in message
    assert "test_launcher.py:" in message
    pids = [int((tmp_path / f"rank_{rank}.pid").read_text()) for rank in range(2)]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
