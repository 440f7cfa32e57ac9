"""What is said when the disk does not take a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.checkpoints.entry import CheckpointError
from trainkit.checkpoints.location import existing


@contextmanager
def told_in_words(folder: Path, name: str, *, needed: int) -> Iterator[None]:
    """Raise CheckpointError in place of an error of the disk, with what checkpoint `name` needs, in bytes."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(existing(folder)).free
        raise CheckpointError(
            f"Checkpoint '{name}' could not be saved in {folder}: {error.strerror or error}. It needs about "
            f"{needed:,} bytes, {free:,} are free there. Make room or let the run write elsewhere: "
            f"run_dir=/path/with/room. The checkpoints saved earlier are intact."
        ) from error
