"""run_ranks and assert_strategies_equal: tests of distributed code on several ranks of this machine."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it at run time

from trainkit.parity.compare import assert_resume_exact, assert_strategies_equal

__all__ = ["Outcome", "RankFailure", "assert_resume_exact", "assert_strategies_equal", "rank_outcomes", "run_ranks"]

# Imported once, in the process that ranks are forked from. torch._dynamo is what an optimizer's first step imports.
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "pytest", "trainkit.testing", "trainkit.trainer"]


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time; the message holds its traceback."""


@dataclass(slots=True)
class Outcome:
    """The result of one rank: its value, or its failure."""

    rank: int
    value: Any = None
    failure: str | None = None  # the traceback, or how the process died
    seconds: float = 0.0  # from the start until the end was seen


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Return the value of `fn(*args)` on each of `num_ranks` gloo ranks, or raise the first failure.

    `fn` is a function at the top level of a module or of a test file. It runs in the caller's folder with one thread
    and an initialized process group. No process outlives the call.

    Args:
        fn: The function.
        num_ranks: Number of processes.
        args: Its arguments, which are pickled.
        timeout: Seconds until the ranks are killed.

    Raises:
        RankFailure: A rank raised, died or ran out of time.

    """
    outcomes = rank_outcomes(fn, num_ranks, *args, timeout=timeout, patience=0.0)
    failed = sorted((o for o in outcomes if o.failure is not None), key=lambda o: o.seconds)
    if failed:
        raise RankFailure(f"rank {failed[0].rank} of {num_ranks} failed:\n{failed[0].failure}")
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60.0, patience: float = 20.0
) -> list[Outcome]:
    """Return the outcome of each rank; after a first failure the others get `patience` seconds to end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = _Call.of(fn, args)
    rendezvous = _Rendezvous(num_ranks, store.port, timeout, os.getpid(), str(Path.cwd()))
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    ranks = [
        context.Process(target=_run_rank, args=(call, rank, rendezvous, pipes[rank][1])) for rank in range(num_ranks)
    ]
    try:
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        return _collect([receiver for receiver, _ in pipes], ranks, timeout=timeout, patience=patience)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
            process.close()
        for receiver, _ in pipes:
            receiver.close()


@dataclass(frozen=True, slots=True)
class _Call:
    """A function and its file, since test files often cannot be imported by name."""

    module: str
    file: str
    name: str
    arguments: bytes  # pickled separately: they may need the module first

    @staticmethod
    def of(fn: Callable[..., Any], args: Sequence[Any]) -> _Call:
        if not hasattr(fn, "__qualname__"):
            raise ValueError(f"{fn!r} is not a function; pass what it binds as arguments: run_ranks(fn, 2, *arguments)")
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} must be at the top level of its file to run on other ranks")
        return _Call(fn.__module__, inspect.getfile(fn), fn.__qualname__, pickle.dumps(tuple(args)))

    def run(self) -> Any:
        target: Any = _load(self.module, self.file)
        for part in self.name.split("."):
            target = getattr(target, part)
        return target(*pickle.loads(self.arguments))


def _load(name: str, file: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """The store and the limits of one call's ranks."""

    num_ranks: int
    port: int
    timeout: float  # seconds
    caller_pid: int
    folder: str  # the working directory of the caller


def _run_rank(call: _Call, rank: int, rendezvous: _Rendezvous, sender: connection.Connection) -> None:
    threading.Thread(target=_end_with, args=(rendezvous.caller_pid,), daemon=True).start()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(rendezvous.num_ranks), LOCAL_RANK=str(rank))
    os.chdir(rendezvous.folder)
    torch.set_num_threads(1)
    limit = timedelta(seconds=rendezvous.timeout)
    try:
        store = TCPStore("127.0.0.1", rendezvous.port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=rendezvous.num_ranks, timeout=limit)
        answer: tuple[Any, str | None] = (call.run(), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    with suppress(BrokenPipeError):  # the parent is gone
        sender.send_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    # Leave at once: tearing down gloo with a peer gone may wait or abort, and the answer is already sent.
    os._exit(0)


def _end_with(pid: int) -> None:
    if hasattr(os, "pidfd_open"):  # not everywhere; readable once the process has ended
        with suppress(ProcessLookupError):
            connection.wait([os.pidfd_open(pid)])
        os._exit(1)


def _collect(
    receivers: list[connection.Connection], ranks: Sequence[Any], *, timeout: float, patience: float
) -> list[Outcome]:
    start = time.monotonic()
    deadline = start + timeout
    outcomes = {rank: Outcome(rank) for rank in range(len(ranks))}
    waiting = dict(zip(receivers, outcomes, strict=True))
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for receiver in ready:
            assert isinstance(receiver, connection.Connection)
            outcome = outcomes[waiting.pop(receiver)]
            outcome.seconds = time.monotonic() - start
            try:
                outcome.value, outcome.failure = pickle.loads(receiver.recv_bytes())
            except EOFError:
                outcome.failure = _describe_death(ranks[outcome.rank])
            if outcome.failure is not None:
                deadline = min(deadline, time.monotonic() + patience)
        if not ready:
            for rank in waiting.values():
                outcomes[rank].failure = f"rank {rank} had not ended when the others were stopped or time was up"
                outcomes[rank].seconds = time.monotonic() - start
            break
    return list(outcomes.values())


def _describe_death(process: Any) -> str:
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process ended without an answer, exit code {code}"
