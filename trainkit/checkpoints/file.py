"""Files that are either whole and on the disk, or not there at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BufferedWriter, FileIO, RawIOBase
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from typing_extensions import Buffer

Result = TypeVar("Result")

PART = ".part"
ALGORITHMS = ("sha256", "blake2b")

_BLOCK_BYTES = 1 << 20  # small records are gathered up to this, and files are read and hashed by it
_SLICE_BYTES = 4 << 20  # of a large tensor: the hashing thread starts before all of it is written
_SYNC_BYTES = 64 << 20
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


class Written(NamedTuple):
    """What a file holds: its size in bytes and the hash of its content, as "sha256:..." or "blake2b:..."."""

    size: int
    digest: str


def part_of(path: Path) -> Path:
    """Return the temporary name, in the same folder, under which `path` is written."""
    return path.with_name(f".{path.name}{PART}")


def write_payload(part: Path, payload: dict[str, Any]) -> Written:
    """Leave the payload, as `torch.save` writes it, in `part` and on the disk; return its size and hash.

    Raises OSError, with what was written so far left in `part`.
    """
    with open(part, "wb", buffering=0) as raw:
        followed = _FollowedFile(raw.fileno())
        hashed = _Background(lambda: followed.hash(part, fastest_algorithm()))
        try:
            with BufferedWriter(followed, _BLOCK_BYTES) as file:
                torch.save(payload, file)
        finally:
            followed.end()  # or the hashing thread would wait for ever
            hashed.join()
        followed.sync()
        return hashed.result()


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


def digest_of(file: FileIO, algorithm: str) -> Written:
    """Return size and hash of an open file, which is left at its beginning again."""
    file.seek(0)
    hasher = _hasher(algorithm)
    block = memoryview(bytearray(_BLOCK_BYTES))
    count, size = file.readinto(block), 0
    while count:
        hasher.update(block[:count])
        size += count
        count = file.readinto(block)
    file.seek(0)
    return Written(size, f"{algorithm}:{hasher.hexdigest()}")


def digest_of_text(text: str) -> str:
    """Return a hash of a text in the same form."""
    hasher = _hasher("sha256")
    hasher.update(text.encode())
    return f"sha256:{hasher.hexdigest()}"


@cache
def fastest_algorithm() -> str:
    """Return the hash that this machine computes faster: SHA-256 where the processor has instructions for it."""
    block = bytes(_BLOCK_BYTES)
    seconds = {}
    for algorithm in ALGORITHMS:
        start = time.perf_counter()
        _hasher(algorithm).update(block)
        seconds[algorithm] = time.perf_counter() - start
    return min(ALGORITHMS, key=seconds.__getitem__)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder against every other writer, in this process or another; wait up to a minute for it.

    The system lets go when the process is killed, so nothing is left behind. Where the file system knows
    no locks, nothing is held.
    """
    with _opened(folder) as descriptor:
        held = _lock(descriptor, folder)
        try:
            yield
        finally:
            # A worker process forked meanwhile shares the descriptor: closing ours alone would not let go.
            if held:
                fcntl.flock(descriptor, fcntl.LOCK_UN)


class _FollowedFile(RawIOBase):
    """A file that two other threads hash and bring to the disk while it is being written.

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
        self._syncing: _Background[None] | None = None
        self._synced = 0

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

    def hash(self, path: Path, algorithm: str) -> Written:
        """Return size and hash of the file once it has ended."""
        hasher = _hasher(algorithm)
        block = memoryview(bytearray(_BLOCK_BYTES))
        size = 0
        with open(path, "rb", buffering=0) as file:
            ended = False
            while not ended:
                ended = self._wait_for(size + _BLOCK_BYTES)
                count = file.readinto(block)
                while count:
                    hasher.update(block[:count])
                    size += count
                    count = file.readinto(block)
        return Written(size, f"{algorithm}:{hasher.hexdigest()}")

    def end(self) -> None:
        """Say that nothing more will be written."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def sync(self) -> None:
        """Have all of the file on the disk; raise the first error that the disk has had with it."""
        self._end_sync()
        if self._error is not None:
            raise self._error
        _sync(self._descriptor)

    def _wait_for(self, size: int) -> bool:
        """Wait until so much is written or nothing more will be; return whether it is the latter."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._size >= size)
            return self._ended

    def _write_slice(self, view: memoryview) -> None:
        try:
            _write_all(self._descriptor, view)
        except OSError as error:
            self._error = error
            return
        with self._changed:
            self._size += len(view)
            self._changed.notify()
        if self._size - self._synced >= _SYNC_BYTES:
            self._start_sync()

    def _start_sync(self) -> None:
        """Let the disk begin now: otherwise it idles until all is written and then keeps everyone waiting."""
        if self._syncing is None or not self._syncing.is_alive():
            self._end_sync()
            self._synced = self._size
            self._syncing = _Background(lambda: os.fsync(self._descriptor))

    def _end_sync(self) -> None:
        if self._syncing is not None:
            try:
                self._syncing.result()
            except OSError as error:  # the system tells it only once, so it must not be lost
                self._error = self._error or error
            self._syncing = None


class _Background(Thread, Generic[Result]):
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


def _hasher(algorithm: str) -> Any:
    if algorithm == "blake2b":
        return hashlib.blake2b(digest_size=32)
    return hashlib.new(algorithm, usedforsecurity=False)


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


def _sync(descriptor: int) -> None:
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:  # on macOS fsync leaves the bytes in the cache of the drive
        fcntl.fcntl(descriptor, full_sync)


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


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
