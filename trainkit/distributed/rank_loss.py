"""Loss of a rank: the launcher starts all ranks again, from the state that a survivor hands over.

    rank 0     step 41 | step 42 breaks and is taken back | hands over step 41, ends
    rank 1     step 41 | killed
    launcher                                                                           starts both: step 42, ...

The launcher alone decides who is alive, so that no two ranks can disagree. Every rank becomes a new process, as one
that has lost a peer cannot leave its process groups: gloo keeps their connections while any object refers to them, and
a call of NCCL may never return. A process of the fork server costs tenths of a second.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from filelock import Timeout

from trainkit.files import file_lock

logger = logging.getLogger(__name__)

OnRankLoss = Literal["auto", "stop", "continue", "replace"]

SHARED_MEMORY = "/dev/shm"  # a file there is memory that outlives its process
# For survivors to end after a loss: before the first step, when they have a state, and while none is handed over yet.
START_SECONDS, END_SECONDS, SAVE_SECONDS = 0.5, 5.0, 60.0  # the last one may be in the middle of a long step
_REFUSED, _BEGUN, _IN_USE = "refused", "begun", "in_use"
_PREFIX = "trainkit-handover-"
_PART, _OF_MAIN = ".pt", ".main"  # files with a part of the state, and with the state of the main rank's callbacks
_ABANDONED_SECONDS = 60.0  # after which a folder that nobody has locked is one of a killed process


class SavedStep(NamedTuple):
    """The checkpoint of a step."""

    step: int
    path: Path


class SavedParts(NamedTuple):
    """The state after a step, in one file for each of its parts."""

    attempt: int
    """The number of the start whose ranks have left it."""
    step: int
    paths: list[Path]


@dataclass(frozen=True, slots=True)
class Handover:
    """Where the ranks of a run hand their state over to those that are started after them."""

    folders: tuple[str, ...]
    """Private to the run. A later one is used if there is no room in an earlier one."""
    source: SavedParts | None = None
    """The state to go on from; `None`: the last checkpoint, or the start."""
    lost: str = ""
    """Who died, and how, before this start."""
    since: float = 0.0
    """When that was, by the monotonic clock of the machine."""
    is_whole: bool = True
    """False if fewer ranks go on than the run was started with."""
    regrow: signal.Signals | None = None
    """The signal to the process that starts ranks that starts all of them again, after this step."""
    attempt: int = 0
    """Number of earlier starts."""

    def save(
        self,
        content: Any,
        *,
        num_bytes: int,
        step: int,
        part: tuple[int, int] = (0, 1),
        callbacks: dict[str, Any] | None = None,
    ) -> None:
        """Write a part of the state, unless other ranks have written it, or all parts of a later step.

        A rank that is killed meanwhile leaves the turn to the next.

        Args:
            content: What `load` returns for the part, with tensors of `num_bytes`.
            num_bytes: The memory that it takes.
            step: The last complete step.
            part: Number of the part, and number of parts.
            callbacks: Their state on the main rank, which counts if that rank survives.

        """
        number, count = part
        # One after the other: copies of all ranks at once might not fit into memory.
        with file_lock(Path(self.folders[0], "lock")):
            newest = self.newest()
            if newest is not None and newest.step > step and newest.attempt == self.attempt:
                return
            if callbacks is not None:
                self._write(callbacks, f"{self.attempt}_{step}{_OF_MAIN}", num_bytes=num_bytes)
            if number not in self._parts().get((self.attempt, step, count), {}):
                self._write(content, f"{self.attempt}_{step}_{count}_{number}{_PART}", num_bytes=num_bytes)

    def _write(self, content: Any, name: str, *, num_bytes: int) -> None:
        # A rank is often killed because memory is short: a copy in memory would cost the next one.
        is_short = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 2 * num_bytes
        for folder in self.folders[-1:] if is_short else self.folders:
            path = Path(folder, name)
            part = path.with_suffix(".part")
            try:
                torch.save(content, part)
            # torch raises RuntimeError for a full disk, as a container's small /dev/shm is.
            except (OSError, RuntimeError) as error:
                if folder == self.folders[-1]:
                    raise
                logger.debug("no room for a state in %s: %s", folder, error)
            else:
                part.replace(path)
                return
            finally:
                part.unlink(missing_ok=True)

    def load(self) -> tuple[list[Any], dict[str, Any] | None]:
        """Return the parts to go on from, and the main rank's callbacks if it has survived.

        Tensors are read when they are used.
        """
        assert self.source is not None
        callbacks = [_loaded(path) for path in self._files(f"{self.source.attempt}_{self.source.step}{_OF_MAIN}")]
        return [_loaded(path) for path in self.source.paths], next(iter(callbacks), None)

    def discard(self) -> None:
        """Remove the states of earlier starts, which take memory; any rank may call it."""
        # None of this start: another rank may be handing it over.
        for path in self._files(f"*{_PART}", f"*{_OF_MAIN}"):
            if int(path.stem.partition("_")[0]) < self.attempt:
                path.unlink(missing_ok=True)

    def newest(self) -> SavedParts | None:
        """Return the state of the latest step of which all parts are there."""
        complete = [
            SavedParts(attempt, step, [parts[number] for number in range(count)])
            for (attempt, step, count), parts in self._parts().items()
            if len(parts) == count
        ]
        return max(complete, default=None)  # of the last start: after a rollback its steps are earlier

    def _parts(self) -> dict[tuple[int, int, int], dict[int, Path]]:
        """Return the files by start, step and number of parts, each by the number of its part."""
        files: dict[tuple[int, int, int], dict[int, Path]] = defaultdict(dict)
        for path in self._files(f"*{_PART}"):
            attempt, step, count, number = map(int, path.stem.split("_"))
            files[attempt, step, count][number] = path
        return files

    def _files(self, *patterns: str) -> list[Path]:
        return [path for folder in self.folders for pattern in patterns for path in Path(folder).glob(pattern)]

    def begin(self) -> None:
        """Record that the ranks begin to train."""
        Path(self.folders[0], _BEGUN).touch()

    @property
    def has_begun(self) -> bool:
        """True if `begin` was called."""
        return Path(self.folders[0], _BEGUN).exists()

    def refuse(self) -> None:
        """Record that a rank failed by an error of its own: the run ends, and no rank need hand anything over."""
        Path(self.folders[0], _REFUSED).touch()

    @property
    def is_refused(self) -> bool:
        """True if `refuse` was called."""
        return Path(self.folders[0], _REFUSED).exists()


def _loaded(path: Path) -> Any:
    # Not `weights_only`: the files are private to this run, and a callback's state may hold anything.
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed, which hold memory."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, Timeout):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                with file_lock(folder / _IN_USE, timeout=0) as error:
                    is_abandoned = error is None
                if is_abandoned:
                    shutil.rmtree(folder)


@dataclass(kw_only=True)
class Recovery:
    """Decides, in the process that starts ranks, what follows a loss."""

    keeps_ranks: bool
    """Start as many ranks again, instead of as many as have survived."""
    hands_over: bool
    """Another rank has each part of the state too."""
    max_losses: int
    """Losses in a row without a new step that are survived."""
    saved: Callable[[], SavedStep | None]
    """Returns the last checkpoint of this run, `None` without one."""
    handover: Handover = field(default=Handover(()), init=False)
    checkpoint: str | None = field(default=None, init=False)
    """The last checkpoint, when the last loss was handled."""
    _reached: int = field(default=-1, init=False)  # the last step that a loss has left
    _losses: int = field(default=0, init=False)  # in a row, that have left no later one

    @contextmanager
    def entered(self) -> Iterator[Handover]:
        """Return what the first ranks get; no file is left behind."""
        parents = [SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK) else []
        with ExitStack() as stack:
            folders = []
            for parent in (*parents, tempfile.gettempdir()):
                _remove_abandoned(Path(parent))
                # Private to the user, as a state is unpickled.
                folders.append(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
                stack.callback(shutil.rmtree, folders[-1], ignore_errors=True)
                stack.enter_context(file_lock(Path(folders[-1], _IN_USE)))
            self.handover = Handover(tuple(folders))
            yield self.handover

    def write(self, payload: bytes) -> bytes | Path:
        """Return a file with what all ranks get, or the payload itself if there is no room for it."""
        path = Path(self.handover.folders[-1], "payload")
        try:
            path.write_bytes(payload)
        except OSError:
            return payload
        return path

    def patience(self) -> float:
        """Return the seconds that survivors have to end after a loss, and to hand a state over if they have one."""
        if not self.handover.has_begun:  # some may wait in C for the dead rank to join them
            return START_SECONDS
        newest = self.handover.newest()
        is_expected = self.hands_over and not self.handover.is_refused
        return SAVE_SECONDS if is_expected and (newest is None or newest.step <= self._reached) else END_SECONDS

    def after(
        self, lost: Sequence[str], *, since: float, is_whole: bool = True, regrow: signal.Signals | None = None
    ) -> Handover | None:
        """Return what the next ranks get; `None` if the run ends."""
        newest, saved = self.handover.newest(), self.saved()
        reached = max(-1 if state is None else state.step for state in (newest, saved))
        self._losses = 1 if reached > self._reached else self._losses + 1
        self._reached = max(reached, self._reached)
        # A bug that kills ranks, such as a batch that takes too much memory, would kill them for ever.
        if self._losses > self.max_losses:
            return None
        Path(self.handover.folders[0], _BEGUN).unlink(missing_ok=True)
        self.checkpoint = None if saved is None else str(saved.path)
        source = newest if newest is not None and newest.step == reached else None
        attempt = self.handover.attempt + 1
        folders, causes = self.handover.folders, " and ".join(lost)
        self.handover = Handover(folders, source, causes, since, is_whole, regrow, attempt)
        return self.handover
