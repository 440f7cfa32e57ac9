"""The one order in which files and the manifest change, so that a kill in between leaves the folder readable.

write the file under a temporary name    mark it    rename it    list it    remove the mark
mark the files to be removed    list the others    remove the files, then the marks
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from trainkit.checkpoints.entry import SUFFIX, UNLISTED, CheckpointEntry, marker_of, shards_of
from trainkit.checkpoints.file import PART
from trainkit.checkpoints.manifest import Manifest, parse_manifest, write_manifest


def replace_manifest(folder: Path, manifest: Manifest, *, instead_of: Manifest) -> None:
    """Let the folder list other entries, and remove the files that it does not list any more."""
    try:
        for entry in instead_of.entries:
            if entry not in manifest.entries:
                marker_of(entry.path).touch()
        write_manifest(folder, manifest)
    except BaseException:
        sweep_after_failure(folder, instead_of.entries)
        raise
    sweep(folder, manifest.entries)


def sweep(folder: Path, listed: list[CheckpointEntry]) -> None:
    """Remove what is not listed: unfinished files, and marked ones; a kill leaves both to the next save."""
    names = {entry.path.name for entry in listed}
    for part in folder.glob(f".*{PART}"):
        _remove(part)
    for marker in folder.glob(f".*{UNLISTED}"):
        name = marker.name[1 : -len(UNLISTED)]
        if name not in names:
            _remove(folder / name)
            _remove(shards_of(folder / name))
        marker.unlink(missing_ok=True)


def sweep_after_failure(folder: Path, listed: list[CheckpointEntry]) -> None:
    """Remove what a failed save has left, by what the manifest says now: it may have been replaced before that."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        listed = parse_manifest(folder).entries
    with suppress(OSError):
        sweep(folder, listed)


def free_path(folder: Path, name: str) -> Path:
    """Return a file name no file has: an earlier checkpoint of this name must outlive a kill during the save."""
    path, number = folder / f"{name}{SUFFIX}", 1
    while path.exists() or shards_of(path).exists():
        number += 1
        path = folder / f"{name}-{number}{SUFFIX}"
    return path


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
