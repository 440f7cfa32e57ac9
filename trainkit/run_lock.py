"""One live process for each run folder: a lock that the main rank holds while it writes there.

    runs/digits/2026-01-31_12-00-00/.lock      who holds it, as JSON; flock says whether it is held

The system lets go of the lock when its holder dies, however it dies. A worker process that the holder forked may live
some seconds longer with a copy of the lock; a holder that is known to be dead is therefore passed over.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from trainkit.checkpoints.folder_lock import only_writer
from trainkit.errors import UserError

LOCK = ".lock"

_SAME_JOB_SECONDS = 120.0  # a network file system may take so long to notice that a machine is gone
_POLL_SECONDS = 0.2
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that trains in a run folder."""

    host: str
    pid: int
    process: str  # tells it from another process that has the same number, on this host or elsewhere
    job: str  # of SLURM or torchrun; empty: none
    since: str

    @staticmethod
    def this_process() -> Holder:
        """Return what the present process writes into its lock."""
        job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name, "none") != "none"), "")
        return Holder(
            socket.gethostname(), os.getpid(), _identity(os.getpid()), job, f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        )

    @property
    def is_dead(self) -> bool:
        """Whether it has ended for certain; never said of a process that cannot be seen from here."""
        machine = self.process.rpartition("/")[0]
        here = machine != "" and machine == _machine()
        return here and _identity(self.pid) != self.process


@contextmanager
def only_run_in(folder: Path, *, same_job_seconds: float = _SAME_JOB_SECONDS) -> Iterator[None]:
    """Hold the run folder against every other process; raise UserError where another one trains in it.

    An earlier part of the same job (a restart by torchrun, a job that SLURM queued again) is waited for, since it is
    about to end. Where the file system knows no locks, only a process of this machine is noticed; a warning says so.
    """
    path = folder / LOCK
    descriptor = _take(path, time.monotonic() + same_job_seconds)
    try:
        yield
    finally:
        # Under the gate, or a process that has opened the file just now would lock one that is about to be gone.
        with suppress(OSError), only_writer(folder):
            if _is_named(descriptor, path):
                path.unlink()
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for forked workers, which share it
        os.close(descriptor)


def check_no_other_run(folder: Path) -> None:
    """Raise UserError if another process trains in the folder, unless it is of the same job; changes nothing."""
    if "RANK" in os.environ:
        return  # one of several ranks that were started by themselves: the main one may hold the lock already
    holder = _read(folder / LOCK)
    if holder is None or holder.is_dead or _is_same_job(holder):
        return
    try:
        with open(folder / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(folder, holder) from None
    except OSError:
        return  # gone meanwhile, or no locks here: what matters is found out when the run begins


def _take(path: Path, deadline: float) -> int:
    waiting = False
    while True:
        with only_writer(path.parent):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            holder = _try(descriptor, path)
            if holder is not None and holder.is_dead:
                # Its lock lives on in a process that it forked: a file of the same name has a lock of its own.
                os.close(descriptor)
                path.unlink(missing_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                holder = _try(descriptor, path)
            if holder is None:
                _write(descriptor)
                return descriptor
        os.close(descriptor)
        if not _is_same_job(holder) or time.monotonic() > deadline:
            raise _in_use(path.parent, holder)
        if not waiting:
            logger.info("waiting for process %d on %s, an earlier part of this job, to end", holder.pid, holder.host)
        waiting = True
        time.sleep(_POLL_SECONDS)


def _try(descriptor: int, path: Path) -> Holder | None:
    """Lock the file, and return None, or who holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read(path) or Holder("unknown", 0, "", "", "an unknown time")
    except OSError as error:
        holder = _read(path)
        if holder is not None and holder.process.startswith(f"{_machine()}/") and not holder.is_dead:
            return holder
        logger.warning(
            "%s is on a file system without locks (%s): a process of another machine that trains in the same folder "
            "is not noticed.",
            path.parent,
            error.strerror,
        )
        return None


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _write(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(Holder.this_process())).encode(), 0)


def _is_named(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _is_same_job(holder: Holder) -> bool:
    """Whether the holder is an earlier part of this job: not this process itself, which would wait for ever."""
    own = Holder.this_process()
    return own.job != "" and holder.job == own.job and holder.process != own.process


def _in_use(folder: Path, holder: Holder) -> UserError:
    return UserError(
        f"{folder} is in use: process {holder.pid} on {holder.host} has been training there since {holder.since}. "
        f"Wait until it has ended, or stop it (on {holder.host}: kill {holder.pid}), and type this again; or choose "
        f"another folder: run_dir=PATH."
    )


def _identity(pid: int) -> str:
    """Return what no other process has, of this machine or another, or nothing for one that has ended."""
    try:
        # After the name, which may hold anything but ends with the last bracket; the 22nd field is the start time.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self/stat").exists() or not _is_alive(pid) else f"{_machine()}/{pid}"
    return "" if fields[0] in "ZX" else f"{_machine()}/{fields[19]}"


def _machine() -> str:
    """Return what tells this machine, since it was started, and this view of its processes from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
