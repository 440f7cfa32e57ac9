"""Local launcher: starts ranks as processes of this machine, and ends them together.

    caller ── start_processes ──┬── rank 0   its value comes back through a file
      │  watches, forwards      ├── rank 1
      │  SIGINT and SIGTERM     └── rank 2   raises: its traceback comes back, the others are stopped

Ranks are started by torch.distributed.elastic as new processes that import what they need; the command line is not run
again. Each asks the kernel to kill it when the caller dies, so that no rank outlives its caller.
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
from trainkit.distributed.rank_log import final_message, keep_log
from trainkit.errors import Stopped, UserError
from trainkit.signals import ALWAYS

T = TypeVar("T")

POLL_SECONDS = 0.02
GRACE_SECONDS = 5.0  # for the other ranks to end by themselves after the first failure
PR_SET_PDEATHSIG = 1
VALUE_FILE = "value.pickle"
STARTED_FILE = "started"  # exists once all ranks have been started

logger = logging.getLogger(__name__)


class RankFailure(RuntimeError):
    """A rank died, or raised an exception that cannot be pickled; the message names the rank and the cause."""


class RankTraceback(Exception):
    """The text of another process's traceback, as the cause of its exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Rank, store and settings of a started process."""

    rank: int
    world_size: int
    store_port: int
    caller_pid: int
    folder: str  # private to this launch: failures and the value
    log_dir: str | None
    num_threads: int | None  # None: set by OMP_NUM_THREADS
    log_level: int | None  # of trainkit's loggers in the caller; None: the caller has no log handler
    store_host: str = "127.0.0.1"
    attempt: int = 0  # number of earlier starts


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
    """Return the value of `run` on rank 0 of `num_ranks` new processes, each of which calls `enter` first.

    Raises the error of the rank that failed first, with that rank's traceback; `name_of` names a rank that died without
    one. The `signals` that this process receives meanwhile are forwarded to every rank. Every rank writes its output to
    `rank_<k>.log` in `log_dir`; rank 0 also writes it to the caller's terminal.
    """
    payload = _pickle((enter, run))
    store = _store_of_this_machine()
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        common = environment_of_caller(log_dir)
        environments = [
            replace(common, rank=rank, world_size=num_ranks, store_port=store.port, folder=folder)
            for rank in range(num_ranks)
        ]
        with _restore_handlers(signals) as received, _quiet_elastic():
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
            except SignalException as caught:  # by elastic, while it starts ranks; these exit without the folder
                raise Stopped(signal.Signals(caught.sigval).name, 128 + caught.sigval) from None
        value: T = pickle.loads((Path(folder) / VALUE_FILE).read_bytes())
    return value


def environment_of_caller(log_dir: Path | None) -> RankEnvironment:
    """Return the environment of ranks as far as it is that of this process."""
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
    """Return a store that listens on 127.0.0.1 only; TCPStore's own socket would listen on every network."""
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
        # As bytes: multiprocessing would share the memory of tensors, and all ranks would train the same weights.
        return pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise unpicklable(error) from error


def unpicklable(error: Exception) -> UserError:
    """Return the error of a run that cannot be pickled."""
    return UserError(
        f"the run cannot be sent to other processes: {error}. Define the classes and functions of the task and the "
        "dataset at the top level of a module (no lambdas or local classes), or start the program with torchrun."
    )


def _variables(environment: RankEnvironment) -> dict[str, str]:
    variables = {
        "RANK": str(environment.rank),
        "LOCAL_RANK": str(environment.rank),
        "WORLD_SIZE": str(environment.world_size),
        "LOCAL_WORLD_SIZE": str(environment.world_size),
    }
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = (
            "lo"  # all ranks are local, and the host's name may resolve to another network
        )
    return variables


# ---- In a rank


def _run_rank(payload: bytes, environment: RankEnvironment) -> None:
    """Run one rank and write its value, or its failure, to the folder of the launch."""
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
            log.write(final_message(error))
            log.close()
        # Exit at once: with a peer gone, the end of the process group may wait or abort.
        os._exit(1)


def _wait_for_start(folder: Path) -> None:
    """Return once the caller has started all ranks; exit if it has aborted the launch and removed the folder."""
    while not (folder / STARTED_FILE).exists():
        if not folder.exists():
            os._exit(1)
        time.sleep(POLL_SECONDS)


def prepare_rank(environment: RankEnvironment) -> None:
    """Set the log level and the number of threads of this process."""
    if environment.log_level is not None:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        logging.getLogger("trainkit").setLevel(environment.log_level)
    if environment.num_threads is not None:
        torch.set_num_threads(environment.num_threads)


def _die_with(caller_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != caller_pid:  # it died before the request
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
        pickle.loads(described)  # some exceptions can be pickled, but not unpickled
    except Exception:
        described = pickle.dumps(_Failure(rank, failure.when, None, text, failure.consequence))
    return described


def is_consequence(error: BaseException) -> bool:
    """Return True if the error is a consequence of another rank's failure."""
    if isinstance(error, RankError):
        return True
    lost = (*GONE, "recvValue failed")
    return isinstance(error, RuntimeError) and any(part in str(error) for part in lost)


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".writing")
    temporary.write_bytes(content)
    temporary.replace(path)


# ---- In the caller


@contextmanager
def _restore_handlers(signals: Sequence[int]) -> Iterator[list[int]]:
    """Restore the signal handlers on exit: elastic replaces some when it starts processes."""
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
    """Keep elastic from logging a failure and its traceback a second time."""
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
    """Return when all ranks have succeeded; otherwise end them all and raise the first failure."""
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
            _add_exit_codes(ended, pids)
            if any(ended.values()):
                break
            result = context.wait(0)
            if result is not None and not result.is_failed():
                return
            if result is not None:  # elastic has reaped it first
                ended.update({rank: failure.exitcode for rank, failure in result.failures.items()})
                break
            time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + GRACE_SECONDS  # for the others to notice the failure and to publish theirs
        while len(ended) < len(pids) and time.monotonic() < deadline:
            _add_exit_codes(ended, pids)
            time.sleep(POLL_SECONDS)
    finally:
        context.close(signal.SIGKILL)
    _raise_failure(folder, {rank: f"{name_of(rank)} (pid {pid})" for rank, pid in pids.items()}, ended, received)


def _add_exit_codes(ended: dict[int, int], pids: dict[int, int]) -> None:
    """Add the exit codes of the ranks that have ended (negative: the signal), without reaping them."""
    for rank, pid in pids.items():
        if rank in ended:
            continue
        try:
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            ended[rank] = 0  # reaped by elastic, which has its result
            continue
        if result is not None:
            ended[rank] = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _raise_failure(folder: Path, names: dict[int, str], ended: dict[int, int], received: list[int]) -> None:
    failures: list[_Failure] = [pickle.loads(path.read_bytes()) for path in folder.glob("failure_*.pickle")]
    causes = sorted((f for f in failures if not f.consequence), key=lambda f: f.when)
    killed = [rank for rank, code in ended.items() if code < 0]
    if killed and not causes:
        rank = killed[0]
        name = signal.Signals(-ended[rank]).name
        if received and -ended[rank] == received[0]:  # before it had signal handlers
            raise Stopped(name, 128 + received[0])
        hint = "; if nobody killed it, the machine ran out of memory" if name == "SIGKILL" else ""
        raise RankFailure(f"{names[rank]} was killed by {name}{hint}.")
    if not failures:
        rank, code = next((rank, code) for rank, code in ended.items() if code)
        raise RankFailure(f"{names[rank]} ended with exit code {code} and no error message.")
    first = (causes or sorted(failures, key=lambda f: f.when))[0]
    if isinstance(first.error, UserError | Stopped | KeyboardInterrupt):
        raise first.error
    if first.error is None:
        raise RankFailure(f"rank {first.rank} failed") from RankTraceback(first.text)
    raise first.error from RankTraceback(first.text)
