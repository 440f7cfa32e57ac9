"""Fork server: it starts without torch in the caller, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.program import Program, is_running, wait_until
from trainkit.cli import main as cli
from trainkit.distributed.launcher import run_processes

STARTED = """
import sys
from multiprocessing import forkserver
from trainkit.distributed.fork_server import start_fork_server

start_fork_server()
assert "torch" not in sys.modules
print(forkserver._forkserver._forkserver_pid)
"""


def test_the_server_is_started_without_torch_and_ends_with_its_caller_during_its_imports():
    ended = subprocess.run([sys.executable, "-c", STARTED], check=True, capture_output=True, text=True, timeout=600)
    wait_until(lambda: not is_running(int(ended.stdout)))


PRELOADED = """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as from a terminal or SLURM
    os.kill(os.getpid(), number)
"""
LAUNCHED = """
from trainkit.distributed.fork_server import start_fork_server
from trainkit.distributed.launcher import run_processes

if __name__ == "__main__":
    start_fork_server(preload=["interrupts"])
    print(run_processes([int], patience=0.0)[0].value)
"""


@pytest.mark.slow
def test_signals_during_the_imports_of_the_server_reach_its_caller_alone(tmp_path):
    (tmp_path / "interrupts.py").write_text(PRELOADED)
    (tmp_path / "launches.py").write_text(LAUNCHED)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "launches.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (ended.stdout, ended.stderr) == ("0\n", "")


LIBRARY = """
import weakref

class Device: pass

device = Device()
weakref.finalize(device, print, "closed")
"""
USES_LIBRARY = """
from functools import partial
from trainkit.distributed.fork_server import start_fork_server
from trainkit.distributed.launcher import run_processes

use = "import library, weakref; weakref.finalize(library.device, print, 'used')"
if __name__ == "__main__":
    start_fork_server(preload=["library"])
    run_processes([partial(exec, use)], patience=0.0)
"""


@pytest.mark.slow
def test_the_end_of_a_rank_finalizes_its_own_objects_and_not_those_of_the_server(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    command, environment = [sys.executable, "-c", USES_LIBRARY], {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (ended.stdout, ended.stderr) == ("used\n", "")


def handles_interrupts():
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ranks_take_interrupts():
    assert run_processes([handles_interrupts], patience=0.0)[0].value


class Interrupted:
    """Sends this process an interrupt when it is pickled: at the end of a rank."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGINT)
        return int, ()


def test_an_interrupt_at_the_end_of_a_rank_is_ignored():
    (outcome,) = run_processes([Interrupted], patience=0.0)
    assert (outcome.value, outcome.failure) == (0, None)


def import_interrupted(name):
    """Import as a library that takes any exception for one of its own."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
    except BaseException:
        os._exit(1)


def recipes_interrupted():
    cli.import_module = import_interrupted
    cli.main(["recipes"])


def test_an_interrupt_while_a_command_is_imported_ends_it_at_once():
    with Program(recipes_interrupted) as program:
        assert program.wait() == -signal.SIGINT
