"""A lock on the run folder, so that one process at a time trains there.

.lock       the lock file; the system releases it when its process dies
.owner      the process that has locked it, as JSON
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from filelock import Timeout

from trainkit.errors import UserError
from trainkit.files import file_lock, write_optional

LOCK = ".lock"
OWNER = ".owner"

_WAIT_SECONDS = 120.0  # a network file system may take this long to notice that a machine is gone
# Set by the launchers: of two processes with the same value, the earlier one is ending.
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LockOwner:
    """The process that trains in a run folder."""

    host: str
    pid: int
    job: str  # of SLURM, torchrun or Ray; empty: none
    since: str

    @staticmethod
    def this_process() -> LockOwner:
        """Return the owner that this process records in its lock."""
        # torchrun sets TORCHELASTIC_RUN_ID=none if it got no --rdzv-id.
        job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name, "none") != "none"), "")
        return LockOwner(socket.gethostname(), os.getpid(), job, f"{datetime.now():%Y-%m-%d %H:%M:%S}")

    @property
    def is_ending(self) -> bool:
        """True if the lock will be released soon: the owner is an earlier part of this job, or a process that died.

        The workers of a process that died may keep its lock for some seconds.
        """
        this = LockOwner.this_process()
        same_job = this.job != "" and self.job == this.job
        # The process numbers of another host mean nothing here.
        if self.host != this.host:
            return same_job
        return self.pid != this.pid and (same_job or not _is_alive(self.pid))


@contextmanager
def lock_run_dir(folder: Path, *, timeout: float = _WAIT_SECONDS) -> Iterator[None]:
    """Lock the run folder against every other process.

    On a file system without locks, a warning is logged and nothing is locked.

    Args:
        folder: The run folder.
        timeout: Seconds to wait for an owner that is about to end, such as an earlier part of the same job.

    Raises:
        UserError: Another process trains in the folder.

    """
    # For the wait and the message only: the lock decides, since this file outlives a killed owner.
    owner = _read(folder)
    with ExitStack() as stack:
        try:
            no_locks = stack.enter_context(file_lock(folder / LOCK, timeout=0))
        except Timeout:
            if owner is None or not owner.is_ending:
                raise _in_use(folder) from None
            logger.info("waiting for process %d on %s to release %s", owner.pid, owner.host, folder)
            try:
                no_locks = stack.enter_context(file_lock(folder / LOCK, timeout=timeout))
            except Timeout:
                raise _in_use(folder) from None
        if no_locks is not None:
            logger.warning(
                "%s is on a file system without locks (%s): another process that trains in the same folder "
                "is not detected.",
                folder,
                no_locks.strerror,
            )
        path = folder / OWNER
        write_optional(path, json.dumps(asdict(LockOwner.this_process())))
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may have been removed
                # Before the lock is released: after it, the file could be the next owner's.
                path.unlink()


def check_not_locked(folder: Path) -> None:
    """Raise UserError if another process trains in the folder and is not about to end."""
    if "RANK" in os.environ:
        return  # one of several ranks that were started separately: the main rank may hold the lock already
    owner = _read(folder)
    if owner is None or owner.is_ending:
        return
    try:
        # Taken and released at once, to ask before any process is started.
        with file_lock(folder / LOCK, timeout=0):
            pass
    except Timeout:
        raise _in_use(folder) from None


def _read(folder: Path) -> LockOwner | None:
    try:
        # The owner may have been killed while it wrote: without its name the lock still works.
        return LockOwner(**json.loads((folder / OWNER).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # sends no signal, only checks
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, and is another user's
        pass
    return True


def _in_use(folder: Path) -> UserError:
    owner = _read(folder) or LockOwner("unknown", 0, "", "an unknown time")
    return UserError(
        f"{folder} is in use: process {owner.pid} on {owner.host} has been training there since {owner.since}. "
        f"Wait until it has ended, or stop it (on {owner.host}: kill {owner.pid}), and type this again; or choose "
        f"another folder: run_dir=PATH."
    )
