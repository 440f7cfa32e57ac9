"""run_ranks and assert_strategies_equal: tests of distributed code on several ranks of this machine."""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # torch exports it at run time

from trainkit.distributed.fork_server import start_fork_server
from trainkit.distributed.launcher import Outcome, join_store, run_processes
from trainkit.distributed.pickling import pickled, unpickled
from trainkit.distributed.rendezvous import store_at
from trainkit.parity.compare import assert_resume_exact, assert_strategies_equal

__all__ = ["Outcome", "RankFailure", "assert_resume_exact", "assert_strategies_equal", "rank_outcomes", "run_ranks"]


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time; the message holds its traceback."""


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 500.0) -> list[Any]:
    """Return the value of `fn(*args)` on each of `num_ranks` gloo ranks, or raise the first failure.

    `fn` is a function at the top level of a module or of a test file. It runs in the caller's folder with one thread
    and an initialized process group. No process outlives the call.

    Args:
        fn: The function.
        num_ranks: Number of processes.
        args: Its arguments, which are pickled.
        timeout: Seconds until the ranks are ended. Those that are still running then write the stacks of their threads
            to standard error.

    Raises:
        RankFailure: A rank raised, died or ran out of time.

    """
    outcomes = rank_outcomes(fn, num_ranks, *args, timeout=timeout, patience=0.0)
    failed = sorted((o for o in outcomes if o.failure is not None), key=lambda o: o.seconds)
    if failed:
        raise RankFailure(f"rank {failed[0].rank} of {num_ranks} failed:\n{failed[0].failure}")
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 500.0, patience: float = 20.0
) -> list[Outcome]:
    """Return the outcome of each rank; after a first failure the others get `patience` seconds to end."""
    if not hasattr(fn, "__qualname__"):
        raise ValueError(f"{fn!r} is not a function; pass what it binds as arguments: run_ranks(fn, 2, *arguments)")
    if "<" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__} must be at the top level of its file to run on other ranks")
    start_fork_server(preload=["pytest", "trainkit.testing"])  # ranks import the main module, which is pytest's
    store = store_at("127.0.0.1")
    call = _Call(fn.__module__, inspect.getfile(fn), fn.__qualname__, pickled(args))
    limit = timedelta(seconds=timeout)
    join = partial(join_store, "127.0.0.1", store.port, secrets.token_hex(16), limit=limit)
    calls = [partial(_run_rank, call, rank, num_ranks, join, limit) for rank in range(num_ranks)]
    return run_processes(calls, timeout=timeout, patience=patience)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function and its arguments."""

    module: str
    file: str  # test files often cannot be imported by name
    name: str
    arguments: bytes  # pickled separately: they may need the module first

    def run(self) -> Any:
        """Return the value of the function, whose file is imported first."""
        if self.module not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None and spec.loader is not None, self.file
            sys.modules[self.module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[self.module])
        function = attrgetter(self.name)(sys.modules[self.module])
        return function(*unpickled(self.arguments))


def _run_rank(call: _Call, rank: int, num_ranks: int, join: Callable[[], Store], limit: timedelta) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    faulthandler.enable()  # a rank that runs out of time is aborted
    dist.init_process_group("gloo", store=join(), rank=rank, world_size=num_ranks, timeout=limit)
    dist.barrier()  # a rank that ended before all are connected would fail the others
    return call.run()
