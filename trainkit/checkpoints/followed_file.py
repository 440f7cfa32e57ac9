"""A file that is hashed while it is still being written."""

from __future__ import annotations

from collections.abc import Callable
from io import RawIOBase
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Generic, TypeVar

from trainkit.checkpoints.digest import BLOCK_BYTES, Written, new_hash
from trainkit.checkpoints.disk import sync, write_all

if TYPE_CHECKING:
    from typing_extensions import Buffer

Result = TypeVar("Result")

_SLICE_BYTES = 4 << 20  # of a large tensor: the hashing thread starts before all of it is written


class FollowedFile(RawIOBase):
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

    def hash(self, path: Path, algorithm: str) -> Written:
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
        return Written(size, f"{algorithm}:{hasher.hexdigest()}")

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


class Background(Thread, Generic[Result]):
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
