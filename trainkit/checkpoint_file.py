"""Files that are either whole and on the disk, or not there at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedWriter, FileIO, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from typing_extensions import Buffer

PART = ".part"

_DIGEST_BYTES = 32
_GATHERED_BYTES = 1 << 20  # small records are gathered up to this before they are hashed and written
_READ_BYTES = 1 << 20
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


class Written(NamedTuple):
    """What a file holds: its size in bytes and the BLAKE2b hash (hexadecimal) of its content."""

    size: int
    digest: str


def part_of(path: Path) -> Path:
    """Return the temporary name, in the same folder, under which `path` is written."""
    return path.with_name(f".{path.name}{PART}")


def write_payload(part: Path, payload: dict[str, Any]) -> Written:
    """Leave the payload, as `torch.save` writes it, in `part` and on the disk; return its size and hash.

    Raises OSError, with what was written so far left in `part`.
    """
    with open(part, "wb", buffering=0) as raw, HashingFile(raw.fileno()) as hashing:
        with BufferedWriter(hashing, _GATHERED_BYTES) as file:
            torch.save(payload, file)
            file.flush()
            written = hashing.finish()
            _sync(raw.fileno())
    return written


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` at one instant; after the call it is on the disk."""
    part = part_of(path)
    try:
        with open(part, "wb", buffering=0) as raw:
            _write_all(raw.fileno(), memoryview(text.encode()))
            _sync(raw.fileno())
        move(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def move(part: Path, path: Path) -> None:
    """Give a file that is on the disk its final name; after the call the name is on the disk too."""
    os.replace(part, path)
    with _opened(path.parent) as folder:
        _sync(folder)


def digest_of(file: FileIO) -> Written:
    """Return size and hash of an open file, which is left at its beginning again."""
    file.seek(0)
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    block = memoryview(bytearray(_READ_BYTES))
    size = 0
    # A raw file may return less than a block, an empty read is the end.
    while True:
        count = file.readinto(block)
        if not count:
            break
        hasher.update(block[:count])
        size += count
    file.seek(0)
    return Written(size, hasher.hexdigest())


def digest_of_text(text: str) -> str:
    """Return the same hash of a text."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder against every other writer, in this process or another; wait up to a minute for it.

    The system lets go when the process is killed, so nothing is left behind. Where the file system knows
    no locks, nothing is held.
    """
    with _opened(folder) as descriptor:
        deadline = time.monotonic() + _WAIT_SECONDS
        held = _lock(descriptor, folder, deadline)
        try:
            yield
        finally:
            # A worker process forked meanwhile shares the descriptor: closing ours alone would not let go.
            if held:
                fcntl.flock(descriptor, fcntl.LOCK_UN)


class HashingFile(RawIOBase):
    """Hashes every byte in a second thread while this one writes it to the file.

    An error of the disk is kept and raised by `finish`, because `torch.save` would replace it by one of its own.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._size = 0
        self._error: OSError | None = None
        self._second = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-hash")

    def writable(self) -> bool:
        """Say yes, as a buffered writer asks."""
        return True

    def write(self, content: Buffer) -> int:
        """Take all of the bytes before returning: the caller may reuse their memory."""
        view = memoryview(content).cast("B")
        if self._error is None:
            hashed = self._second.submit(self._hasher.update, view)
            try:
                _write_all(self._descriptor, view)
            except OSError as error:
                self._error = error
            finally:
                hashed.result()
            self._size += len(view)
        return len(view)

    def finish(self) -> Written:
        """Return size and hash of all that was written; raise the disk's error, if there was one."""
        if self._error is not None:
            raise self._error
        return Written(self._size, self._hasher.hexdigest())

    def close(self) -> None:
        """End the second thread."""
        self._second.shutdown()
        super().close()


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


def _sync(descriptor: int) -> None:
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:  # on macOS fsync leaves the bytes in the cache of the drive
        fcntl.fcntl(descriptor, full_sync)


def _lock(descriptor: int, folder: Path, deadline: float) -> bool:
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


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
