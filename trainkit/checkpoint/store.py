"""CheckpointStore: a folder of checkpoints that a kill at any instant leaves readable.

    checkpoints/
        manifest.json           for each checkpoint: file, size, hash, step, epoch, metrics; replaced atomically
        step_100.pt             the payload and its metadata, written by torch.save
        step_200.pt
        step_200.shards/        the tensors of step_200.pt, if several ranks have written them
        .step_300.pt.part       a save in progress, or one that was killed: removed by the next save
        .step_100.pt.unlisted   marks step_100.pt for removal unless the manifest lists it

A file is written under its temporary name, flushed to the disk and renamed before the manifest lists it, and is taken
from the manifest before it is removed. So the manifest never lists a file that is incomplete, and a file that it does
not list is never chosen. A manifest that is lost or damaged is rebuilt from the files whose own checksums (CRC-32) are
right; reading never writes, so the rebuilt manifest is written by the next save.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from trainkit.checkpoint.files import (
    PART,
    FileDigest,
    fastest_algorithm,
    file_digest,
    move,
    only_writer,
    part_of,
    sync_folder,
    write_payload,
)
from trainkit.checkpoint.manifest import (
    HEADER,
    MANIFEST,
    NAMES_SHOWN,
    SUFFIX,
    UNLISTED,
    CheckpointEntry,
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    Monitor,
    ShardFile,
    first_names,
    parse_manifest,
    shards_folder,
    unlisted_marker,
    write_manifest,
)
from trainkit.checkpoint.serialization import (
    check_digest,
    check_shards,
    open_file,
    payload_bytes,
    read_checkpoint,
    with_metadata,
)
from trainkit.errors import UserError, nearest

# The interface, with the names that its signatures need.
__all__ = [
    "CHECKPOINTS",
    "CheckpointEntry",
    "CheckpointError",
    "CheckpointStore",
    "DamagedCheckpoint",
    "LoadedCheckpoint",
    "Monitor",
    "SkippedCheckpoint",
    "load_from",
    "resolve",
]

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""

logger = logging.getLogger(__name__)


class SkippedCheckpoint(NamedTuple):
    """A checkpoint that could not be loaded, and the reason."""

    entry: CheckpointEntry
    reason: str


class LoadedCheckpoint(NamedTuple):
    """A checkpoint's payload, its entry, and the damaged checkpoints that would have come first."""

    payload: dict[str, Any]
    entry: CheckpointEntry
    skipped: list[SkippedCheckpoint]


class CheckpointStore:
    """The checkpoints in one folder. Any number of processes may read it; writers wait for each other.

    Args:
        folder: The folder, made by the first save.
        monitor: The metric by which the best checkpoint is chosen; by default the one in the manifest.

    """

    def __init__(self, folder: Path | str, *, monitor: Monitor | None = None) -> None:
        self.folder = Path(folder)
        self._monitor = monitor

    # ---- Saving

    def save(
        self,
        payload: dict[str, Any],
        *,
        name: str,
        step: int,
        epoch: int,
        metrics: Mapping[str, float] = MappingProxyType({}),
        reason: str = "interval",
    ) -> CheckpointEntry:
        """Write the payload to the disk and list it; an earlier checkpoint of the same name is then removed.

        Raises UserError for a payload that could not be read back, and CheckpointError if the disk refuses it; earlier
        checkpoints are intact then.
        """
        content = with_metadata(payload, name=name, step=step, epoch=epoch, metrics=metrics, reason=reason)
        with disk_error_message(self.folder, name, needed=payload_bytes(content)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with only_writer(self.folder):
                return self._save(content)

    @contextmanager
    def shard_folder(self, name: str) -> Iterator[Path]:
        """Make a folder for the shards of one checkpoint and lock the store; at the end unlisted files are removed."""
        with disk_error_message(self.folder, name, needed=0):
            self.folder.mkdir(parents=True, exist_ok=True)
            with only_writer(self.folder):
                listed = self.entries()
                _sweep(self.folder, listed)
                folder = part_of(shards_folder(_free_path(self.folder, name)))
                folder.mkdir()
                try:
                    yield folder
                except BaseException:
                    _sweep_after_failure(self.folder, listed)
                    raise

    def register_shards(
        self,
        payload: dict[str, Any],
        folder: Path,
        shards: Iterable[ShardFile],
        *,
        name: str,
        step: int,
        epoch: int,
        metrics: Mapping[str, float] = MappingProxyType({}),
        reason: str = "interval",
    ) -> CheckpointEntry:
        """Write the payload and list it with the shards in the folder of `shard_folder`, inside that context."""
        content = with_metadata(payload, name=name, step=step, epoch=epoch, metrics=metrics, reason=reason)
        content[HEADER]["shards"] = [shard._asdict() for shard in shards]
        with disk_error_message(self.folder, name, needed=payload_bytes(content)):
            return self._save(content, shards=folder)

    def delete(self, entry: CheckpointEntry) -> None:
        """Take the checkpoint from the manifest, then remove its file."""
        self._keep(lambda entries: [kept for kept in entries if kept.path.name != entry.path.name])

    def prune(self, keep: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
        """Remove all checkpoints except those to keep, once the latest of these is verified; return the removed ones.

        Raises DamagedCheckpoint, with nothing removed, if the latest one to keep is damaged.
        """
        names = {entry.path.name for entry in keep}

        def verified(entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
            kept = [entry for entry in entries if entry.path.name in names]
            if not kept:
                raise ValueError(
                    f"prune must keep at least one of the checkpoints in {self.folder}, got {sorted(names)}"
                )
            if len(kept) < len(entries):
                self.verify(kept[-1])
            return kept

        return self._keep(verified)

    # ---- Choosing

    def entries(self) -> list[CheckpointEntry]:
        """Return the checkpoints in the order of saving."""
        return read_manifest(self.folder).entries

    def last(self) -> CheckpointEntry | None:
        """Return the checkpoint saved last, if there is one."""
        entries = self.entries()
        return entries[-1] if entries else None

    def best(self, metric: str, mode: Literal["min", "max"]) -> CheckpointEntry | None:
        """Return the checkpoint with the best value, the later of equals; None while no checkpoint has metrics."""
        best_first = self.ranked(metric, mode)
        return best_first[0] if best_first else None

    def ranked(self, metric: str, mode: Literal["min", "max"]) -> list[CheckpointEntry]:
        """Return the checkpoints that have a value of the metric, best first, the later of equals first.

        A checkpoint whose value is NaN has none. Raises UserError for an unknown metric or mode.
        """
        if mode not in ("min", "max"):
            raise UserError(f"mode is 'min' or 'max', got {mode!r}.{nearest(str(mode), ('min', 'max'))}")
        entries = self.entries()
        known = sorted({key for entry in entries for key in entry.metrics})
        if known and metric not in known:
            raise CheckpointError(
                f"No checkpoint in {self.folder} has the metric '{metric}'.{nearest(metric, known)} "
                f"There are: {', '.join(known)}."
            )
        sign = 1.0 if mode == "min" else -1.0
        latest_first = [entry for entry in reversed(entries) if not math.isnan(entry.metrics.get(metric, math.nan))]
        return sorted(latest_first, key=lambda entry: sign * entry.metrics[metric])

    def best_first(self) -> list[CheckpointEntry]:
        """Return the checkpoints ranked by `monitor()`; raises CheckpointError if none has a value of it."""
        monitor = self.monitor()
        best_first = self.ranked(*monitor)
        if not best_first:
            raise CheckpointError(
                f"No checkpoint in {self.folder} has a value of '{monitor.metric}' yet. Choose 'last'."
            )
        return best_first

    def monitor(self) -> Monitor:
        """Return the metric by which the best checkpoint is chosen; raises CheckpointError if there is none."""
        monitor = self._monitor or read_manifest(self.folder).monitor
        if monitor is None:
            raise CheckpointError(
                f"The run of {self.folder} named no metric that makes a checkpoint the best. Choose 'last', or one by "
                f"its name: {', '.join(entry.name for entry in self.entries()[-NAMES_SHOWN:])}."
            )
        return monitor

    # ---- Loading

    def load(self, entry_or_path: CheckpointEntry | Path | str) -> dict[str, Any]:
        """Return the payload of an undamaged checkpoint, on the CPU; nothing in it can run code.

        Raises DamagedCheckpoint if the file is not what was written, CheckpointError if this version of trainkit cannot
        read it. A file that no manifest lists is verified by the checksums inside it.
        """
        if isinstance(entry_or_path, CheckpointEntry):
            content = read_checkpoint(entry_or_path.path, entry_or_path)
        else:
            path = Path(entry_or_path)
            content = read_checkpoint(path, _listed(path))
        del content[HEADER]
        return content

    def load_last(self, fallback: bool = True) -> LoadedCheckpoint:
        """Return the last checkpoint, or the latest before it that is undamaged, with those that were skipped."""
        return self._load_first(self.entries()[::-1], fallback=fallback)

    def load_best(self, fallback: bool = True) -> LoadedCheckpoint:
        """Return the best checkpoint that is undamaged, with the better ones that were skipped."""
        return self._load_first(self.best_first(), fallback=fallback)

    def verify(self, entry: CheckpointEntry) -> None:
        """Raise DamagedCheckpoint unless the file has the size and hash that the manifest gives."""
        with open_file(entry.path) as file:
            check_digest(file, entry.path, FileDigest(entry.size, entry.digest))
        check_shards(entry.path, entry.shards)

    # ---- How

    def _load_first(self, entries: list[CheckpointEntry], *, fallback: bool) -> LoadedCheckpoint:
        skipped: list[SkippedCheckpoint] = []
        for entry in entries:
            try:
                payload = self.load(entry)
            except DamagedCheckpoint as error:
                if not fallback:
                    raise
                skipped.append(SkippedCheckpoint(entry, str(error)))
                logger.warning("%s Falling back to an earlier checkpoint.", error)
                continue
            if skipped:
                logger.warning("Continuing from %s (step %d).", entry.path, entry.step)
            return LoadedCheckpoint(payload, entry, skipped)
        if skipped:
            reasons = " ".join(reason for _, reason in skipped[:NAMES_SHOWN])
            raise DamagedCheckpoint(f"None of the {len(skipped)} checkpoints in {self.folder} can be used. {reasons}")
        raise _no_checkpoint_in(self.folder)

    def _save(self, content: dict[str, Any], *, shards: Path | None = None) -> CheckpointEntry:
        """Write, rename, list: a kill in between relies on this order."""
        manifest = read_manifest(self.folder)
        if shards is None:
            _sweep(self.folder, manifest.entries)
        path = _free_path(self.folder, content[HEADER]["name"])
        try:
            written = write_payload(part_of(path), content)
            unlisted_marker(path).touch()
            if shards is not None:
                sync_folder(shards)
                move(shards, shards_folder(path))
            move(part_of(path), path)
            entry = CheckpointEntry.of(path, content[HEADER], **written._asdict())
            kept = [earlier for earlier in manifest.entries if earlier.name != entry.name]
            if len(kept) < len(manifest.entries):
                self.verify(entry)
            self._list([*kept, entry], instead_of=manifest)
        except BaseException:
            _sweep_after_failure(self.folder, manifest.entries)
            raise
        return entry

    def _keep(self, choose: Callable[[list[CheckpointEntry]], list[CheckpointEntry]]) -> list[CheckpointEntry]:
        """Reduce the manifest to the chosen entries, then remove the files of the others; return the others."""
        try:
            with only_writer(self.folder):
                manifest = read_manifest(self.folder)
                kept = choose(manifest.entries)
                removed = [entry for entry in manifest.entries if entry not in kept]
                if removed:
                    self._list(kept, instead_of=manifest)
                return removed
        except OSError as error:
            raise CheckpointError(
                f"The checkpoints in {self.folder} cannot be changed: {error.strerror or error}. "
                f"All of them are still usable."
            ) from error

    def _list(self, entries: list[CheckpointEntry], *, instead_of: Manifest) -> None:
        """Replace the manifest, and remove the files that it does not list any more."""
        try:
            for entry in instead_of.entries:
                if entry not in entries:
                    unlisted_marker(entry.path).touch()
            write_manifest(self.folder, Manifest(entries, self._monitor or instead_of.monitor))
        except BaseException:
            _sweep_after_failure(self.folder, instead_of.entries)
            raise
        _sweep(self.folder, entries)


def load_from(path: Path | str, which: str = "last", *, monitor: Monitor | None = None) -> LoadedCheckpoint:
    """Return the chosen checkpoint of a run folder, a checkpoints folder or a file.

    `which` is "last", "best" or a checkpoint's name; the first two fall back to the next undamaged checkpoint.
    """
    store = CheckpointStore(checkpoints_folder(Path(path)), monitor=monitor)
    if not Path(path).is_file():
        if which == "last":
            return store.load_last()
        if which == "best":
            return store.load_best()
    chosen = resolve(path, which, monitor=monitor)
    entry = _listed(chosen)
    content = read_checkpoint(chosen, entry)
    header = content.pop(HEADER)
    entry = entry or CheckpointEntry.of(chosen, header, size=chosen.stat().st_size, digest="")
    return LoadedCheckpoint(content, entry, [])


def resolve(path: Path | str, which: str = "last", *, monitor: Monitor | None = None) -> Path:
    """Return the checkpoint file of a run folder, a checkpoints folder or a checkpoint file.

    `which` is "last", "best" or a checkpoint's name, and is ignored for a file.
    """
    path = Path(path)
    if path.is_file() and path.name != MANIFEST:
        return path
    store = CheckpointStore(checkpoints_folder(path), monitor=monitor)
    entries = store.entries()
    if not entries:
        raise _no_checkpoint_in(store.folder)
    if which == "last":
        return entries[-1].path
    if which == "best":
        return store.best_first()[0].path
    named = [entry.path for entry in entries if entry.name == which]
    if not named:
        names = ["last", "best", *(entry.name for entry in entries)]
        raise CheckpointError(
            f"{store.folder} has no checkpoint '{which}'.{nearest(which, names)} Choose one of: {first_names(names)}."
        )
    return named[0]


def checkpoints_folder(path: Path) -> Path:
    """Return the checkpoints folder of a run folder, of a file in it, or the folder itself; raises CheckpointError."""
    if path.is_file():
        return path.parent
    if not path.is_dir():
        raise _not_found(path)
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    if (path / MANIFEST).exists() or any(path.glob(f"*{SUFFIX}")):
        return path
    runs = sorted(manifest.parent.parent.name for manifest in path.glob(f"*/{CHECKPOINTS}/{MANIFEST}"))
    if runs:
        raise CheckpointError(
            f"{path} holds {len(runs)} runs, not one. The latest is {path / runs[-1]}. All: {first_names(runs[::-1])}."
        )
    raise _no_checkpoint_in(path)


def read_manifest(folder: Path) -> Manifest:
    """Return the folder's manifest; one that is lost or damaged is rebuilt from the undamaged files, in memory."""
    try:
        return parse_manifest(folder)
    except FileNotFoundError:
        reason = "is missing"
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        reason = "is damaged"
    entries = _entries_of_files(folder)
    if entries or reason == "is damaged":
        logger.warning(
            "%s %s; using the %d undamaged checkpoints in the folder", folder / MANIFEST, reason, len(entries)
        )
    return Manifest(entries, None)


@contextmanager
def disk_error_message(folder: Path, name: str, *, needed: int) -> Iterator[None]:
    """Replace a disk error by a CheckpointError that names checkpoint `name` and the bytes it needs."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(_existing(folder)).free
        raise CheckpointError(
            f"Checkpoint '{name}' could not be saved in {folder}: {error.strerror or error}. It needs about "
            f"{needed:,} bytes, {free:,} are free there. Make room or let the run write elsewhere: "
            f"run_dir=/path/with/room. The checkpoints saved earlier are intact."
        ) from error


def _entries_of_files(folder: Path) -> list[CheckpointEntry]:
    """Return the entries of undamaged files, from their own headers."""
    entries = []
    for path in folder.glob(f"*{SUFFIX}"):
        if unlisted_marker(path).exists():
            continue
        try:
            header = read_checkpoint(path, None)[HEADER]
            with open_file(path) as file:
                digest = file_digest(file, fastest_algorithm())
        except CheckpointError as error:
            logger.warning("skipped: %s", error)
        else:
            entries.append(CheckpointEntry.of(path, header, **digest._asdict()))
    return sorted(entries, key=lambda entry: (entry.saved_at, entry.path))


def _listed(path: Path) -> CheckpointEntry | None:
    """Return the entry of a file in the manifest beside it, if it has one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return next((entry for entry in parse_manifest(path.parent).entries if entry.path.name == path.name), None)
    return None


def _sweep(folder: Path, listed: list[CheckpointEntry]) -> None:
    """Remove what a kill may have left: unfinished files, and marked ones that are not listed."""
    names = {entry.path.name for entry in listed}
    for part in folder.glob(f".*{PART}"):
        _remove(part)
    for marker in folder.glob(f".*{UNLISTED}"):
        name = marker.name[1 : -len(UNLISTED)]
        if name not in names:
            _remove(folder / name)
            _remove(shards_folder(folder / name))
        marker.unlink(missing_ok=True)


def _sweep_after_failure(folder: Path, listed: list[CheckpointEntry]) -> None:
    """Remove what a failed save has left, according to the manifest, which may have been replaced before the error."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        listed = parse_manifest(folder).entries
    with suppress(OSError):
        _sweep(folder, listed)


def _free_path(folder: Path, name: str) -> Path:
    """Return an unused file name: an earlier checkpoint of this name must outlive a kill during the save."""
    path, number = folder / f"{name}{SUFFIX}", 1
    while path.exists() or shards_folder(path).exists():
        number += 1
        path = folder / f"{name}-{number}{SUFFIX}"
    return path


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _not_found(path: Path) -> CheckpointError:
    parent = _existing(path.parent)
    names = sorted(child.name for child in parent.iterdir() if child.name[0] != ".") if parent.is_dir() else []
    # The first part that is missing is the one to correct.
    wrong = path.absolute().relative_to(parent.absolute()).parts[0]
    named = "This folder" if parent == Path() else str(parent)
    there = f"{named} holds: {first_names(names)}." if names else f"{named} is empty."
    return CheckpointError(f"There is no run or checkpoint at {path}.{nearest(wrong, names)} {there}")


def _no_checkpoint_in(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    there = f" These files are not in its {MANIFEST}: {first_names(names)}; name a file to load it." if names else ""
    return CheckpointError(f"There is no complete checkpoint in {folder}.{there}")


def _existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(parent for parent in [path, *path.absolute().parents] if parent.exists())
