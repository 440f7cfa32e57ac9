"""A folder of checkpoints that a kill at any instant leaves readable, and the ways to choose one of them.

    checkpoints/
        manifest.json           what is there: file, size, hash, step, epoch, metrics; replaced at one instant
        step_100.pt             the payload, as torch.save writes it, with what the manifest says of it inside
        step_200.pt
        step_200.shards/        the tensors of step_200.pt, where several ranks have written them
        .step_300.pt.part       a save that is going on, or was killed: swept by the next save
        .step_100.pt.unlisted   says that step_100.pt goes when the manifest does not list it

A file is written under its temporary name, brought to the disk and renamed before the manifest lists it, and is taken
from the manifest before it is removed. So the manifest never lists a file that is not whole, and a file that it does
not list is never chosen. A manifest that is lost or damaged is made anew from the files whose own checksums
(CRC-32) are right; reading never writes, so it lasts when the next save lists them.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from trainkit.checkpoint.entry import (
    CHECKPOINTS,
    HEADER,
    MANIFEST,
    NAMES_SHOWN,
    SUFFIX,
    UNLISTED,
    CheckpointEntry,
    CheckpointError,
    DamagedCheckpoint,
    Monitor,
    ShardFile,
    checkpoints_folder,
    existing,
    first_names,
    marker_of,
    no_checkpoint_in,
    shards_of,
)
from trainkit.checkpoint.files import PART, FileDigest, move, only_writer, part_of, sync_folder, write_payload
from trainkit.checkpoint.manifest import Manifest, parse_manifest, read_manifest, write_manifest
from trainkit.checkpoint.serialization import (
    check_digest,
    check_shards,
    opened,
    payload_bytes,
    read_checkpoint,
    with_metadata,
)
from trainkit.errors import UserError, nearest


def ranked(
    entries: Sequence[CheckpointEntry], metric: str, mode: Literal["min", "max"], *, folder: Path
) -> list[CheckpointEntry]:
    """Return the entries that have a value of the metric, best first and the later of equals; NaN is no value."""
    if mode not in ("min", "max"):
        raise UserError(f"mode is 'min' or 'max', got {mode!r}.{nearest(str(mode), ('min', 'max'))}")
    known = sorted({key for entry in entries for key in entry.metrics})
    if known and metric not in known:
        raise CheckpointError(
            f"No checkpoint in {folder} has the metric '{metric}'.{nearest(metric, known)} "
            f"There are: {', '.join(known)}."
        )
    sign = 1.0 if mode == "min" else -1.0
    latest_first = [entry for entry in entries[::-1] if not math.isnan(entry.metrics.get(metric, math.nan))]
    return sorted(latest_first, key=lambda entry: sign * entry.metrics[metric])


@contextmanager
def disk_error_message(folder: Path, name: str, *, needed: int) -> Iterator[None]:
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


# The whole interface, with the names that its signatures need.
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

logger = logging.getLogger(__name__)


class SkippedCheckpoint(NamedTuple):
    """A checkpoint that was passed over, and why."""

    entry: CheckpointEntry
    reason: str


class LoadedCheckpoint(NamedTuple):
    """A checkpoint's payload, its entry, and the damaged ones that would have come first."""

    payload: dict[str, Any]
    entry: CheckpointEntry
    skipped: list[SkippedCheckpoint]


class CheckpointStore:
    """The checkpoints in one folder. Any number of processes may read it; writers wait for each other."""

    def __init__(self, folder: Path | str, *, monitor: Monitor | None = None) -> None:
        self.folder = Path(folder)
        self._monitor = monitor

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
        """Have the payload on the disk and listed; an earlier checkpoint of the same name is then removed.

        Raises UserError for a payload that could not be read back, and CheckpointError when the disk does not take it;
        everything saved earlier is intact then.
        """
        content = with_metadata(payload, name=name, step=step, epoch=epoch, metrics=metrics, reason=reason)
        with disk_error_message(self.folder, name, needed=payload_bytes(content)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with only_writer(self.folder):
                return self._save(content)

    @contextmanager
    def receiving_shards(self, name: str) -> Iterator[Path]:
        """Give a folder for the shards of one checkpoint, held against other writers; what is not listed is removed."""
        with disk_error_message(self.folder, name, needed=0):
            self.folder.mkdir(parents=True, exist_ok=True)
            with only_writer(self.folder):
                listed = read_manifest(self.folder).entries
                sweep(self.folder, listed)
                folder = part_of(shards_of(free_path(self.folder, name)))
                folder.mkdir()
                try:
                    yield folder
                except BaseException:
                    sweep_after_failure(self.folder, listed)
                    raise

    def list_shards(
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
        """Have the payload listed with the shards in a folder of `receiving_shards`, inside that context."""
        content = with_metadata(payload, name=name, step=step, epoch=epoch, metrics=metrics, reason=reason)
        content[HEADER]["shards"] = [shard._asdict() for shard in shards]
        with disk_error_message(self.folder, name, needed=payload_bytes(content)):
            return self._save(content, shards=folder)

    def load(self, entry_or_path: CheckpointEntry | Path | str, *, map_location: Any = "cpu") -> dict[str, Any]:
        """Return the payload of an undamaged checkpoint, as it was given to `save`; nothing in it can run code.

        Raises DamagedCheckpoint when the file is not what was written, CheckpointError when this version of trainkit
        cannot read it. A file that no manifest lists is checked by the checksums inside it.
        """
        if isinstance(entry_or_path, CheckpointEntry):
            content = read_checkpoint(entry_or_path.path, entry_or_path, map_location=map_location)
        else:
            path = Path(entry_or_path)
            content = read_checkpoint(path, _listed(path), map_location=map_location)
        del content[HEADER]
        return content

    def load_last(self, fallback: bool = True, *, map_location: Any = "cpu") -> LoadedCheckpoint:
        """Return the last checkpoint, or the latest before it that is not damaged, with those that were skipped."""
        return self._load_first(self.entries()[::-1], fallback=fallback, map_location=map_location)

    def load_best(
        self, monitor: Monitor | None = None, *, fallback: bool = True, map_location: Any = "cpu"
    ) -> LoadedCheckpoint:
        """Return the best checkpoint that is not damaged, with the better ones that were skipped."""
        return self._load_first(self.best_first(monitor), fallback=fallback, map_location=map_location)

    def entries(self) -> list[CheckpointEntry]:
        """Return what is saved, in the order of saving."""
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
        """Return the checkpoints that have a value of the metric, best first; NaN is no value."""
        return ranked(self.entries(), metric, mode, folder=self.folder)

    def best_first(self, monitor: Monitor | None = None) -> list[CheckpointEntry]:
        """Return the checkpoints by the given monitor, or the store's, or the run's; raise UserError without values."""
        monitor = monitor or self.monitor()
        best_first = self.ranked(*monitor)
        if not best_first:
            raise CheckpointError(
                f"No checkpoint in {self.folder} has a value of '{monitor.metric}' yet. Choose 'last'."
            )
        return best_first

    def monitor(self) -> Monitor:
        """Return what makes a checkpoint the best: as given here, or by the run that saved them."""
        monitor = self._monitor or read_manifest(self.folder).monitor
        if monitor is None:
            raise CheckpointError(
                f"The run of {self.folder} named no metric that makes a checkpoint the best. Choose 'last', or one by "
                f"its name: {', '.join(entry.name for entry in self.entries()[-NAMES_SHOWN:])}."
            )
        return monitor

    def verify(self, entry: CheckpointEntry) -> None:
        """Raise DamagedCheckpoint unless the file has the size and hash that the manifest gives."""
        with opened(entry.path) as file:
            check_digest(file, entry.path, FileDigest(entry.size, entry.digest))
        check_shards(entry.path, entry.shards)

    def delete(self, entry: CheckpointEntry) -> None:
        """Take the checkpoint from the manifest, then remove its file."""
        self._keep(lambda entries: [kept for kept in entries if kept.path.name != entry.path.name])

    def prune(self, keep: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
        """Remove all checkpoints but those to keep, once the latest of these is verified; return the removed ones.

        Raises DamagedCheckpoint, with nothing removed, when the latest one to keep is damaged.
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

    def _load_first(self, entries: list[CheckpointEntry], *, fallback: bool, map_location: Any) -> LoadedCheckpoint:
        skipped: list[SkippedCheckpoint] = []
        for entry in entries:
            try:
                payload = self.load(entry, map_location=map_location)
            except DamagedCheckpoint as error:
                if not fallback:
                    raise
                skipped.append(SkippedCheckpoint(entry, str(error)))
                logger.warning("%s An earlier checkpoint is looked for.", error)
                continue
            if skipped:
                logger.warning("Continuing from %s (step %d).", entry.path, entry.step)
            return LoadedCheckpoint(payload, entry, skipped)
        raise self._nothing_to_load(skipped)

    def _save(self, content: dict[str, Any], *, shards: Path | None = None) -> CheckpointEntry:
        """Write, rename, list; the order of these is what a kill in between relies on."""
        manifest = read_manifest(self.folder)
        if shards is None:
            sweep(self.folder, manifest.entries)
        path = free_path(self.folder, content[HEADER]["name"])
        try:
            written = write_payload(part_of(path), content)
            marker_of(path).touch()
            if shards is not None:
                sync_folder(shards)
                move(shards, shards_of(path))
            move(part_of(path), path)
            entry = _entry_of(path, content[HEADER], written)
            kept = [earlier for earlier in manifest.entries if earlier.name != entry.name]
            if len(kept) < len(manifest.entries):
                self.verify(entry)
            self._list([*kept, entry], instead_of=manifest)
        except BaseException:
            sweep_after_failure(self.folder, manifest.entries)
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
        replace_manifest(self.folder, Manifest(entries, self._monitor or instead_of.monitor), instead_of=instead_of)

    def _nothing_to_load(self, skipped: list[SkippedCheckpoint]) -> CheckpointError:
        if skipped:
            reasons = " ".join(reason for _, reason in skipped[:NAMES_SHOWN])
            return DamagedCheckpoint(f"None of the {len(skipped)} checkpoints in {self.folder} can be used. {reasons}")
        return no_checkpoint_in(self.folder)


def load_from(
    path: Path | str, which: str = "last", *, monitor: Monitor | None = None, map_location: Any = "cpu"
) -> LoadedCheckpoint:
    """Return the checkpoint that a run folder, a checkpoints folder or a file leads to, or the next best undamaged one.

    `which` is "last", "best" or a checkpoint's name; only for the first two another one can take its place.
    """
    store = CheckpointStore(checkpoints_folder(Path(path)), monitor=monitor)
    if not Path(path).is_file():
        if which == "last":
            return store.load_last(map_location=map_location)
        if which == "best":
            return store.load_best(map_location=map_location)
    chosen = resolve(path, which, monitor=monitor)
    content = read_checkpoint(chosen, _listed(chosen), map_location=map_location)
    header = content.pop(HEADER)
    return LoadedCheckpoint(
        content, _listed(chosen) or _entry_of(chosen, header, FileDigest(chosen.stat().st_size, "")), []
    )


def resolve(path: Path | str, which: str = "last", *, monitor: Monitor | None = None) -> Path:
    """Return the checkpoint file that a run folder, a checkpoints folder or a checkpoint file leads to.

    `which` is "last", "best" or a checkpoint's name, and says nothing beside a file.
    """
    path = Path(path)
    if path.is_file() and path.name != MANIFEST:
        return path
    store = CheckpointStore(checkpoints_folder(path), monitor=monitor)
    entries = store.entries()
    if not entries:
        raise no_checkpoint_in(store.folder)
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


def _entry_of(path: Path, header: dict[str, Any], written: FileDigest) -> CheckpointEntry:
    return CheckpointEntry.of(path, {**header, "size": written.size, "digest": written.digest})


def _listed(path: Path) -> CheckpointEntry | None:
    """Return the entry of a file in the manifest beside it; None where none lists it."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        for entry in parse_manifest(path.parent).entries:
            if entry.path.name == path.name:
                return entry
    return None
