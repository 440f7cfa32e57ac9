"""One process trains in a run folder: a second one gets an error that names it; the lock of a dead one is released."""

import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.program import Program
from tests.tasks import Regression, SaveAtEnd, regression_data
from trainkit import Data, UserError
from trainkit.run_dir.failure import read_failures
from trainkit.run_dir.lock import LOCK, OWNER, check_not_locked, lock_run_dir
from trainkit.run_dir.resume_auto import _is_finished


def hold(folder: Path) -> None:
    """Lock the folder until a line comes."""
    with lock_run_dir(folder):
        forked, worker = os.pipe()
        if os.fork() == 0:  # as a DataLoader's worker, it is born with the lock's descriptor
            os.write(worker, b"!")
            time.sleep(600)
            os._exit(0)
        os.read(forked, 1)
        print("locked")
        sys.stdin.readline()


@contextmanager
def holder(folder: Path) -> Iterator[tuple[Program, int]]:
    """Another process that locks the folder, and a pipe: after a line it ends."""
    (standard_input, end), (ready, standard_output) = os.pipe(), os.pipe()
    with Program(hold, folder, streams=(standard_input, standard_output, 2)) as program:
        for descriptor in (standard_input, standard_output):
            os.close(descriptor)
        try:
            assert os.read(ready, 100) == b"locked\n"
            yield program, end
        finally:
            for descriptor in (ready, end):
                os.close(descriptor)


@pytest.mark.parametrize("resume", ["auto", None])
def test_a_second_fit_in_the_folder_of_a_live_process_names_it_and_changes_nothing(make_trainer, tmp_path, resume):
    trainer = make_trainer(run_dir=tmp_path, callbacks=[SaveAtEnd()])
    data = Data(train=regression_data(8), batch_size=4)
    with (
        holder(tmp_path) as (other, _),
        pytest.raises(UserError, match=rf"in use: process {other.pid} on .*kill {other.pid}"),
    ):
        trainer.fit(Regression(), data, resume=resume)
    assert not (tmp_path / "checkpoints").exists()
    trainer.fit(Regression(), data, resume=resume)
    assert not (tmp_path / LOCK).exists()


def test_the_lock_of_a_killed_process_is_released_although_its_workers_live_on(tmp_path):
    with holder(tmp_path) as (other, _):
        with pytest.raises(UserError, match="in use"), lock_run_dir(tmp_path):
            pass
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        check_not_locked(tmp_path)
        with lock_run_dir(tmp_path, timeout=0):
            assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
            with pytest.raises(UserError, match=f"process {os.getpid()} "), lock_run_dir(tmp_path):
                pass


def test_a_process_that_ends_releases_the_lock_although_its_workers_live_on(tmp_path):
    with holder(tmp_path) as (other, end):
        os.write(end, b"\n")
        assert other.wait() == 0
        with lock_run_dir(tmp_path, timeout=0):
            pass


def test_an_earlier_part_of_the_same_job_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with holder(tmp_path) as (other, _):
        check_not_locked(tmp_path)
        with pytest.raises(UserError, match="in use"), lock_run_dir(tmp_path, timeout=0.3):
            pass
        has_waited = threading.Event()

        def end() -> None:
            has_waited.set()
            os.kill(other.pid, signal.SIGKILL)

        threading.Timer(0.5, end).start()
        with lock_run_dir(tmp_path, timeout=600):
            assert has_waited.is_set()


def without_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "flock", without_locks)
    with lock_run_dir(tmp_path):
        assert "without locks (No locks available): another process" in caplog.text


def test_a_lock_of_another_machine_holds_as_long_as_the_file_system_says_so(tmp_path):
    with holder(tmp_path):
        owner = json.loads((tmp_path / OWNER).read_text())
        (tmp_path / OWNER).write_text(json.dumps({**owner, "host": "far"}))
        with pytest.raises(UserError, match="on far has been training"), lock_run_dir(tmp_path):
            pass
    (tmp_path / OWNER).write_text(json.dumps({**owner, "host": "far"}))
    with lock_run_dir(tmp_path, timeout=0):
        pass


@pytest.mark.parametrize("text", ["[" * 200_000, "[1]", "{}", '{"host": 1}'])
def test_files_of_a_run_that_were_altered_are_ignored(tmp_path, text):
    for name in (OWNER, "failure.json", "summary.json"):
        (tmp_path / name).write_text(text)
    check_not_locked(tmp_path)
    assert read_failures(tmp_path) == []
    assert not _is_finished(tmp_path, [])
