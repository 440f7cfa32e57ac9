"""One writer at a time in a folder."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.checkpoints.disk import opened_folder

_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder against every other writer, in this process or another; wait up to a minute for it.

    The system lets go when the process is killed, so nothing is left behind. Where the file system knows
    no locks, nothing is held.
    """
    with opened_folder(folder) as descriptor:
        held = _lock(descriptor, folder)
        try:
            yield
        finally:
            # A worker process forked meanwhile shares the descriptor: closing ours alone would not let go.
            if held:
                fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock(descriptor: int, folder: Path) -> bool:
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has been saving into {folder} for a minute") from None
            time.sleep(_POLL_SECONDS)
        except OSError:
            return False
