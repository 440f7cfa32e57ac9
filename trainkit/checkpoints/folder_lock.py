"""Lock files: one process or thread at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


@contextmanager
def file_lock(path: Path, *, timeout: float = -1) -> Iterator[OSError | None]:
    """Hold the lock file `path` against other processes and threads, and remove it at the end.

    The system releases the lock when its process dies. Where the file system has no locks, nothing is held and the
    error is given instead of `None`.

    Args:
        path: The lock file. Its folder must exist.
        timeout: Seconds to wait for the lock; -1 waits without limit.

    Raises:
        filelock.Timeout: Another process or thread still holds it.

    """
    lock = FileLock(path, poll_interval=_POLL_SECONDS)
    try:
        lock.acquire(timeout)
    except Timeout:
        raise
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        yield error
        return
    try:
        yield None
    finally:
        with suppress(OSError):  # before the release, so that a process that waits sees an unlinked file and retries
            path.unlink()
        lock.release()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the checkpoint folder against every other writer; wait up to a minute, then raise TimeoutError."""
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(folder / ".lock", timeout=_WAIT_SECONDS))
        except Timeout:
            raise TimeoutError(f"another process has been saving into {folder} for a minute") from None
        yield
