"""RemoteRun: the folder of a run in a store such as S3, which lists whole checkpoints only.

s3://bucket/run7/
    config.yaml  metrics.jsonl  tensorboard/  report.html
    checkpoints/step_200.pt          complete before the manifest lists it
    checkpoints/manifest.json        replaced at once
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from trainkit.checkpoint.serialization import DAMAGED_TEXT, shards_folder
from trainkit.checkpoint.store import (
    CHECKPOINTS,
    MANIFEST,
    CheckpointEntry,
    CheckpointStore,
    Manifest,
    manifest_of,
    resolve,
    write_manifest,
)
from trainkit.errors import CheckpointError, DamagedCheckpoint, UserError
from trainkit.files import file_lock, part_of, write_text
from trainkit.run_dir.resume_auto import latest_complete
from trainkit.storage import check_url, fetched_folder, file_system, store_errors, working_folder

LIST = f"{CHECKPOINTS}/{MANIFEST}"
"""The manifest, relative to the run folder."""
_PROBE = ".writable"

logger = logging.getLogger(__name__)


class RemoteRun:
    """The run folder at a URL. Reading and writing raise the errors of its store, of any type.

    Args:
        url: The folder, such as `s3://bucket/run7`.

    """

    def __init__(self, url: str) -> None:
        self.url = check_url(url)

    # ---- Files, by their names relative to the folder

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; `None` if it does not exist."""
        fs, path = self._at(name)
        try:
            content: bytes = fs.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a small file at once: a kill leaves the earlier content or the new."""
        fs, path = self._at(name)
        if getattr(fs, "local_file", False):  # other stores replace an object as a whole
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_text(Path(path), content.decode())
        else:
            fs.pipe_file(path, content)

    def put(self, source: Path, name: str, **options: Any) -> None:
        """Copy a local file to the store."""
        fs, path = self._at(name)
        fs.put_file(str(source), path, **options)

    def get(self, name: str, target: Path) -> None:
        """Copy a file of the store to a local path, which it has when it is complete."""
        fs, path = self._at(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        # A kill must not leave a part of the file under its name.
        part = part_of(target)
        try:
            fs.get_file(path, str(part))
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        fs, path = self._at(name)
        with suppress(FileNotFoundError):
            fs.rm_file(path)

    def names(self) -> Iterator[str]:
        """Yield the names of the files that are not checkpoints."""
        fs, root = self._at("")
        start = f"{root.rstrip('/')}/"
        for path in fs.find(root):
            parts = str(path).removeprefix(start).split("/")
            # A name with an empty part or a leading dot (`..`) could lead out of the local folder.
            is_hidden = any(part[:1] in ("", ".") for part in parts)  # or not below the folder
            if not is_hidden and parts[0] != CHECKPOINTS:
                yield "/".join(parts)

    def _at(self, name: str) -> tuple[Any, str]:
        fs, root = file_system(self.url)
        return fs, f"{root.rstrip('/')}/{name}".rstrip("/")

    # ---- The run

    def manifest(self, folder: Path) -> Manifest:
        """Return the manifest, of checkpoints in a local `folder`; an empty one if there is none."""
        with store_errors(f"{self.url} cannot be read"):
            content = self.read(LIST)
        if content is None:
            return Manifest([], None)
        try:
            return manifest_of(content, folder / CHECKPOINTS)
        except CheckpointError:
            raise
        except DAMAGED_TEXT as error:
            raise CheckpointError(
                f"{self.url}/{LIST} is damaged ({type(error).__name__}). Copy the folder to a local one, and resume "
                "from there: the manifest is rebuilt from undamaged checkpoints."
            ) from None

    def check(self, folder: Path, *, resumes: bool) -> None:
        """Raise UserError if the run cannot be copied to the URL: it is not writable, or contains another run.

        Args:
            folder: The local folder of the run.
            resumes: True if the run continues, so that `folder` may contain its checkpoints already.

        """
        # A name that is not in use: several ranks may check the same URL at once.
        probe = f"{_PROBE}_{uuid4().hex[:8]}"
        with store_errors(f"run_dir={self.url} cannot be written to"):
            # A write is the only test that holds for every store.
            self.write(probe, b"")
            self.remove(probe)
        entries = self.manifest(folder).entries
        if entries and not (resumes and (_lists_all(folder, entries) or _is_ahead(folder, entries[-1]))):
            raise UserError(
                f"run_dir={self.url} already contains a run, whose last checkpoint is of step {entries[-1].step}. "
                f"Continue it with resume=auto, or choose another URL."
            )

    def continue_in(self, folder: Path, which: str = "last") -> Path:
        """Fetch a checkpoint, by default the newest whole one, and the other files into the folder of the run.

        A local folder that has the newest checkpoint or a later one is left as it is; another one is renamed. Returns
        the folder, or the checkpoint's path.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.parent / f".{folder.name}.fetch"):  # ranks of one machine do this at once
            manifest = self.manifest(folder)
            if not manifest.entries:
                return folder
            if _is_ahead(folder, manifest.entries[-1]):
                return folder if which == "last" else self._fetch_named(manifest, which)
            if folder.exists():
                aside = folder.with_name(f"{folder.name}_until_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}")
                # Renamed, not removed: it may hold steps that were never copied.
                folder.rename(aside)
                logger.warning("%s is not as new as %s. It is renamed to %s.", folder, self.url, aside)
            return self._fetch(folder, which)

    def fetch(self, which: str | None = "last") -> Path:
        """Fetch the run into a separate local folder, to read it; return the folder, or the chosen checkpoint.

        `which` is `last` (the folder is returned), `best`, a checkpoint's name or file; `None` fetches none of them.
        """
        folder = fetched_folder(self.url)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.parent / f".{folder.name}.fetch"):
            return self._fetch(folder, which)

    def _fetch(self, folder: Path, which: str | None = "last") -> Path:
        manifest = self.manifest(folder)
        with store_errors(f"{self.url} cannot be fetched"):
            # Before the manifest: a kill in between leaves a folder without checkpoints, which is fetched again.
            for name in self.names():
                self.get(name, folder / name)
        if manifest.entries:
            (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            # The whole list, though one checkpoint is fetched: the next copy to the store would drop the others there.
            write_manifest(folder / CHECKPOINTS, manifest)
        if which is None:
            return folder
        if which == "last":
            self._fetch_last(manifest)
            return folder
        return self._fetch_named(manifest, which)

    def _fetch_named(self, manifest: Manifest, which: str) -> Path:
        """Return the path of `best`, of a name or of a file, fetched if it is listed and not here."""
        folder = manifest.entries[0].path.parent
        path = folder / which if which.endswith(".pt") else resolve(folder, which)
        for entry in manifest.entries:
            if entry.path == path:
                return self._fetch_files(entry).path
        return resolve(path)

    def _fetch_last(self, manifest: Manifest) -> CheckpointEntry:
        if not manifest.entries:
            raise CheckpointError(f"There is no complete checkpoint in {self.url}.")
        for entry in reversed(manifest.entries):
            try:
                return self._fetch_files(entry)
            except DamagedCheckpoint as error:
                logger.warning("%s Falling back to an earlier checkpoint.", error)
        raise DamagedCheckpoint(f"None of the {len(manifest.entries)} checkpoints in {self.url} can be used.")

    def _fetch_files(self, entry: CheckpointEntry) -> CheckpointEntry:
        """Fetch the files of a checkpoint that are not here already; raises DamagedCheckpoint for other content."""
        store, here = CheckpointStore(entry.path.parent), Path(CHECKPOINTS)
        with suppress(DamagedCheckpoint):
            # The files may be here already, whole or damaged.
            store.verify(entry)
            return entry
        logger.info("fetching %s from %s", entry.path.name, self.url)
        shards = [shards_folder(entry.path) / shard.file for shard in entry.shards]
        with store_errors(f"{self.url} cannot be fetched"):
            for path in (entry.path, *shards):
                try:
                    self.get((here / path.relative_to(store.folder)).as_posix(), path)
                except FileNotFoundError:
                    raise DamagedCheckpoint(f"{self.url}/{CHECKPOINTS}/{path.name} is missing.") from None
        # By the hash in the manifest: the store or the network may have changed the bytes.
        store.verify(entry)
        return entry


def find_remote_run(url: str) -> tuple[RemoteRun | None, str]:
    """Return the run of a URL, and the checkpoint in it that the URL names: `last` for a folder.

    The URL is that of a run, its checkpoints folder, a checkpoint file, or RUN/best. The run is `None` if the URL is a
    checkpoint file outside of a run. Raises UserError if there is neither.
    """
    url = check_url(url)
    head, _, name = url.rpartition("/")
    candidates = [(url, "last")]
    if name == CHECKPOINTS:
        candidates = [(head, "last")]
    elif head.endswith(f"/{CHECKPOINTS}"):
        candidates = [(head.removesuffix(f"/{CHECKPOINTS}"), name)]
    elif not head.endswith(":/"):  # else the URL has no folder above it
        candidates.append((head, name))
    for folder, which in candidates:
        run = RemoteRun(folder)
        with store_errors(f"{url} cannot be read"):
            if run.read(LIST) is not None:
                return run, which
    with store_errors(f"{url} cannot be read"):
        fs, path = file_system(url)
        if fs.isfile(path):
            return None, name
    raise CheckpointError(f"There is no run or checkpoint at {url}.")


def fetch(url: str, *, continues: RemoteRun | None = None) -> Path:
    """Fetch the run or checkpoint of a URL; return the local run folder or checkpoint file.

    It is fetched to a folder for reading, or if its run `continues`, to the folder in which that trains.
    """
    run, which = find_remote_run(url)
    if run is not None:
        is_same = continues is not None and continues.url == run.url
        return run.continue_in(working_folder(run.url), which) if is_same else run.fetch(which)
    folder, _, name = check_url(url).rpartition("/")
    target = fetched_folder(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Ranks of one machine may fetch the same file at once.
    with file_lock(target.parent / f".{name}.fetch"), store_errors(f"{url} cannot be fetched"):
        RemoteRun(folder).get(name, target)
    return target


def _lists_all(folder: Path, entries: list[CheckpointEntry]) -> bool:
    """Return True if the local manifest lists all checkpoints of the store, as after they were fetched."""
    return {entry.digest for entry in entries} <= {
        entry.digest for entry in CheckpointStore(folder / CHECKPOINTS).entries()
    }


def _is_ahead(folder: Path, remote: CheckpointEntry) -> bool:
    """Return True if the local folder has the newest checkpoint of the store, or a later one."""
    local = latest_complete(folder)
    if local is None:
        return False
    # Both, since numbers begin again in a new run, and the clocks of machines differ.
    return local.digest == remote.digest or (local.number >= remote.number and local.saved_at >= remote.saved_at)
