"""Local launcher: starts ranks as processes of this machine, and ends them together.

    caller ── asks ──> fork server, which has imported torch and trainkit
      │                  ├── rank 0   its value comes back through a pipe
      │ watches them,    ├── rank 1
      │ forwards signals └── rank 2   raises: its traceback comes back, the others are stopped

Forked ranks start at once and share the memory of what the server has imported. The server is a fresh process: it has
no thread, lock or CUDA context of the caller, and the command line is not run again. No rank outlives its caller.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # exported at run time

from trainkit.console import log_to_stderr
from trainkit.distributed.failure_store import GONE, RankError
from trainkit.distributed.fork_server import begin_forked_process, start_fork_server
from trainkit.distributed.pickling import pickled, unpickled
from trainkit.distributed.rank_log import final_message, keep_log
from trainkit.distributed.rank_loss import Handover, Recovery
from trainkit.distributed.rendezvous import store_at
from trainkit.errors import Stopped, UserError, rank_exit, user_traceback
from trainkit.signals import ALWAYS, REGROW, recorded_signals

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
POLL_SECONDS = 0.02  # between two checks for signals to forward
ABORT_SECONDS = 60.0  # that an aborted rank has to write the stacks of its threads
GRACE_SECONDS = 5.0  # for the other ranks to end by themselves after the first failure


class RankFailure(RuntimeError):
    """A rank died, or raised an exception that cannot be pickled; the message names the rank and the cause."""


class RankTraceback(Exception):
    """The text of another process's traceback, as the cause of its exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Rank, store and settings of a started process."""

    log_dir: str | None
    num_threads: int
    log_level: int | None  # of trainkit's loggers in the caller; None: the caller has no log handler
    rank: int = 0
    world_size: int = 1
    store_host: str = "127.0.0.1"
    store_port: int = 0
    store_token: str = field(default="", repr=False)  # before every key; known only to the ranks
    attempt: int = 0  # number of earlier starts
    handover: Handover | None = None  # None: a lost rank ends the run
    checkpoint: str | None = None  # that this run has saved before an earlier start ended
    ignored_signals: Sequence[int] = ()  # by a rank that has no handler for them


@dataclass(slots=True)
class Outcome:
    """The end of one rank: its value, or its failure."""

    rank: int
    pid: int
    value: Any = None
    failure: str | None = None  # the traceback, or how the process died
    brief: str = ""  # the traceback from the first call of the user's code on
    seconds: float = 0.0  # of the monotonic clock, at the end or the failure
    error: BaseException | None = None  # None if it cannot be pickled
    is_consequence: bool = False  # of another rank's failure
    exit_code: int | None = None  # of a process that ended without an answer; negative: the signal


Patience = float | Callable[[Sequence[Outcome]], float]
"""Seconds that ranks have to end after the failure of another one, also as a function of the outcomes so far."""


def launch_ranks(
    run: Callable[[], T],
    *,
    num_ranks: int,
    enter: Callable[[RankEnvironment], None],
    log_dir: Path | None,
    signals: Sequence[int] = ALWAYS,
    name_of: Callable[[int], str] = "rank {}".format,
    recovery: Recovery | None = None,
) -> T:
    """Return the value of `run` on rank 0 of `num_ranks` new processes, each of which calls `enter` first.

    Raises the error of the rank that failed first, with that rank's traceback; `name_of` names a rank that died without
    one. With a `recovery` the ranks are started again if some were killed and none has an error of its own; where fewer
    have gone on, a `REGROW` signal to this process starts all of them again. The `signals` that this process receives
    meanwhile are forwarded to every rank. Every rank writes its output to `rank_<k>.log` in `log_dir`; rank 0 also
    writes it to the caller's terminal.
    """
    _check_not_importing()
    content = pickled((enter, run), main_by_value=not _is_main_a_file())
    payload: bytes | Path = content
    # In the caller, which outlives every rank: a rank can still read why another one failed.
    store = store_at("127.0.0.1")
    environment = replace(environment_of_caller(log_dir), world_size=num_ranks, store_port=store.port)
    patience: Patience = GRACE_SECONDS
    regrow = [REGROW] if recovery is not None and not recovery.keeps_ranks and REGROW not in signals else []
    with recorded_signals([*signals, *regrow]) as received, ExitStack() as stack:
        if recovery is not None:
            # Before a loss it does nothing, rather than to end the processes.
            environment = replace(environment, ignored_signals=regrow)
            patience = partial(_patience, recovery, received)
            environment = replace(environment, handover=stack.enter_context(recovery.entered()))
            # In a pipe it would be sent to each rank at each start, and one that dies meanwhile would break the pipe.
            payload = recovery.write(content)
        while True:
            ranks = range(environment.world_size)
            calls = [partial(_run_rank, payload, replace(environment, rank=rank)) for rank in ranks]
            outcomes = run_processes(calls, patience=patience, received=received)
            next_environment = None
            is_unstopped = all(number in regrow for number in received)
            if recovery is not None and is_unstopped and outcomes[0].failure is not None:  # else the run is complete
                is_regrowing = bool(received) and environment.world_size < num_ranks
                next_environment = _after_loss(
                    environment, outcomes, recovery, name_of, all_ranks=num_ranks, is_regrowing=is_regrowing
                )
            if next_environment is None:
                break
            environment = next_environment
            # One by one, and these alone: a Ctrl-C that comes meanwhile is for the next ranks.
            for number in [number for number in received if number in regrow]:
                received.remove(number)
    is_complete = outcomes[0].failure is None and recovery is not None and bool(_lost_ranks(outcomes))
    if not is_complete:
        _raise_first_failure(outcomes, received, name_of)
    value: T = outcomes[0].value
    return value


def _patience(recovery: Recovery, received: Sequence[int], outcomes: Sequence[Outcome]) -> float:
    # After an error the others write what they know of it, also before the first step.
    is_handing_over = _lost_ranks(outcomes) or (received and not any(_has_own_error(outcome) for outcome in outcomes))
    return recovery.patience() if is_handing_over else GRACE_SECONDS


def _after_loss(
    environment: RankEnvironment,
    outcomes: Sequence[Outcome],
    recovery: Recovery,
    name_of: Callable[[int], str],
    *,
    all_ranks: int,
    is_regrowing: bool,
) -> RankEnvironment | None:
    """Return the environment of the ranks that are started after a loss; `None` if the run ends."""
    lost = _lost_ranks(outcomes)
    num_ranks = len(outcomes) if recovery.keeps_ranks else len(outcomes) - len(lost)
    names = [f"{name_of(o.rank)} (pid {o.pid}) {o.failure}".replace("the process ", "") for o in lost]
    if is_regrowing and not any(_has_own_error(outcome) for outcome in outcomes):
        lost, num_ranks = [o for o in outcomes if o.failure], all_ranks
        names = names or [f"{REGROW.name} asked for all ranks"]
    if not lost or not num_ranks:
        return None
    regrow = REGROW if num_ranks < all_ranks and environment.ignored_signals else None
    handover = recovery.after(names, since=min(o.seconds for o in lost), is_whole=num_ranks == all_ranks, regrow=regrow)
    if handover is None:
        return None
    return replace(
        environment,
        world_size=num_ranks,
        attempt=environment.attempt + 1,
        store_token=secrets.token_hex(16),  # keys of the former ranks must not be read
        handover=handover,
        checkpoint=recovery.checkpoint,
    )


def environment_of_caller(log_dir: Path | None) -> RankEnvironment:
    """Return the environment of ranks as far as it is that of this process."""
    # OMP_NUM_THREADS may have one number for each level of nested loops. The default is 1, as under torchrun.
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return RankEnvironment(
        log_dir=None if log_dir is None else str(log_dir),
        num_threads=max(1, int(threads)) if threads.isdecimal() else 1,
        log_level=logging.getLogger("trainkit").getEffectiveLevel() if logging.getLogger().handlers else None,
        store_token=secrets.token_hex(16),
    )


def join_store(host: str, port: int, token: str, *, limit: timedelta) -> Store:
    """Return a view of the store at a port in which the token is before every key.

    The token, which is sent to ranks through a pipe, keeps them apart from another user of the machine who connects to
    the port and guesses keys. It does not stop a client that lists the store's keys.
    """
    return PrefixStore(token, TCPStore(host, port, is_master=False, timeout=limit))


def _check_not_importing() -> None:
    # Private: multiprocessing sets it while a spawned process imports the main module, and has no public name for it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "training was started while a rank was importing your script. Put what starts it below "
            'if __name__ == "__main__": so that importing the script does not train.'
        )


def _is_main_a_file() -> bool:
    """Return True if ranks can import the main module, which is not a notebook, a prompt or standard input."""
    return not hasattr(sys, "ps1") and hasattr(sys.modules["__main__"], "__file__")


def _variables(environment: RankEnvironment) -> dict[str, str]:
    rank, world_size = str(environment.rank), str(environment.world_size)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may resolve to another network
    return variables


# ---- Processes


def run_processes(
    calls: Sequence[Callable[[], Any]],
    *,
    patience: Patience,
    timeout: float = math.inf,
    received: Sequence[int] = (),
) -> list[Outcome]:
    """Run each call in a process of its own and return the outcomes; no process outlives this function.

    The processes have the working directory, the environment and the output of this one.

    Args:
        calls: Picklable functions without arguments, one for each rank.
        patience: Seconds that the other ranks have to end after a first failure, or a function of the outcomes so far.
        timeout: Seconds that all ranks have. Those that have not ended then are aborted, so that they can write stacks.
        received: Signals that this process has received, to which a handler adds; they are forwarded to every rank.

    """
    context = start_fork_server()
    pipes = [context.Pipe(duplex=False) for _ in calls]
    output = [connection.Connection(os.dup(number)) for number in (1, 2)]  # the server's are those of its own start
    settings = {"output": output, "start_method": multiprocessing.get_start_method(allow_none=True)}
    processes = [
        context.Process(target=_run_process, args=(rank, pickle.dumps(call), dict(os.environ), sender), kwargs=settings)
        for rank, (call, (_, sender)) in enumerate(zip(calls, pipes, strict=True))
    ]
    start = time.monotonic()
    try:
        for process in processes:
            process.start()
        # A pipe ends, with EOFError, only when all copies of its sender are closed: this process must not keep one.
        for end in (*output, *(sender for _, sender in pipes)):
            end.close()
        outcomes = _collect(processes, [receiver for receiver, _ in pipes], start + timeout, patience, received)
    finally:
        for process in processes:
            if process.pid is not None:
                if process.exitcode != 0:  # its data workers would hold this program's output for seconds
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
            process.close()
        for receiver, _ in pipes:
            receiver.close()
    return outcomes


def _collect(
    processes: Sequence[Any],
    receivers: Sequence[connection.Connection],
    limit: float,
    patience: Patience,
    received: Sequence[int],
) -> list[Outcome]:
    """Return the outcomes of running processes."""
    outcomes = [Outcome(rank, process.pid) for rank, process in enumerate(processes)]
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    num_forwarded = 0

    def receive(receiver: connection.Connection) -> None:
        rank = waiting.pop(receiver)
        with suppress(EOFError):  # the process has died
            outcomes[rank] = pickle.loads(receiver.recv_bytes())

    deadline = limit
    while running and time.monotonic() < deadline:
        for number in received[num_forwarded:]:
            num_forwarded += 1
            for rank in running.values():
                with suppress(ProcessLookupError):
                    os.kill(processes[rank].pid, number)
        ready = connection.wait([*waiting, *running], timeout=POLL_SECONDS)
        for receiver in receivers:
            if receiver in ready:
                receive(receiver)
        for sentinel in running.keys() & ready:
            rank = running.pop(sentinel)
            if receivers[rank] in waiting:  # an answer may have come after the wait
                receive(receivers[rank])
            if not outcomes[rank].seconds:
                outcomes[rank] = _died(rank, processes[rank])
        failed = [outcome.seconds for outcome in outcomes if outcome.failure]
        if failed:
            # The earliest counts: later failures do not extend the time.
            deadline = min(limit, min(failed) + (patience(outcomes) if callable(patience) else patience))
    # Only beyond the caller's `timeout` are stacks of interest; after a failure its cause is known.
    if time.monotonic() >= limit:
        _abort([processes[rank] for rank in running.values()])
    for rank in running.values():
        if not outcomes[rank].seconds:
            text = f"rank {rank} had not ended when the others were stopped or time was up"
            outcomes[rank] = replace(outcomes[rank], failure=text, seconds=time.monotonic(), is_consequence=True)
    return outcomes


def _abort(processes: Sequence[Any]) -> None:
    """Abort processes; those in which `faulthandler` is enabled write the stacks of their threads."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGABRT)
    for process in processes:
        process.join(ABORT_SECONDS)


def _died(rank: int, process: Any) -> Outcome:
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended without an answer, exit code {code}"
    return Outcome(rank, process.pid, failure=f"the process {how}", seconds=time.monotonic(), exit_code=code)


def _lost_ranks(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the ranks that a signal has ended; none if a rank has failed by itself."""
    if any(_has_own_error(outcome) for outcome in outcomes):
        return []
    return [outcome for outcome in outcomes if outcome.failure is not None and outcome.exit_code is not None]


def _has_own_error(outcome: Outcome) -> bool:
    # An exit code is that of a program that ended itself, such as by `os._exit`.
    is_killed = outcome.exit_code is not None and outcome.exit_code < 0
    return outcome.failure is not None and not outcome.is_consequence and not is_killed


def _raise_first_failure(outcomes: Sequence[Outcome], received: Sequence[int], name_of: Callable[[int], str]) -> None:
    # The cause first: not a consequence, then with a traceback rather than a death, then the earliest.
    failures = sorted(
        (o for o in outcomes if o.failure is not None),
        key=lambda o: (o.is_consequence, o.exit_code is not None, o.seconds),
    )
    if not failures:
        return
    first = failures[0]
    if first.exit_code is not None:
        number = -first.exit_code
        if number in received:  # before the rank had signal handlers
            raise Stopped(signal.Signals(number).name, 128 + number)
        hint = "; if nobody killed it, the machine ran out of memory" if number == signal.SIGKILL else ""
        raise RankFailure(f"{first.failure}{hint}.".replace("the process", f"{name_of(first.rank)} (pid {first.pid})"))
    if isinstance(first.error, UserError | Stopped | KeyboardInterrupt):
        raise first.error
    cause = RankTraceback(f"rank {first.rank}: {first.failure}")
    if first.error is None:
        raise RankFailure(f"rank {first.rank} failed") from cause
    with suppress(AttributeError):  # IPython and the command line show this instead of the calls of this process
        known_notes = len(getattr(first.error, "__notes__", ()))
        first.error._render_traceback_ = lambda: [_shown(first, known_notes)]  # type: ignore[attr-defined]
    raise first.error from cause


def _shown(failure: Outcome, known_notes: int) -> str:
    """Return the traceback with the notes that came after those of the rank, which it has."""
    # Those of a run that has a folder name the rank and the step.
    notes = getattr(failure.error, "__notes__", [])[known_notes:]
    return "\n".join([f"{'' if notes else f'rank {failure.rank}: '}{failure.brief.rstrip()}", *notes])


# ---- In a rank


def _run_process(
    rank: int,
    call: bytes,
    environment: dict[str, str],
    answer: connection.Connection,
    *,
    output: Sequence[connection.Connection],
    start_method: str | None,
) -> None:
    """Send the outcome of the call.

    `output` becomes standard output and standard error; data workers are started by the caller's `start_method`.
    """
    begin_forked_process()
    os.setpgrp()  # Ctrl-C reaches the caller only, which forwards it once
    # A thread, as a killed caller sends no signal, and the main thread may wait in a collective.
    threading.Thread(target=_exit_with_caller, daemon=True).start()
    _end_with_server()
    multiprocessing.set_start_method(start_method, force=True)  # not the one that started this rank
    for number, stream in zip((1, 2), output, strict=True):
        os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    try:
        value = pickle.loads(call)()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would interrupt this process's end
        content = pickle.dumps(Outcome(rank, os.getpid(), value, seconds=time.monotonic()))
    except BaseException as error:
        if isinstance(error, SystemExit) and not isinstance(error, Stopped):
            error = rank_exit(error, rank).with_traceback(error.__traceback__)
        with suppress(BrokenPipeError):  # the caller is gone
            answer.send_bytes(_pickled_failure(rank, error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once: with a peer gone, the end of the process group may wait or abort
    answer.send_bytes(content)
    atexit._run_exitfuncs()  # which a forked process does not run by itself


def _end_with_server() -> None:
    """Let the kernel end this process when the fork server ends, as it does when its caller has.

    A call that hangs with the lock of the interpreter, as one of CUDA may, leaves no thread to do it.
    """
    if sys.platform != "linux":
        return
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    # The server lives while anybody has this end of a pipe: a rank must not keep it.
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    connection.wait([caller.sentinel])
    os.killpg(0, signal.SIGKILL)  # with all processes that this one has started


def _pickled_failure(rank: int, error: BaseException) -> bytes:
    outcome = Outcome(
        rank,
        os.getpid(),
        failure="".join(traceback.format_exception(error)),
        brief=user_traceback(error) or "".join(traceback.format_exception(error, chain=False)),
        seconds=time.monotonic(),
        error=error,
        is_consequence=is_consequence(error),
    )
    try:
        pickle.loads(pickle.dumps(outcome))  # some exceptions can be pickled, but not unpickled
    except Exception:
        outcome = replace(outcome, error=None)
    return pickle.dumps(outcome)


def _run_rank(payload: bytes | Path, environment: RankEnvironment) -> Any:
    """Return the value of the run on rank 0, and None on the others; `payload` may be in a file."""
    for number in environment.ignored_signals:
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(_variables(environment))
    log = None if environment.log_dir is None else keep_log(Path(environment.log_dir), rank=environment.rank)
    prepare_rank(environment)
    try:
        enter, run = unpickled(payload if isinstance(payload, bytes) else payload.read_bytes())
        enter(environment)
        value = run()
    except BaseException as error:
        if log is not None:
            log.write(final_message(error))
        raise
    finally:
        if log is not None:
            log.close()
    return value if environment.rank == 0 else None


def prepare_rank(environment: RankEnvironment) -> None:
    """Set the log level and the number of threads of this process."""
    if environment.log_level is not None:
        log_to_stderr()
        logging.getLogger("trainkit").setLevel(environment.log_level)
    torch.set_num_threads(environment.num_threads)


def is_consequence(error: BaseException) -> bool:
    """Return True if the error is a consequence of another rank's failure."""
    # "recvValue failed": the process of the store is gone; torch has no exception type for it.
    is_lost = isinstance(error, RuntimeError) and any(part in str(error) for part in (*GONE, "recvValue failed"))
    return is_lost or isinstance(error, RankError)
