"""Hashes by which it is known that a file is what was written."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from io import FileIO
from typing import Any, NamedTuple

ALGORITHMS = ("sha256", "blake2b")
BLOCK_BYTES = 1 << 20  # files are read and hashed by it


class Written(NamedTuple):
    """What a file holds: its size in bytes and the hash of its content, as "sha256:..." or "blake2b:..."."""

    size: int
    digest: str


def digest_of(file: FileIO, algorithm: str) -> Written:
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
    return Written(size, f"{algorithm}:{hasher.hexdigest()}")


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
