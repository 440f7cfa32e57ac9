"""Fork server: a process that has imported torch and trainkit, from which ranks are forked.

Without torch, so that the command line can start the server before this process imports torch itself.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

PRELOADED = ("torch", "torch._dynamo", "torch.distributed", "trainkit.loops.worker")
"""Modules that the server imports; torch._dynamo is what an optimizer's first step imports."""
FORK_SERVER_BLOCKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that stop runs: the server, which gets them from a terminal or SLURM too, blocks them.

They would end its imports, and with it the exit codes of ranks. Forked processes unblock them.
"""


def begin_forked_process() -> None:
    """Let this process of the server receive signals, and leave alone what it has inherited.

    Objects from before the fork are neither searched for garbage nor finalized, which would copy their memory.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORK_SERVER_BLOCKS)
    # A collection would write to every object, and so copy each page that this process shares with the server.
    gc.freeze()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined] # else atexit ends libraries that the server uses


def start_fork_server(preload: Sequence[str] = ()) -> Any:
    """Start the server unless it runs, and return the multiprocessing context that uses it.

    Does not wait for the server's imports: the modules in PRELOADED and in `preload`. Where processes cannot be
    forked, the context starts fresh ones.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver, resource_tracker

    # Private, as multiprocessing has no public way to ask if the server runs, or for its pid.
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None:
        server.set_forkserver_preload([*PRELOADED, *preload])
        # A child starts with the mask of its parent: the server must not receive a signal before it can block it.
        former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORK_SERVER_BLOCKS)
        try:
            resource_tracker.ensure_running()  # it inherits the mask, and unblocks SIGINT and SIGTERM here
            signal.pthread_sigmask(signal.SIG_BLOCK, FORK_SERVER_BLOCKS)
            server.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
        atexit.register(lambda: _kill(server._forkserver_pid))
    return multiprocessing.get_context("forkserver")


def _kill(pid: int) -> None:
    # By itself it ends after its imports, and holds the pipe of this program's output until then.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
