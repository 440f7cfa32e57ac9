"""Program: a function that runs as a program does, in a process forked from one that has imported torch."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from trainkit.distributed.fork_server import begin_forked_process, start_fork_server

PATIENCE = 600
"""Seconds after which something has hung, and is not slow because the machine is busy."""


def wait_until(is_so: Callable[[], object], *, runs: Callable[[], bool] = lambda: True, said: Any = str) -> None:
    """Wait until something is so; fails with what `said` returns if it never is, or once `runs` returns False."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert runs(), said()
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return True if there is such a process and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Program:
    """Calls `function(*arguments)` in a new session, with the folder and the environment of this process.

    The exit code is that of an interpreter: of a SystemExit, 1 for another exception, negative for a signal. At the end
    of the context the processes of its session are killed.

    Args:
        function: The function, at the top level of a module.
        arguments: Its arguments, which are pickled.
        streams: File descriptors of standard input, output and error; by default those of this process.
        environment: The whole environment; by default that of this process.

    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        streams: Sequence[int] = (0, 1, 2),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ends = [Connection(os.dup(descriptor)) for descriptor in streams]
        variables, method = dict(environment or os.environ), multiprocessing.get_start_method(allow_none=True)
        context = start_fork_server(preload=["pytest", "trainkit.testing"])
        self._process = context.Process(target=_run, args=(function, arguments, ends, variables, method))
        self._process.start()
        self.pid: int = self._process.pid
        for end in ends:
            end.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return the exit code, within some seconds."""
        self._process.join(seconds)
        assert self.exit_code is not None, f"the program has not ended in {seconds} s"
        return self.exit_code


def _run(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    streams: Sequence[Connection],
    environment: Mapping[str, str],
    start_method: str | None,
) -> None:
    begin_forked_process()
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(start_method, force=True)
    torch.set_num_threads(1)
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # which a forked process does not run by itself
