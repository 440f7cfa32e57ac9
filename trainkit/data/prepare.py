"""prepare_folder: a data folder that is made once, by one of the ranks of a run or one of several runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from trainkit.files import file_lock


def prepare_folder(folder: Path, *, make: Callable[[Path], None]) -> None:
    """Create `folder` unless it exists; an existing folder is never changed.

    Other processes wait for the first one. On a file system without locks each process makes a folder and the first
    complete one is kept.

    Args:
        folder: The folder to create.
        make: Fills the empty folder that it is given, which is then renamed to `folder`.

    """
    # Without the lock: an existing folder is complete, since it got its name at the end.
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.with_name(f".{folder.name}.lock")):
        # Again under the lock: another process may have made it while this one waited.
        if folder.exists():
            return
        # A random name: on a file system without locks several processes are here at once.
        part = folder.with_name(f"{folder.name}.part_{uuid4().hex[:8]}")
        part.mkdir()
        try:
            make(part)
            try:
                part.rename(folder)
            except OSError:  # a folder that is not empty is never replaced
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
