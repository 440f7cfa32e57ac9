"""Bytes that are on the disk, whatever happens next."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_all(descriptor: int, view: memoryview) -> None:
    """Write every byte, in as many calls as the system wants."""
    while len(view):
        view = view[os.write(descriptor, view) :]


def sync(descriptor: int) -> None:
    """Have the file, or the names in a folder, on the disk."""
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:  # on macOS fsync leaves the bytes in the cache of the drive
        fcntl.fcntl(descriptor, full_sync)


@contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """Give a descriptor of the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Have the names in the folder on the disk."""
    with opened_folder(folder) as descriptor:
        sync(descriptor)
