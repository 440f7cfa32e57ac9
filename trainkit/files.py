"""Files that are either complete and on the disk or missing: atomic writes, hashes, lock files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from io import BufferedWriter, FileIO, RawIOBase
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

ALGORITHMS = ("sha256", "blake2b")
PART = ".part"

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # of this process, and of the system
_BLOCK_BYTES = 1 << 20  # read and hashed at once
_SLICE_BYTES = 4 << 20  # of a large tensor: the hashing thread starts before all of it is written
_WAIT_SECONDS = 60.0  # for another writer
_POLL_SECONDS = 0.05  # between two tries to get a lock

logger = logging.getLogger(__name__)


class FileDigest(NamedTuple):
    """The size of a file in bytes and the hash of its content, as "sha256:..." or "blake2b:..."."""

    size: int
    digest: str


class ShardFile(NamedTuple):
    """One file that a rank wrote beside the checkpoint's own."""

    file: str
    size: int  # bytes
    digest: str


def disk_error_text(error: OSError, folder: Path, *, needed: int = 0) -> str:
    """Return why a file could not be written in the folder, the bytes that are needed and free, and what to do."""
    if error.errno in _NO_DESCRIPTORS:
        return f"{reason(error)}."
    if error.errno == errno.ENOENT:
        return f"{reason(error)}. The folder was removed or moved during the save; the next save makes it again."
    free = shutil.disk_usage(existing_folder(folder)).free
    return (
        f"{reason(error)}. {f'It needs about {needed:,} bytes, ' if needed else ''}{free:,} are free there. "
        f"Make room or let the run write elsewhere: run_dir=/path/with/room."
    )


def reason(error: OSError) -> str:
    """Return the system's words for the error, with the limit and what to type if all open files are used up."""
    if error.errno in _NO_DESCRIPTORS:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{error.strerror} (a process may have {most:,}); type ulimit -n 65536 or lower data.num_workers"
    return error.strerror or str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def disk_error_in(error: BaseException | None) -> OSError | None:
    """Return the disk's error among an error and its causes, if there is one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def existing_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(parent for parent in [path, *path.absolute().parents] if parent.exists())


def part_of(path: Path) -> Path:
    """Return the temporary name, in the same folder, under which `path` is written."""
    return path.with_name(f".{path.name}{PART}")


def write_payload(part: Path, payload: dict[str, Any]) -> FileDigest:
    """Write the payload to `part` with `torch.save`, flushed to the disk; return its size and hash.

    Raises OSError, with what was written so far in `part`.
    """
    with open(open_new(part), "wb", buffering=0) as raw:
        file = HashedFile(raw.fileno(), part)
        try:
            with BufferedWriter(file, _BLOCK_BYTES) as buffered:
                torch.save(payload, buffered)
            # `torch.save` has seen no error, so the disk's is raised here.
            if file.error is not None:
                raise file.error
            # Once, while the rest is hashed: a sync makes writers wait, and where memory is as quick as the disk,
            # syncing in between makes a save take half as long again.
            sync(raw.fileno())
        finally:
            # Also after an error: the thread reads the file, which the caller removes.
            file.join()
        return file.digest()


def open_new(path: Path) -> int:
    """Return a descriptor to write a file that did not exist: what a link at its name points to stays as it is."""
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # which follows no link
        except FileExistsError:
            # Left by a kill, or put there. O_EXCL refuses what another process makes in between, and the loop tries
            # again.
            path.unlink(missing_ok=True)


def open_to_append(path: Path) -> int:
    """Return a descriptor that appends to a file; raises OSError if it is a link."""
    # A link would have the run write to a file elsewhere.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)


@contextmanager
def optional_file(path: Path) -> Iterator[None]:
    """Log a disk error of the block, once for each file: it writes a file that training does not need."""
    try:
        yield
    except OSError as error:
        _warn_once(path, reason(error))


def write_optional(path: Path, text: str) -> None:
    """Replace the content of a file that training does not need, and make its folder; a disk error is a warning."""
    with optional_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` atomically; after the call it is on the disk."""
    part = part_of(path)
    try:
        with open(open_new(part), "wb", buffering=0) as raw:
            _write_all(raw.fileno(), memoryview(text.encode()))
            sync(raw.fileno())
        move(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def move(part: Path, path: Path) -> None:
    """Give a file that is on the disk its final name; after the call the name is on the disk too."""
    # Atomic in one folder: a reader sees the old file or the new one, never a part.
    os.replace(part, path)
    # A name is in its folder: without this a power cut could bring the old file back.
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in the folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:  # on macOS fsync leaves the bytes in the cache of the drive
        fcntl.fcntl(descriptor, full_sync)


def file_digest(file: FileIO, algorithm: str) -> FileDigest:
    """Return size and hash of an open file, which is positioned at its start afterwards."""
    file.seek(0)
    hasher = _Hasher(algorithm)
    hasher.read(file)
    file.seek(0)
    return hasher.digest()


@cache
def fastest_algorithm() -> str:
    """Return the hash that this machine computes faster: SHA-256 if the processor has instructions for it."""
    block = bytes(_BLOCK_BYTES)
    seconds = {}
    for algorithm in ALGORITHMS:
        start = time.perf_counter()
        _new_hash(algorithm).update(block)
        seconds[algorithm] = time.perf_counter() - start
    return min(ALGORITHMS, key=seconds.__getitem__)


class HashedFile(RawIOBase):
    """A file that another thread hashes while it is being written, if it is longer than a block.

    The hash is computed from the file, not from the memory it came from: that memory may be gone or changed by the
    time the hashing thread gets there, and that thread must not hold up the writing one. A disk error is kept in
    `error`, because `torch.save` would replace it.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path
        self._hashing: Future[FileDigest] | None = None
        self._changed = Condition()
        self._size = 0
        self._ended = False
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Return True, as BufferedWriter requires."""
        return True

    def write(self, content: Buffer) -> int:
        """Write all of the bytes, or keep the error."""
        view = memoryview(content).cast("B")
        # Bytes after a failed write would leave a gap: they are dropped, and the caller raises the error.
        if self.error is not None:
            return len(view)
        try:
            for start in range(0, len(view), _SLICE_BYTES):
                written = view[start : start + _SLICE_BYTES]
                _write_all(self._descriptor, written)
                with self._changed:
                    self._size += len(written)
                    self._changed.notify()
        except OSError as error:
            self.error = error
        # Not for a small file: the start of a thread takes longer than its hash.
        if self._hashing is None and self._size >= _BLOCK_BYTES:
            self._hashing = start_thread(self._hash)
        return len(view)

    def close(self) -> None:
        """Declare the file complete, so that the hashing thread ends; BufferedWriter calls it."""
        super().close()
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the hashing thread, after `close`."""
        if self._hashing is not None:
            wait([self._hashing])

    def digest(self) -> FileDigest:
        """Return size and hash of the file, after `close`."""
        return self._hash() if self._hashing is None else self._hashing.result()

    def _hash(self) -> FileDigest:
        hasher = _Hasher(fastest_algorithm())
        with open(self._path, "rb", buffering=0) as file:
            ended = False
            while not ended:
                with self._changed:
                    # A block at a time: waking up for each small write would cost more than hashing it.
                    self._changed.wait_for(lambda: self._ended or self._size >= hasher.size + _BLOCK_BYTES)
                    ended = self._ended
                # Outside the lock, so that the writer never waits for the hash.
                hasher.read(file)
        return hasher.digest()


def start_thread(work: Callable[[], T], *, name: str = "checkpoint") -> Future[T]:
    """Start the work in a new thread; the future has its result or error.

    A thread of a pool cannot start while the interpreter exits; this one can. It is not a daemon: the interpreter waits
    for what is being written.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        # BaseException: a SystemExit in the thread would leave whoever waits for the future waiting forever.
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=name).start()
    return future


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock the checkpoint folder against other writers; raises TimeoutError after a minute."""
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(folder / ".lock", timeout=_WAIT_SECONDS))
        except Timeout:
            raise TimeoutError(f"another process has been saving into {folder} for a minute") from None
        yield


@contextmanager
def file_lock(path: Path, *, timeout: float = -1) -> Iterator[OSError | None]:
    """Lock the file `path` against other processes and threads, and remove it at the end.

    The system releases the lock when its process dies. On a file system without locks, nothing is locked and the block
    gets the error instead of `None`.

    Args:
        path: The lock file. Its folder must exist.
        timeout: Seconds to wait for the lock; -1 waits without limit.

    Raises:
        filelock.Timeout: Another process or thread still holds the lock.

    """
    if path.is_symlink():  # on which a lock cannot be had; it is not one of ours
        path.unlink(missing_ok=True)
    # `thread_local=False`: the thread that writes a checkpoint may release the lock that another one took.
    lock = FileLock(path, mode=0o600, poll_interval=_POLL_SECONDS, thread_local=False)
    try:
        lock.acquire(timeout)
    except Timeout:
        raise
    except OSError as error:
        # The file system has locks: without one, two writers could meet.
        if error.errno in _NO_DESCRIPTORS:
            raise
        with suppress(OSError):
            path.unlink()  # the empty file that the attempt has made
        yield error
        return
    try:
        yield None
    finally:
        with suppress(OSError):  # before the release, so that a process that waits sees an unlinked file and retries
            path.unlink()
        lock.release()


class _Hasher:
    """The size and hash of what has been read."""

    def __init__(self, algorithm: str) -> None:
        self.size = 0
        self._algorithm = algorithm
        self._hash = _new_hash(algorithm)
        self._block = memoryview(bytearray(_BLOCK_BYTES))

    def read(self, file: FileIO) -> None:
        """Add the rest of the file."""
        while count := file.readinto(self._block):
            self._hash.update(self._block[:count])
            self.size += count

    def digest(self) -> FileDigest:
        """Return the size and the hash."""
        return FileDigest(self.size, f"{self._algorithm}:{self._hash.hexdigest()}")


@cache
def _warn_once(path: Path, why: str) -> None:
    logger.warning("%s cannot be written (%s); training goes on without it.", path, why)


def _new_hash(algorithm: str) -> Any:
    if algorithm == "blake2b":
        return hashlib.blake2b(digest_size=32)  # as long as SHA-256's
    # Python on a FIPS system refuses some hashes for security, which these are not for.
    return hashlib.new(algorithm, usedforsecurity=False)


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        # A nearly full disk or a signal may make a write take a part of the bytes.
        view = view[os.write(descriptor, view) :]
