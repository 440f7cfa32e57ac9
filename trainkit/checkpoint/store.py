"""CheckpointStore: a folder of checkpoints that a kill at any instant leaves readable.

    checkpoints/
        manifest.json           for each checkpoint: file, size, hash, step, epoch, metrics; replaced atomically
        step_100.pt             the payload and its metadata, written by torch.save
        step_200.pt
        step_200.shards/        the tensors of step_200.pt, if several ranks have written them
        .step_300.pt.part       a save in progress, or one that was killed: removed by the next save
        .step_100.pt.unlisted   marks step_100.pt for removal unless the manifest lists it

A save is one change of the manifest under one lock, though it may remove other checkpoints too:

    1. write the file under its temporary name, fsync it
    2. rename it, fsync the folder
    3. read it back, if another checkpoint is to be removed
    4. write the manifest under its temporary name, fsync it
    5. rename it, fsync the folder
    6. remove the files that it does not list

A file is complete and on the disk under its name before the manifest lists it, and is taken from the manifest before
it is removed. So the manifest never lists a file that is incomplete, and a file that it does not list is never chosen.
A manifest that is lost or damaged is rebuilt from the files whose own checksums (CRC-32) are right; reading never
writes, so the rebuilt manifest is written by the next save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainkit.checkpoint.serialization import (
    DAMAGED_TEXT,
    FORMAT_VERSION,
    HEADER,
    NAME,
    NAMES_SHOWN,
    Labels,
    check_header,
    check_name,
    first_names,
    open_file,
    payload_bytes,
    read_checkpoint,
    shards_folder,
    too_new,
    verify_file,
    verify_shards,
    with_metadata,
)
from trainkit.distributed.collectives import Collectives, same_errors
from trainkit.errors import CheckpointError, DamagedCheckpoint, UserError, nearest
from trainkit.files import (
    PART,
    FileDigest,
    ShardFile,
    disk_error_text,
    existing_folder,
    fastest_algorithm,
    file_digest,
    move,
    only_writer,
    part_of,
    reason,
    sync_folder,
    write_payload,
    write_text,
)
from trainkit.storage import local_path

if TYPE_CHECKING:
    from typing_extensions import Unpack

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""
MANIFEST = "manifest.json"
"""The file in that folder that lists its checkpoints."""
# Far above any real one: a hostile file must not fill the memory.
_MOST_BYTES = 1 << 28  # of a manifest
_SUFFIX = ".pt"
_UNLISTED = ".unlisted"
_ALONE = Collectives()

logger = logging.getLogger(__name__)


class Monitor(NamedTuple):
    """The metric by which checkpoints are compared, and whether a small or a large value is good."""

    metric: str
    mode: Literal["min", "max"]


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint in the manifest."""

    path: Path
    name: str
    step: int
    epoch: int
    metrics: Mapping[str, float]
    reason: str
    saved_at: str  # UTC, ISO 8601
    size: int  # bytes
    digest: str  # "sha256:..." or "blake2b:...", in hexadecimal
    format_version: int
    number: int = 0  # in the order of saving, from 1 on; 0: an earlier version saved it
    shards: tuple[ShardFile, ...] = ()  # none: the file holds every tensor

    @staticmethod
    def of(path: Path, fields: Mapping[str, Any], **more: Any) -> CheckpointEntry:
        """Return the entry that a manifest's or a checkpoint's own fields describe, with `more` fields."""
        metrics = {key: float(value) for key, value in fields["metrics"].items()}
        shards = tuple(ShardFile(**shard) for shard in fields.get("shards", ()))
        values = {**fields, **more, "path": path, "metrics": metrics, "shards": shards}
        return CheckpointEntry(**{key: values[key] for key in CheckpointEntry.__dataclass_fields__ if key in values})


Keep = Callable[[list[CheckpointEntry]], Iterable[CheckpointEntry]]
"""Returns those to keep of the checkpoints of a store, in the order of saving; the new one is the last, and stays."""
OnSaved = Callable[[CheckpointEntry], object]
"""Called with the entry of a checkpoint once it is listed."""


@dataclass(frozen=True)
class Manifest:
    """The checkpoints of a folder in the order of saving, and the metric by which the best is chosen."""

    entries: list[CheckpointEntry]
    monitor: Monitor | None


class LoadedCheckpoint(NamedTuple):
    """A checkpoint's payload, its entry, and why each damaged checkpoint that would have come first was skipped."""

    payload: dict[str, Any]
    entry: CheckpointEntry
    skipped: list[str]


class CheckpointStore:
    """The checkpoints in one folder. Any number of processes may read it; writers wait for each other.

    Args:
        folder: The folder, made by the first save.
        monitor: The metric by which the best checkpoint is chosen; by default the one in the manifest.

    """

    def __init__(self, folder: Path | str, *, monitor: Monitor | None = None) -> None:
        self.folder = local_path(folder, what="the folder of checkpoints")
        self._monitor = monitor

    # ---- Saving

    def save(self, payload: dict[str, Any], *, keep: Keep | None = None, **labels: Unpack[Labels]) -> CheckpointEntry:
        """Write the payload to the disk, and list it instead of those that `keep` leaves out, which are then removed.

        An earlier checkpoint of the same name is removed in any case. Before any is, the new file is verified.

        Raises UserError for a payload that could not be read back, CheckpointError if the disk refuses it, and
        DamagedCheckpoint if the disk has not kept what was written; earlier checkpoints are intact then.
        """
        content = with_metadata(payload, labels)
        with self._locked(labels["name"], content):
            return self._save(content, keep=keep)

    @contextmanager
    def shard_folder(self, name: str) -> Iterator[Path]:
        """Make a folder for the shards of one checkpoint and lock the store; at the end unlisted files are removed."""
        check_name(name)  # before it is a folder's
        with self._locked(name, {}):
            listed = self.entries()
            _sweep(self.folder, listed)
            # Under a temporary name: a kill before the checkpoint is listed leaves what the next sweep removes.
            folder = part_of(shards_folder(_free_path(self.folder, name)))
            folder.mkdir()
            try:
                yield folder
            finally:
                _sweep_again(self.folder, listed)

    def register_shards(
        self,
        payload: dict[str, Any],
        folder: Path,
        shards: Iterable[ShardFile],
        *,
        keep: Keep | None = None,
        **labels: Unpack[Labels],
    ) -> CheckpointEntry:
        """Save the payload with the shards in the folder of `shard_folder`, inside that context."""
        content = with_metadata(payload, labels)
        content[HEADER]["shards"] = [shard._asdict() for shard in shards]
        with self._disk_error_message(labels["name"], content):
            return self._save(content, keep=keep, shards=folder)

    def delete(self, entry: CheckpointEntry) -> None:
        """Take the checkpoint from the manifest, then remove its file."""
        try:
            with only_writer(self.folder):
                manifest = _read_manifest(self.folder)
                others = [other for other in manifest.entries if other.path.name != entry.path.name]
                if len(others) < len(manifest.entries):
                    self._list(others, instead_of=manifest)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoints in {self.folder} cannot be changed: {reason(error)}. All of them are still usable."
            ) from error

    # ---- Choosing

    def entries(self) -> list[CheckpointEntry]:
        """Return the checkpoints in the order of saving."""
        return _read_manifest(self.folder).entries

    def last(self) -> CheckpointEntry | None:
        """Return the checkpoint saved last, if there is one."""
        entries = self.entries()
        return entries[-1] if entries else None

    def best(self, metric: str, mode: Literal["min", "max"]) -> CheckpointEntry | None:
        """Return the checkpoint with the best value, the first of equals; None while no checkpoint has metrics."""
        best_first = self.ranked(metric, mode)
        return best_first[0] if best_first else None

    def ranked(self, metric: str, mode: Literal["min", "max"]) -> list[CheckpointEntry]:
        """Return the checkpoints that have a value of the metric, best first, of equals the earlier first.

        A checkpoint whose value is NaN has none. Raises UserError for an unknown metric or mode.
        """
        if mode not in ("min", "max"):
            raise UserError(f"mode is 'min' or 'max', got {mode!r}.{nearest(str(mode), ('min', 'max'))}")
        entries = self.entries()
        metric_names = sorted({key for entry in entries for key in entry.metrics})
        if metric_names and metric not in metric_names:
            raise CheckpointError(
                f"No checkpoint in {self.folder} has the metric '{metric}'.{nearest(metric, metric_names)} "
                f"There are: {', '.join(metric_names)}."
            )
        return ranked(entries, Monitor(metric, mode))

    def monitor(self) -> Monitor:
        """Return the metric by which the best checkpoint is chosen; raises CheckpointError if there is none."""
        monitor = self._monitor or _read_manifest(self.folder).monitor
        if monitor is None:
            raise CheckpointError(
                f"The run of {self.folder} named no metric that makes a checkpoint the best. Choose 'last', or one by "
                f"its name: {', '.join(entry.name for entry in self.entries()[-NAMES_SHOWN:])}."
            )
        return monitor

    # ---- Loading

    def load(self, entry: CheckpointEntry, comm: Collectives = _ALONE) -> dict[str, Any]:
        """Return the payload of an undamaged checkpoint, on the CPU; nothing in it can run code.

        The tensors of the state of the task, its optimizers and callbacks are on the disk: `in_memory` reads them, and
        `elements` a range of one. Collective over the processes of `comm`, which all raise if one of them does.

        Raises DamagedCheckpoint if the file is not what was written, CheckpointError if this version of trainkit cannot
        read it.
        """
        content = read_checkpoint(entry.path, FileDigest(entry.size, entry.digest), comm)
        del content[HEADER]
        return content

    def load_last(self, comm: Collectives = _ALONE) -> LoadedCheckpoint:
        """Return the last checkpoint, or the latest before it that is undamaged; warns about each that is skipped.

        Collective over the processes of `comm`, which all return the same one.
        """
        skipped: list[str] = []
        # One process reads the manifest: another writer may replace it between the reads of two ranks, which would then
        # load different checkpoints.
        with same_errors(comm):
            entries = self.entries() if comm.is_main else []
        for entry in comm.broadcast_object(entries)[::-1]:
            try:
                # Collective: all ranks get the same error, and so fall back to the same checkpoint.
                payload = self.load(entry, comm)
            except DamagedCheckpoint as error:
                skipped.append(str(error))
                logger.warning("%s Falling back to an earlier checkpoint.", error)
                continue
            if skipped:
                logger.warning("Continuing from %s (step %d).", entry.path, entry.step)
            return LoadedCheckpoint(payload, entry, skipped)
        if skipped:
            reasons = " ".join(skipped[:NAMES_SHOWN])
            raise DamagedCheckpoint(f"None of the {len(skipped)} checkpoints in {self.folder} can be used. {reasons}")
        raise _no_checkpoint_in(self.folder)

    def verify(self, entry: CheckpointEntry) -> None:
        """Raise DamagedCheckpoint unless the files have the sizes and hashes that the manifest gives."""
        verify_file(entry.path, FileDigest(entry.size, entry.digest))
        verify_shards(entry.path, entry.shards)

    @contextmanager
    def _locked(self, name: str, content: dict[str, Any]) -> Iterator[None]:
        """Make the folder and lock it against other writers, to save the content as checkpoint `name`."""
        with self._disk_error_message(name, content):
            # Also if it was removed during the run.
            self.folder.mkdir(parents=True, exist_ok=True)
            with only_writer(self.folder):
                yield

    @contextmanager
    def _disk_error_message(self, name: str, content: dict[str, Any]) -> Iterator[None]:
        """Replace a disk error by a CheckpointError that names checkpoint `name` and the bytes that it needs."""
        try:
            yield
        except OSError as error:
            why = disk_error_text(error, self.folder, needed=payload_bytes(content))
            intact = " The checkpoints saved earlier are intact." if self.folder.exists() else ""
            raise CheckpointError(f"Checkpoint '{name}' could not be saved in {self.folder}: {why}{intact}") from error

    def _save(self, content: dict[str, Any], *, keep: Keep | None, shards: Path | None = None) -> CheckpointEntry:
        """Write, rename, list: a kill in between relies on this order."""
        manifest = _read_manifest(self.folder)
        # With shards the sweep was made before their folder, which it would remove.
        if shards is None:
            _sweep(self.folder, manifest.entries)
        path = _free_path(self.folder, content[HEADER]["name"])
        # An order of saving that no clock can change; it is in the file too, for a manifest that is lost.
        content[HEADER]["number"] = 1 + max((entry.number for entry in manifest.entries), default=0)
        with _sweep_after_failure(self.folder, manifest.entries):
            # Synced before the rename: if its name reached the disk first, a power cut would leave it empty.
            written = write_payload(part_of(path), content)
            # Before the rename: a kill between rename and manifest leaves a complete file, which must not be taken for
            # a listed one when a lost manifest is rebuilt.
            _unlisted_marker(path).touch()
            if shards is not None:
                # The names of the shards must be on the disk before the file that needs them has its name.
                sync_folder(shards)
                move(shards, shards_folder(path))
            # With its own sync of the folder, before the manifest's: POSIX promises no order of two renames, and a
            # manifest that reaches the disk before the file's name would list what a power cut has taken.
            move(part_of(path), path)
            entry = CheckpointEntry.of(path, content[HEADER], **written._asdict())
            earlier_entries = [earlier for earlier in manifest.entries if earlier.name != entry.name]
            if keep is not None:
                kept_names = {chosen.path.name for chosen in keep([*earlier_entries, entry])}
                earlier_entries = [earlier for earlier in earlier_entries if earlier.path.name in kept_names]
            # Before anything is removed: the one that stays must be readable when the others are gone.
            if len(earlier_entries) < len(manifest.entries):
                self.verify(entry)
            self._list([*earlier_entries, entry], instead_of=manifest)
            return entry

    def _list(self, entries: list[CheckpointEntry], *, instead_of: Manifest) -> None:
        """Replace the manifest, and remove the files that it does not list any more."""
        with _sweep_after_failure(self.folder, instead_of.entries):
            for entry in instead_of.entries:
                # Before the manifest: a kill after it leaves a marked file, which the next sweep removes.
                if entry not in entries:
                    _unlisted_marker(entry.path).touch()
            # Synced twice: its bytes, or a power cut could leave its name on an empty file, and the folder, or the
            # earlier manifest could come back and list files that are removed below.
            write_manifest(self.folder, Manifest(entries, self._monitor or instead_of.monitor))
        # Last, and never synced: a file that comes back after a power cut is not listed, and only takes up room.
        _sweep(self.folder, entries)


def ranked(entries: Sequence[CheckpointEntry], monitor: Monitor) -> list[CheckpointEntry]:
    """Return the entries that have a value of the metric, not NaN, best first, of equals the earlier first."""
    metric, sign = monitor.metric, 1.0 if monitor.mode == "min" else -1.0
    measured = [entry for entry in entries if not math.isnan(entry.metrics.get(metric, math.nan))]
    # `sorted` is stable: an equal value later on does not make another checkpoint the best, as nothing improved.
    return sorted(measured, key=lambda entry: sign * entry.metrics[metric])


def load_from(path: Path | str, comm: Collectives = _ALONE) -> LoadedCheckpoint:
    """Return the last undamaged checkpoint of a run folder or checkpoints folder, or the one in a file.

    A file that no manifest lists is verified by the checksums inside it. The state of the task and of its optimizers
    is on the disk, as from `CheckpointStore.load`. Collective over the processes of `comm`.
    """
    path = local_path(path, what="the path of a run or checkpoint")
    if not path.is_file():
        return CheckpointStore(_checkpoints_folder(path)).load_last(comm)
    chosen = resolve(path)
    entry: CheckpointEntry | None = None
    # Without a readable manifest the file is verified by the checksums in it.
    with suppress(OSError, *DAMAGED_TEXT):
        entry = next((entry for entry in parse_manifest(chosen.parent).entries if entry.path.name == chosen.name), None)
    content = read_checkpoint(chosen, None if entry is None else FileDigest(entry.size, entry.digest), comm)
    header = content.pop(HEADER)
    entry = entry or CheckpointEntry.of(chosen, header, size=chosen.stat().st_size, digest="")
    return LoadedCheckpoint(content, entry, [])


def resolve(path: Path | str, which: str = "last") -> Path:
    """Return the checkpoint file of a run folder, a checkpoints folder or a checkpoint file.

    `which` is "last", "best" or a checkpoint's name, and is ignored for a file.
    """
    path = local_path(path, what="the path of a run or checkpoint")
    if path.is_file() and path.name != MANIFEST:
        return path
    store = CheckpointStore(_checkpoints_folder(path))
    entries = store.entries()
    if not entries:
        raise _no_checkpoint_in(store.folder)
    if which == "last":
        return entries[-1].path
    if which == "best":
        monitor = store.monitor()
        best = store.best(*monitor)
        if best is None:
            raise CheckpointError(
                f"No checkpoint in {store.folder} has a value of '{monitor.metric}' yet. Choose 'last'."
            )
        return best.path
    named = [entry.path for entry in entries if entry.name == which]
    if not named:
        names = ["last", "best", *(entry.name for entry in entries)]
        raise CheckpointError(
            f"{store.folder} has no checkpoint '{which}'.{nearest(which, names)} Choose one of: {first_names(names)}."
        )
    return named[0]


def parse_manifest(folder: Path) -> Manifest:
    """Return the manifest in the folder's file; raises one of DAMAGED_TEXT if it is damaged."""
    path = folder / MANIFEST
    if path.exists() and not (path.is_file() and path.stat().st_size <= _MOST_BYTES):
        raise ValueError("the manifest is not a file, or holds more than a manifest can")
    return manifest_of(path.read_bytes(), folder)


def manifest_of(content: bytes, folder: Path) -> Manifest:
    """Return the manifest of `folder` with this content; raises one of DAMAGED_TEXT if it is damaged."""
    document = json.loads(content)
    version = document["format_version"]
    if type(version) is not int or version < 1:
        raise ValueError(f"the manifest has the format {version!r}, which no trainkit wrote")
    if version > FORMAT_VERSION:
        raise too_new(folder / MANIFEST, version)
    if document.pop("digest") != _digest_of(document):
        raise ValueError("the manifest was altered")
    entries = []
    for fields in document["checkpoints"]:
        file = fields.pop("file")
        # A name with a slash could lead out of the folder, also to files that a prune would remove.
        if not _is_checkpoint_file(file):
            raise ValueError(f"the manifest names a file that cannot be a checkpoint: {file!r}")
        check_header(fields)
        entries.append(CheckpointEntry.of(folder / file, fields))
    if document["monitor"] is None:
        return Manifest(entries, None)
    monitor = Monitor(str(document["monitor"]["metric"]), document["monitor"]["mode"])
    if monitor.mode not in ("min", "max"):
        raise ValueError("the manifest names an unknown mode")
    return Manifest(entries, monitor)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the folder's manifest atomically; after the call it is on the disk."""
    checkpoints = []
    for entry in manifest.entries:
        # JSON has no NaN and no infinity; float() reads them from text.
        metrics = {key: value if math.isfinite(value) else str(value) for key, value in entry.metrics.items()}
        shards = [shard._asdict() for shard in entry.shards]
        fields = {"file": entry.path.name, **vars(entry), "metrics": metrics, "shards": shards}
        del fields["path"]
        checkpoints.append(fields)
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "monitor": None if manifest.monitor is None else manifest.monitor._asdict(),
        "checkpoints": checkpoints,
    }
    # Over all other fields: an edited or half-written manifest is noticed.
    document["digest"] = _digest_of(document)
    write_text(folder / MANIFEST, json.dumps(document, indent=2) + "\n")


def _digest_of(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()}"


def _read_manifest(folder: Path) -> Manifest:
    """Return the folder's manifest; one that is lost or damaged is rebuilt from the undamaged files, in memory."""
    try:
        return parse_manifest(folder)
    except FileNotFoundError:
        problem = "is missing"
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {reason(error)}.") from error
    # Of a newer trainkit: a manifest that is rebuilt would lose what only the newer one knows.
    except CheckpointError:
        raise
    except DAMAGED_TEXT:
        problem = "is damaged"
    entries = _entries_of_files(folder)
    # A new folder has neither, and is nothing to warn of.
    if entries or problem == "is damaged":
        _warn_once(f"{folder / MANIFEST} {problem}; using the {len(entries)} undamaged checkpoints in the folder")
    return Manifest(entries, None)


@cache
def _warn_once(text: str) -> None:
    """Log a warning of a folder that a command reads several times."""
    logger.warning("%s", text)


def _entries_of_files(folder: Path) -> list[CheckpointEntry]:
    """Return the entries of undamaged files, from their own headers."""
    entries = []
    for path in folder.glob(f"*{_SUFFIX}"):
        # It is being listed or removed, or its writer was killed then.
        if _unlisted_marker(path).exists():
            continue
        try:
            header = read_checkpoint(path, None, _ALONE)[HEADER]
            with open_file(path) as file:
                digest = file_digest(file, fastest_algorithm())
        except CheckpointError as error:
            _warn_once(f"skipped: {error}")
        else:
            entries.append(CheckpointEntry.of(path, header, **digest._asdict()))
    # Not by the clock first, which may have been set back.
    return sorted(entries, key=lambda entry: (entry.number, entry.step, entry.saved_at, entry.path))


def _checkpoints_folder(path: Path) -> Path:
    """Return the checkpoints folder of a run folder, of a file in it, or the folder itself; raises CheckpointError."""
    if path.is_file():
        return path.parent
    if not path.is_dir():
        raise _not_found(path)
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    if (path / MANIFEST).exists() or any(path.glob(f"*{_SUFFIX}")):
        return path
    # Runs are named by their dates, so the last one is the latest.
    runs = sorted(manifest.parent.parent.name for manifest in path.glob(f"*/{CHECKPOINTS}/{MANIFEST}"))
    if runs:
        raise CheckpointError(
            f"{path} holds {len(runs)} runs, not one. The latest is {path / runs[-1]}. All: {first_names(runs[::-1])}."
        )
    raise _no_checkpoint_in(path)


def _sweep(folder: Path, listed: list[CheckpointEntry]) -> None:
    """Remove what a kill may have left: unfinished files, and marked ones that are not listed; nothing else."""
    names = {entry.path.name for entry in listed}
    for part in folder.glob(f".*{PART}"):
        target = Path(part.name[1 : -len(PART)])
        # Only names that a save could have made: other files in the folder are the user's.
        if NAME.fullmatch(target.name) and target.suffix in (_SUFFIX, ".shards", ".json"):
            _remove(part)
    for marker in folder.glob(f".*{_UNLISTED}"):
        name = marker.name[1 : -len(_UNLISTED)]
        if not _is_checkpoint_file(name):
            continue  # it would name another folder, such as the one above
        if name not in names:
            (folder / name).unlink(missing_ok=True)
            _remove(shards_folder(folder / name))
        # Last: after a kill before it the next sweep tries again.
        marker.unlink(missing_ok=True)


def _is_checkpoint_file(name: object) -> bool:
    return isinstance(name, str) and name.endswith(_SUFFIX) and NAME.fullmatch(name) is not None


@contextmanager
def _sweep_after_failure(folder: Path, listed: list[CheckpointEntry]) -> Iterator[None]:
    """Remove what the block has left if it fails, according to the manifest, which it may have replaced already."""
    try:
        yield
    except BaseException:
        _sweep_again(folder, listed)
        raise


def _sweep_again(folder: Path, listed: list[CheckpointEntry]) -> None:
    with suppress(OSError, *DAMAGED_TEXT):
        listed = parse_manifest(folder).entries
    # What failed before is the error to raise; the next save sweeps again.
    with suppress(OSError):
        _sweep(folder, listed)


def _unlisted_marker(path: Path) -> Path:
    """Return the empty file that stands beside a checkpoint while it is about to be listed, or to be removed."""
    return path.with_name(f".{path.name}{_UNLISTED}")


def _free_path(folder: Path, name: str) -> Path:
    """Return an unused file name: an earlier checkpoint of this name must outlive a kill during the save."""
    path, number = folder / f"{name}{_SUFFIX}", 1
    while path.exists() or shards_folder(path).exists():
        number += 1
        path = folder / f"{name}-{number}{_SUFFIX}"
    return path


def _remove(path: Path) -> None:
    # A link to a folder is removed, not what it points to.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _not_found(path: Path) -> CheckpointError:
    parent = existing_folder(path.parent)
    names = sorted(child.name for child in parent.iterdir() if child.name[0] != ".") if parent.is_dir() else []
    # The first part that is missing is the one to correct.
    wrong = path.absolute().relative_to(parent.absolute()).parts[0]
    named = "This folder" if parent == Path() else str(parent)
    there = f"{named} holds: {first_names(names)}." if names else f"{named} is empty."
    return CheckpointError(f"There is no run or checkpoint at {path}.{nearest(wrong, names)} {there}")


def _no_checkpoint_in(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.glob(f"*{_SUFFIX}"))
    there = f" These files are not in its {MANIFEST}: {first_names(names)}; name a file to load it." if names else ""
    return CheckpointError(f"There is no complete checkpoint in {folder}.{there}")
