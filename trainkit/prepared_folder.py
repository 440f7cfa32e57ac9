"""A folder that is made once, whoever asks for it: the ranks of a run, or runs side by side."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


def prepare_folder(folder: Path, *, make: Callable[[Path], None]) -> None:
    """Have `folder` there and complete; a folder that is there is never touched.

    Processes that ask at once wait for the first of them. Where the file system knows no locks, each makes its own and
    the first to be ready is kept.

    Args:
        folder: What is asked for.
        make: Fills the empty folder that it is given, which gets its name when it is complete.

    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder.parent):
        if folder.exists():
            return
        part = folder.with_name(f"{folder.name}.part_{uuid4().hex[:8]}")
        part.mkdir()
        try:
            make(part)
            _publish(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _publish(part: Path, folder: Path) -> None:
    try:
        part.rename(folder)
    except OSError:  # a folder that is not empty is never replaced
        if not folder.exists():
            raise


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold `folder` against other processes; the system lets go when this one is killed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file system knows no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
