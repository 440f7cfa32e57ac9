"""Files that are either whole and on the disk, or not there at all."""

from __future__ import annotations

import os
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoints.digest import BLOCK_BYTES, Written, fastest_algorithm
from trainkit.checkpoints.disk import sync, sync_folder, write_all
from trainkit.checkpoints.followed_file import Background, FollowedFile

PART = ".part"


def part_of(path: Path) -> Path:
    """Return the temporary name, in the same folder, under which `path` is written."""
    return path.with_name(f".{path.name}{PART}")


def write_payload(part: Path, payload: dict[str, Any]) -> Written:
    """Leave the payload, as `torch.save` writes it, in `part` and on the disk; return its size and hash.

    Raises OSError, with what was written so far left in `part`.
    """
    with open(part, "wb", buffering=0) as raw:
        followed = FollowedFile(raw.fileno())
        hashed = Background(lambda: followed.hash(part, fastest_algorithm()))
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


def _save(payload: dict[str, Any], followed: FollowedFile) -> None:
    try:
        with BufferedWriter(followed, BLOCK_BYTES) as file:
            torch.save(payload, file)
    finally:
        followed.end()  # or the hashing thread would wait for ever
