"""RemoteCopy: copies a run folder to a store such as S3 in the background, while training goes on.

    runs/s3/bucket/run7/                        s3://bucket/run7/
    config.yaml  metrics.jsonl  report.html  -> 1. files that have changed
    checkpoints/step_200.pt                  -> 2. files of checkpoints that the manifest there does not list
    checkpoints/manifest.json                -> 3. the manifest
                                                4. files that the manifest does not list any more are removed

So the manifest there never lists a checkpoint that is incomplete. By hand, after a run whose store was away:

    python -m trainkit.run_dir.remote_copy runs/s3/bucket/run7 s3://bucket/run7
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from trainkit.checkpoint.serialization import DAMAGED_TEXT, first_names, shards_folder
from trainkit.checkpoint.store import CHECKPOINTS
from trainkit.console import log_to_stderr
from trainkit.errors import UserError
from trainkit.files import first_line
from trainkit.run_dir.remote_run import LIST, RemoteRun
from trainkit.storage import error_text

_EVERY_SECONDS = 2.0  # between looks at the local manifest
_FILES_EVERY_SECONDS = 30.0  # between copies of the other files, which grow with every log point
_FILES_SHARE = 0.1  # of the time at most
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds after a failure, doubled after each
_PATIENCE_SECONDS = 120.0  # at the end, without progress
_SUMMARY = "summary.json"
_LINKS = ".copying"  # the folder of links to files that are being copied

logger = logging.getLogger(__name__)


class _Replaced(Exception):
    """Another process has written to the store."""


class _Pruned(Exception):
    """The run has removed a checkpoint that was about to be copied, and lists others."""


class RemoteCopy:
    """Copies the local folder of a run to a store, in a thread that reads what the run has written.

    Training never waits for it. A store that is away is tried again, after waits that grow to a minute.

    Args:
        folder: The local folder of the run.
        url: The folder in the store; it is read once before the first checkpoint is copied.

    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.run = RemoteRun(url)
        self._copied: dict[str, tuple[int, int]] = {_SUMMARY: (0, 0)}  # size and time of files
        self._manifest: bytes | None = None  # as it is in the store
        self._manifest_is_known = False  # until the store has been read for the first time
        self._files_due = 0.0  # when the other files are copied next
        self.is_complete = False
        """True once everything is in the store, after `close`."""
        self._problem = ""
        self._stored: dict[str, str] = {}  # hashes of the files of checkpoints in the store, listed there or not yet
        self._progress = time.monotonic()  # the time of the last one
        self._ending, self._abandoned = Event(), Event()
        # A daemon: after `close` has given up, a store that never answers must not keep the process alive.
        self._thread = Thread(target=self._copy_until_the_end, name="remote copy", daemon=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copy while the block runs, and what remains when it ends, with or without an error."""
        logger.info("the run is written to %s and copied to %s", self.folder, self.run.url)
        self._thread.start()
        try:
            yield
        finally:
            self.close()

    def close(self) -> bool:
        """Wait until everything is copied and return True; give up, with a warning, if nothing moves for minutes."""
        self._progress = time.monotonic()
        self._ending.set()
        while self._thread.is_alive() and (left := self._progress + _PATIENCE_SECONDS - time.monotonic()) > 0:
            self._thread.join(left)
        # Before the question what is missing: the thread copies nothing more from here on.
        self._abandoned.set()
        missing = self._missing()
        if missing or self._problem:
            logger.warning(
                "%s lacks %s: %s. Everything is in %s. To copy it, type: python -m trainkit.run_dir.remote_copy %s %s",
                self.run.url,
                first_names(missing) if missing else "nothing, but its last change failed",
                self._problem or "the store did not answer in time",
                self.folder,
                self.folder,
                self.run.url,
            )
        self.is_complete = not missing and not self._problem
        return self.is_complete

    # ---- In the thread

    def _copy_until_the_end(self) -> None:
        wait = _FIRST_WAIT
        while not self._abandoned.is_set():
            # Read before the copy: what is written after it would be missed if the end came in between.
            is_last = self._ending.is_set()
            try:
                self.copy_changes(is_last=is_last)
            except _Pruned:
                continue
            # The manifest of another run must not be overwritten, by no later try either.
            except _Replaced as error:
                self._problem = str(error)
                logger.error("%s Nothing more is copied; the run continues in %s.", error, self.folder)
                return
            except Exception as error:  # the types of errors depend on the store
                self._problem = first_line(error) if isinstance(error, UserError) else error_text(error)
                logger.log(
                    logging.WARNING if wait == _FIRST_WAIT else logging.DEBUG,
                    "%s cannot be written to (%s). The run continues in %s; copying is tried again.",
                    self.run.url,
                    self._problem,
                    self.folder,
                )
                # The wait ends early at the end of training; after that, only when `close` gives up.
                (self._abandoned if is_last else self._ending).wait(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                continue
            if self._problem:
                logger.warning("%s can be written to again, and is complete up to now.", self.run.url)
            self._problem, wait = "", _FIRST_WAIT
            if is_last:
                return
            self._ending.wait(_EVERY_SECONDS)

    def copy_changes(self, *, is_last: bool = True) -> None:
        """Copy what has changed in the local folder since the last call, checkpoints last."""
        if is_last or time.monotonic() >= self._files_due:
            start = time.monotonic()
            self._copy_files()
            end = time.monotonic()
            # From a slow store these copies take a tenth of the time, so that checkpoints come in between.
            self._files_due = end + max(_FILES_EVERY_SECONDS, (end - start) / _FILES_SHARE)
        self._copy_checkpoints()

    def _copy_files(self) -> None:
        # With the stamps from before the copies: a file that grows while it is copied is copied again later.
        present = dict(self._files())
        for name, stamp in present.items():
            if self._copied.get(name) != stamp:
                try:
                    self._put(self.folder / name, name)
                except FileNotFoundError:
                    if (self.folder / name).exists():  # else it was renamed meanwhile
                        raise
                self._copied[name] = stamp
        if _SUMMARY not in present and _SUMMARY in self._copied:  # that of an earlier part of the run
            self.run.remove(_SUMMARY)
            del self._copied[_SUMMARY]

    def _copy_checkpoints(self) -> None:
        if not self._manifest_is_known:
            self._manifest, self._manifest_is_known = self.run.read(LIST), True
        if self._local_manifest() == self._manifest:
            return
        there = self.run.read(LIST)
        # What the store lists is not copied again, also if an earlier process has copied it.
        self._stored.update(_files_of(there))
        with self._kept_files() as (content, wanted, links):
            if content is None or content == self._manifest:
                return
            if there not in (self._manifest, content):
                raise _Replaced(f"Another process has written to {self.run.url} since this run began to copy there.")
            for name, path in links.items():
                self._put(path, name)
                self._stored[name] = wanted[name]
            # After its files, and before those of the earlier one are removed: a reader always finds what the manifest
            # lists.
            self.run.write(LIST, content)
            for name in self._stored.keys() - wanted.keys():
                self.run.remove(name)
                del self._stored[name]
            self._manifest = content

    @contextmanager
    def _kept_files(self) -> Iterator[tuple[bytes | None, dict[str, str], dict[str, Path]]]:
        """Yield the local manifest, the hashes of its files, and paths of those that are to be copied.

        The paths are hard links, which remain if the run removes a checkpoint while it is copied.
        """
        folder = self.folder / _LINKS
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        try:
            content = self._local_manifest()
            wanted = {} if content is None else _files_of(content)
            # Those that are not here were listed there when the run was fetched.
            missing = [name for name, digest in wanted.items() if self._stored.get(name) != digest]
            try:
                links = {name: self._link(name, folder / str(number)) for number, name in enumerate(missing)}
            except FileNotFoundError:
                if self._local_manifest() == content:
                    raise
                raise _Pruned from None
            yield content, wanted, links
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _link(self, name: str, link: Path) -> Path:
        link.parent.mkdir(exist_ok=True)
        try:
            os.link(self.folder / name, link)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            return self.folder / name
        return link

    def _put(self, source: Path, name: str) -> None:
        self.run.put(source, name, callback=_progress_callback(self._moved))
        self._moved()
        self._progress = time.monotonic()

    def _moved(self) -> None:
        if self._abandoned.is_set():
            # Inside fsspec's copy, which has no other way to stop it.
            raise InterruptedError("given up")
        # After a failure only whole files count: bytes may move in tries that never complete one, and `close` would
        # wait without end.
        if not self._problem:
            self._progress = time.monotonic()

    # ---- What is here

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield names, sizes and times of the files that are not checkpoints, locks or unfinished."""
        for parent, folders, files in os.walk(self.folder):
            folders[:] = [
                name for name in folders if name[0] != "." and Path(parent, name) != self.folder / CHECKPOINTS
            ]
            for path in (Path(parent, name) for name in files if name[0] != "."):
                try:
                    status = path.stat()
                except FileNotFoundError:  # renamed meanwhile
                    continue
                yield path.relative_to(self.folder).as_posix(), (status.st_size, status.st_mtime_ns)

    def _local_manifest(self) -> bytes | None:
        try:
            return (self.folder / LIST).read_bytes()
        except FileNotFoundError:
            return None

    def _missing(self) -> list[str]:
        """Return the names of the files that are not in the store as they are here."""
        names = [name for name, stamp in self._files() if self._copied.get(name) != stamp]
        content = self._local_manifest()
        if content is None or content == self._manifest:
            return names
        try:
            wanted = _files_of(content)
        except UserError:
            return [*names, LIST]
        return [*(name for name, digest in wanted.items() if self._stored.get(name) != digest), *names, LIST]


def _files_of(content: bytes | None) -> dict[str, str]:
    """Return the hashes of the files that a manifest lists, by their names in the run folder; empty without one."""
    if content is None:
        return {}
    digests = {}
    try:
        for fields in json.loads(content)["checkpoints"]:
            path = Path(CHECKPOINTS, fields["file"])
            digests[path.as_posix()] = fields["digest"]
            for shard in fields.get("shards", ()):
                digests[(shards_folder(path) / shard["file"]).as_posix()] = shard["digest"]
    except DAMAGED_TEXT as error:
        raise UserError(f"{LIST} is damaged: {type(error).__name__}") from error
    return digests


def _progress_callback(moved: Any) -> Any:
    """Return an object that fsspec calls when bytes were copied."""
    from fsspec.callbacks import Callback

    class Progress(Callback):  # type: ignore[misc] # fsspec has no types
        def relative_update(self, inc: int = 1) -> None:
            moved()

        def absolute_update(self, value: int) -> None:
            moved()

    return Progress()


def main(arguments: list[str]) -> int:
    """Copy a local run folder to a URL; return 0 if it is complete there."""
    if len(arguments) != 2:
        print("usage: python -m trainkit.run_dir.remote_copy RUN_FOLDER URL", file=sys.stderr)
        return 2
    log_to_stderr()
    logging.getLogger("trainkit").setLevel(logging.INFO)
    folder, url = Path(arguments[0]), arguments[1]
    try:
        RemoteRun(url).check(folder, resumes=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    copy = RemoteCopy(folder, url)
    copy._thread.start()
    return 0 if copy.close() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
