"""Files that are either whole and on the disk, or not there at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from io import BufferedWriter, FileIO, RawIOBase
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from typing_extensions import Buffer


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


ALGORITHMS = ("sha256", "blake2b")
BLOCK_BYTES = 1 << 20  # files are read and hashed by it


class FileDigest(NamedTuple):
    """What a file holds: its size in bytes and the hash of its content, as "sha256:..." or "blake2b:..."."""

    size: int
    digest: str


def digest_of(file: FileIO, algorithm: str) -> FileDigest:
    """Return size and hash of an open file, which is left at its beginning again."""
    file.seek(0)
    hasher = new_hash(algorithm)
    block = memoryview(bytearray(BLOCK_BYTES))
    count, size = file.readinto(block), 0
    while count:
        hasher.update(block[:count])
        size += count
        count = file.readinto(block)
    file.seek(0)
    return FileDigest(size, f"{algorithm}:{hasher.hexdigest()}")


def digest_of_text(text: str) -> str:
    """Return a hash of a text in the same form."""
    hasher = new_hash("sha256")
    hasher.update(text.encode())
    return f"sha256:{hasher.hexdigest()}"


@cache
def fastest_algorithm() -> str:
    """Return the hash that this machine computes faster: SHA-256 where the processor has instructions for it."""
    block = bytes(BLOCK_BYTES)
    seconds = {}
    for algorithm in ALGORITHMS:
        start = time.perf_counter()
        new_hash(algorithm).update(block)
        seconds[algorithm] = time.perf_counter() - start
    return min(ALGORITHMS, key=seconds.__getitem__)


def new_hash(algorithm: str) -> Any:
    """Return a hash of nothing yet, by the name it has in a manifest."""
    if algorithm == "blake2b":
        return hashlib.blake2b(digest_size=32)
    return hashlib.new(algorithm, usedforsecurity=False)


Result = TypeVar("Result")

_SLICE_BYTES = 4 << 20  # of a large tensor: the hashing thread starts before all of it is written


class HashedFile(RawIOBase):
    """A file that another thread hashes while it is being written.

    The hash is of what can be read from the file, not of the memory it came from: that memory may be gone or
    changed by the time the hashing thread gets there, and that thread must not hold up the writing one.
    An error of the disk is kept and raised by `sync`, because `torch.save` would replace it by one of its own.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = Condition()
        self._size = 0
        self._ended = False
        self._error: OSError | None = None

    def writable(self) -> bool:
        """Say yes, as a buffered writer asks."""
        return True

    def write(self, content: Buffer) -> int:
        """Write all of the bytes, or note why that failed."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), _SLICE_BYTES):
            if self._error is None:
                self._write_slice(view[start : start + _SLICE_BYTES])
        return len(view)

    def hash(self, path: Path, algorithm: str) -> FileDigest:
        """Return size and hash of the file once it has ended."""
        hasher = new_hash(algorithm)
        block = memoryview(bytearray(BLOCK_BYTES))
        size = 0
        with open(path, "rb", buffering=0) as file:
            ended = False
            while not ended:
                ended = self._wait_for(size + BLOCK_BYTES)
                count = file.readinto(block)
                while count:
                    hasher.update(block[:count])
                    size += count
                    count = file.readinto(block)
        return FileDigest(size, f"{algorithm}:{hasher.hexdigest()}")

    def end(self) -> None:
        """Say that nothing more will be written."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def sync(self) -> None:
        """Have all of the file on the disk; raise the first error that the disk has had with it.

        At the end, and not by and by: writing waits while the disk takes what was written before, and where memory is
        as quick as the disk a save takes half as long again.
        """
        if self._error is not None:
            raise self._error
        sync(self._descriptor)

    def _wait_for(self, size: int) -> bool:
        """Wait until so much is written or nothing more will be; return whether it is the latter."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._size >= size)
            return self._ended

    def _write_slice(self, view: memoryview) -> None:
        try:
            write_all(self._descriptor, view)
        except OSError as error:
            self._error = error
            return
        with self._changed:
            self._size += len(view)
            self._changed.notify()


class BackgroundThread(Thread, Generic[Result]):
    """Work that another thread does at once; unlike a pool's it may begin when the interpreter is about to end."""

    def __init__(self, work: Callable[[], Result]) -> None:
        super().__init__(name="checkpoint")
        self._work = work
        self._results: list[Result] = []
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Keep what the work returns or raises."""
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._failure = error

    def result(self) -> Result:
        """Wait, and return or raise what the work did."""
        self.join()
        if self._failure is not None:
            raise self._failure
        return self._results[0]


PART = ".part"


def part_of(path: Path) -> Path:
    """Return the temporary name, in the same folder, under which `path` is written."""
    return path.with_name(f".{path.name}{PART}")


def write_payload(part: Path, payload: dict[str, Any]) -> FileDigest:
    """Leave the payload, as `torch.save` writes it, in `part` and on the disk; return its size and hash.

    Raises OSError, with what was written so far left in `part`.
    """
    with open(part, "wb", buffering=0) as raw:
        followed = HashedFile(raw.fileno())
        hashed = BackgroundThread(lambda: followed.hash(part, fastest_algorithm()))
        try:
            _save(payload, followed)
            followed.sync()  # while the rest is hashed
        finally:
            hashed.join()
        return hashed.result()


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` at one instant; after the call it is on the disk."""
    part = part_of(path)
    try:
        with open(part, "wb", buffering=0) as raw:
            write_all(raw.fileno(), memoryview(text.encode()))
            sync(raw.fileno())
        move(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def move(part: Path, path: Path) -> None:
    """Give a file that is on the disk its final name; after the call the name is on the disk too."""
    os.replace(part, path)
    sync_folder(path.parent)


def _save(payload: dict[str, Any], followed: HashedFile) -> None:
    try:
        with BufferedWriter(followed, BLOCK_BYTES) as file:
            torch.save(payload, file)
    finally:
        followed.end()  # or the hashing thread would wait for ever


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
