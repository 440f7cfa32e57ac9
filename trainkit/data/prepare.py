"""A folder that is made once, although several processes ask for it: the ranks of a run, or runs side by side."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from trainkit.checkpoint.files import file_lock


def prepare_folder(folder: Path, *, make: Callable[[Path], None]) -> None:
    """Make `folder` unless it exists; an existing folder is never changed.

    Processes that ask at the same time wait for the first of them. Where the file system has no locks, each makes its
    own folder and the first complete one is kept.

    Args:
        folder: The folder to make.
        make: Fills the empty folder that it is given, which is renamed to `folder` when it is complete.

    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.with_name(f".{folder.name}.lock")):
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
