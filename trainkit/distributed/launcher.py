"""Starting ranks on this machine, and ending them together.

    caller ── start_processes ──┬── rank 0   its value comes back through a file
      │  watches, forwards      ├── rank 1
      │  SIGINT and SIGTERM     └── rank 2   raises: its traceback comes back, the others are stopped

Ranks are started by torch.distributed.elastic as fresh processes that import what they need; the command line is
not run again. Each asks the kernel to be killed when the caller dies, so that none is left behind.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it at run time
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes

from trainkit.distributed.failure_store import GONE, RankError
from trainkit.distributed.rank_log import keep_log, last_words
from trainkit.errors import Stopped, UserError
from trainkit.signals import ALWAYS

T = TypeVar("T")

POLL_SECONDS = 0.02
GRACE_SECONDS = 5.0  # for the other ranks to end by themselves after the first failure
PR_SET_PDEATHSIG = 1
VALUE_FILE = "value.pickle"
STARTED_FILE = "started"  # there once all ranks are

logger = logging.getLogger(__name__)


class RankFailure(RuntimeError):
    """A rank died, or raised what cannot be raised again here; the message says which and how."""


class RankTraceback(Exception):
    """Carries the text of another process's traceback, so that it is shown first."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Where a started rank finds itself and the others."""

    rank: int
    world_size: int
    store_port: int
    caller_pid: int
    folder: str  # private to this launch: failures and the value
    log_dir: str | None
    num_threads: int | None  # None: as the environment says
    log_level: int | None  # of trainkit's loggers in the caller; None: the caller logs nowhere
    store_host: str = "127.0.0.1"
    attempt: int = 0  # how often the ranks have been started before


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    when: float
    error: BaseException | None  # None if it cannot be pickled
    text: str
    consequence: bool  # of another rank's failure


def launch_ranks(
    run: Callable[[], T],
    *,
    num_ranks: int,
    enter: Callable[[RankEnvironment], None],
    log_dir: Path | None,
    signals: Sequence[int] = ALWAYS,
    name_of: Callable[[int], str] = "rank {}".format,
) -> T:
    """Return what `run` returned on rank 0 of `num_ranks` new processes, each of which calls `enter` first.

    Raises the error of the rank that failed first, with that rank's traceback; `name_of` says what to call one that
    is gone without a word. The `signals` that this process
    receives meanwhile are sent on to every rank. Ranks other than 0 write to
    `rank_<k>.log` in `log_dir` what they would print. Rank 0 has the caller's terminal: its progress display is made
    for one, and whatever is worth keeping of its output is in the loggers' files.
    """
    payload = _pickle((enter, run))
    store = _store_of_this_machine()
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        common = environment_of_caller(log_dir)
        environments = [
            replace(common, rank=rank, world_size=num_ranks, store_port=store.port, folder=folder)
            for rank in range(num_ranks)
        ]
        with _signals_kept(signals) as received, _quiet_elastic():
            try:
                context = start_processes(
                    name="trainkit",
                    entrypoint=_run_rank,
                    args={rank: (payload, environment) for rank, environment in enumerate(environments)},
                    envs={rank: _variables(environment) for rank, environment in enumerate(environments)},
                    logs_specs=DefaultLogsSpecs(log_dir=folder),
                    start_method="spawn",
                )
                (Path(folder) / STARTED_FILE).touch()
                _watch(context, Path(folder), received, signals, name_of)
            except SignalException as caught:  # of elastic, while it starts ranks; those that are there find no folder
                raise Stopped(signal.Signals(caught.sigval).name, 128 + caught.sigval) from None
        value: T = pickle.loads((Path(folder) / VALUE_FILE).read_bytes())
    return value


def environment_of_caller(log_dir: Path | None) -> RankEnvironment:
    """Return what ranks need to know of the process that starts them."""
    return RankEnvironment(
        rank=0,
        world_size=1,
        store_port=0,
        caller_pid=os.getpid(),
        folder="",
        log_dir=None if log_dir is None else str(log_dir),
        num_threads=None if "OMP_NUM_THREADS" in os.environ else 1,
        log_level=_log_level(),
    )


def _store_of_this_machine() -> TCPStore:
    """Return a store that no other machine can reach: by itself it would listen on every network."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(socket.SOMAXCONN)
        port = listening.getsockname()[1]
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _log_level() -> int | None:
    return logging.getLogger("trainkit").getEffectiveLevel() if logging.getLogger().handlers else None


def _pickle(call: object) -> bytes:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "training was started while a rank was importing your script. Put what starts it below "
            'if __name__ == "__main__": so that importing the script does not train.'
        )
    try:
        # As bytes, because multiprocessing would share the memory of tensors: all ranks would train the same weights.
        return pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise unpicklable(error) from error


def unpicklable(error: Exception) -> UserError:
    """Return the error of a run that holds what cannot be sent to other processes."""
    return UserError(
        f"the run cannot be sent to other processes: {error}. Define the task, the dataset and what they hold "
        "at the top level of a module (no lambdas or local classes), or start the program with torchrun."
    )


def _variables(environment: RankEnvironment) -> dict[str, str]:
    variables = {
        "RANK": str(environment.rank),
        "LOCAL_RANK": str(environment.rank),
        "WORLD_SIZE": str(environment.world_size),
        "LOCAL_WORLD_SIZE": str(environment.world_size),
    }
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here, whatever the host's name resolves to
    return variables


# ---- In the rank


def _run_rank(payload: bytes, environment: RankEnvironment) -> None:
    """Run one rank and leave its value, or its failure, in the launch's folder."""
    _die_with(environment.caller_pid)
    os.setpgrp()  # Ctrl-C reaches the caller only, which forwards it once
    _wait_for_start(Path(environment.folder))
    log = None if environment.log_dir is None else keep_log(Path(environment.log_dir), rank=environment.rank)
    prepare_rank(environment)
    folder = Path(environment.folder)
    try:
        enter, run = pickle.loads(payload)
        enter(environment)
        value = run()
        if environment.rank == 0:
            _write(folder / VALUE_FILE, pickle.dumps(value))
        if log is not None:
            log.close()
    except BaseException as error:
        failure = _describe(environment.rank, error)
        _write(folder / f"failure_{environment.rank}.pickle", failure)
        sys.stdout.flush()
        sys.stderr.flush()
        if log is not None:
            log.write(last_words(error))
            log.close()
        # At once: with a peer gone, taking down the process group may wait or abort.
        os._exit(1)


def _wait_for_start(folder: Path) -> None:
    """Return once the caller has started all ranks; end if it has given up, or it would wait for this one."""
    while not (folder / STARTED_FILE).exists():
        if not folder.exists():
            os._exit(1)
        time.sleep(POLL_SECONDS)


def prepare_rank(environment: RankEnvironment) -> None:
    """Have this process log and compute as a rank of its caller."""
    if environment.log_level is not None:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        logging.getLogger("trainkit").setLevel(environment.log_level)
    if environment.num_threads is not None:
        torch.set_num_threads(environment.num_threads)


def _die_with(caller_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != caller_pid:  # it died before it could be asked for
            os._exit(1)
        return
    watcher = threading.Thread(target=_exit_without, args=(caller_pid,), daemon=True)
    watcher.start()


def _exit_without(caller_pid: int) -> None:
    while os.getppid() == caller_pid:
        time.sleep(1)
    os._exit(1)


def _describe(rank: int, error: BaseException) -> bytes:
    text = f"rank {rank}: " + "".join(traceback.format_exception(error))
    failure = _Failure(rank, time.time(), error, text, is_consequence(error))
    try:
        described = pickle.dumps(failure)
        pickle.loads(described)  # some exceptions can be pickled, but not made again
    except Exception:
        described = pickle.dumps(_Failure(rank, failure.when, None, text, failure.consequence))
    return described


def is_consequence(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    if isinstance(error, RankError):
        return True
    lost = (*GONE, "recvValue failed")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in lost)


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".writing")
    temporary.write_bytes(content)
    temporary.replace(path)


# ---- In the caller


@contextmanager
def _signals_kept(signals: Sequence[int]) -> Iterator[list[int]]:
    """Leave the handlers as they were: starting processes through elastic replaces some."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    elastic = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in (*elastic, *signals)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep elastic from logging a failure, with a traceback of its own: it is raised here."""
    elastic = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    before = elastic.level
    elastic.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        elastic.setLevel(before)


def _watch(
    context: PContext, folder: Path, received: list[int], signals: Sequence[int], name_of: Callable[[int], str]
) -> None:
    """Return when all ranks have ended well; otherwise end them all and raise the first failure."""
    pids = context.pids()

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    if threading.current_thread() is threading.main_thread():
        for number in signals:
            signal.signal(number, forward)
    ended: dict[int, int] = {}  # rank -> exit code, in the order of dying
    try:
        while True:
            for rank, pid in pids.items():
                if rank not in ended:
                    code = _exit_code(pid)
                    if code is not None:
                        ended[rank] = code
            if any(ended.values()):
                break
            result = context.wait(0)
            if result is not None and not result.is_failed():
                return
            if result is not None:  # it was seen here first
                ended.update({rank: failure.exitcode for rank, failure in result.failures.items()})
                break
            time.sleep(POLL_SECONDS)
        _let_end(pids, ended)
    finally:
        context.close(signal.SIGKILL)
    _raise_failure(folder, {rank: f"{name_of(rank)} (pid {pid})" for rank, pid in pids.items()}, ended, received)


def _let_end(pids: dict[int, int], ended: dict[int, int]) -> None:
    """Give the other ranks a while to notice the failure and to say what they saw."""
    deadline = time.monotonic() + GRACE_SECONDS
    while len(ended) < len(pids) and time.monotonic() < deadline:
        for rank, pid in pids.items():
            if rank not in ended:
                code = _exit_code(pid)
                if code is not None:
                    ended[rank] = code
        time.sleep(POLL_SECONDS)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child that has ended (negative: the signal), leaving it to be reaped."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # reaped by elastic, which then has its result
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _raise_failure(folder: Path, names: dict[int, str], ended: dict[int, int], received: list[int]) -> None:
    failures = [_read(path) for path in folder.glob("failure_*.pickle")]
    causes = sorted((f for f in failures if not f.consequence), key=lambda f: f.when)
    killed = [rank for rank, code in ended.items() if code < 0]
    if killed and not causes:
        rank = killed[0]
        name = signal.Signals(-ended[rank]).name
        if received and -ended[rank] == received[0]:  # before it could listen to signals
            raise Stopped(name, 128 + received[0])
        raise RankFailure(f"{names[rank]} was killed by {name}{_reason(name)}.")
    if not failures:
        rank, code = next((rank, code) for rank, code in ended.items() if code)
        raise RankFailure(f"{names[rank]} ended with exit code {code} and left no word.")
    first = (causes or sorted(failures, key=lambda f: f.when))[0]
    if isinstance(first.error, UserError | Stopped | KeyboardInterrupt):
        raise first.error
    if first.error is None:
        raise RankFailure(f"rank {first.rank} failed") from RankTraceback(first.text)
    raise first.error from RankTraceback(first.text)


def _read(path: Path) -> _Failure:
    failure = pickle.loads(path.read_bytes())
    assert isinstance(failure, _Failure)
    return failure


def _reason(name: str) -> str:
    return "; if nobody did that on purpose, the machine ran out of memory" if name == "SIGKILL" else ""
