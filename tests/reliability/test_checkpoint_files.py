"""Checkpoints under SIGKILL, flipped bytes, full and read-only disks.

TRAINKIT_KILLS=200 makes the random kills as many; TRAINKIT_BYTES=1 tries every byte and every length.
"""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from tests.program import Program
from trainkit.checkpoint.background_save import CpuSnapshot, save_copy
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore, load_from
from trainkit.errors import CheckpointError, DamagedCheckpoint

KILLS = int(os.environ.get("TRAINKIT_KILLS", "16"))
EVERY_BYTES = int(os.environ.get("TRAINKIT_BYTES", "23"))
SIZE = 300_000


def payload_of(step: int) -> dict[str, Any]:
    return {"weights": {str(part): torch.full((SIZE,), float(step + part)) for part in range(3)}, "step": step}


def is_whole(payload: dict[str, Any]) -> bool:
    step = payload["step"]
    return all(bool((payload["weights"][str(part)] == step + part).all()) for part in range(3))


class Savers:
    """Processes that save into a folder until they are killed, forked from one that is ready for it."""

    def __init__(self, program: Program, orders: TextIO, answers: TextIO) -> None:
        self._program, self._orders, self._answers = program, orders, answers

    def run(self, mode: str, folder: Path, first: int, kill_at: float) -> int:
        """Save from step `first` on until the kill; return the last step whose save returned, -1 if none."""
        print(mode, folder, first, kill_at, file=self._orders, flush=True)
        answer = self._answers.readline()
        assert answer, f"the forking process ended with {self._program.wait()}"
        return int(answer)


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    (standard_input, orders), (answers, standard_output) = os.pipe(), os.pipe()
    with Program(serve, streams=(standard_input, standard_output, 2)) as program:
        for descriptor in (standard_input, standard_output):
            os.close(descriptor)
        with os.fdopen(orders, "w") as to, os.fdopen(answers) as back:
            yield Savers(program, to, back)
        assert program.wait() == 0


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_kill_at_any_instant_costs_only_unsaved_work(tmp_path: Path, savers: Savers, mode: str) -> None:
    store = CheckpointStore(tmp_path)
    chance = random.Random(mode)
    pace = seconds_of_a_save(tmp_path / "pace")
    saved, kill = -1, 0
    while kill < KILLS or saved <= 3:  # a busy machine saves less between two kills: it is given longer and longer
        kill += 1
        acknowledged = savers.run(mode, tmp_path, saved + 1, chance.uniform(0, 6 * pace * (1 + kill / KILLS)))
        saved = max(saved, acknowledged)
        if saved < 0:
            continue
        loaded = store.load_last()
        assert loaded.skipped == [], f"kill {kill}: a damaged file was listed"
        assert is_whole(loaded.payload)
        assert loaded.entry.step >= saved, f"kill {kill}: an acknowledged checkpoint is lost"
        assert load_from(tmp_path).entry == loaded.entry
        saved = loaded.entry.step
    store.save(payload_of(saved + 1), name="end", step=saved + 1, epoch=0)
    assert set(os.listdir(tmp_path)) == {"manifest.json", *(entry.path.name for entry in store.entries())}


def seconds_of_a_save(folder: Path) -> float:
    """Return the seconds of a save on this machine now: kills are to fall into saves, and into later ones too."""
    start = time.monotonic()
    for step in range(3):
        CheckpointStore(folder).save(payload_of(step), name=f"step_{step}", step=step, epoch=0)
    shutil.rmtree(folder)
    return max((time.monotonic() - start) / 3, 0.02)


@pytest.mark.parametrize(
    "mode", ["save", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("replace", "prune"))]
)
def test_kill_before_and_after_every_change_of_the_disk(tmp_path: Path, savers: Savers, mode: str) -> None:
    steps_seen = set()
    for change in itertools.count():
        folder = tmp_path / str(change)
        store = CheckpointStore(folder)
        store.save(payload_of(0), name="step_0", step=0, epoch=0)
        store.save(payload_of(1), name="step_1", step=1, epoch=0)
        finished = savers.run(f"at-{mode}", folder, 2, change)
        loaded = store.load_last()
        assert loaded.skipped == [] and is_whole(loaded.payload)
        assert loaded.entry.step in ((2,) if finished == 2 else (1, 2))
        steps_seen.add(loaded.entry.step)
        for entry in store.entries():
            store.verify(entry)
        store.save(payload_of(3), name="step_3", step=3, epoch=0)
        assert set(os.listdir(folder)) == {"manifest.json", *(entry.path.name for entry in store.entries())}
        shutil.rmtree(folder)
        if finished == 2:
            break
    assert change > 10 and steps_seen == {1, 2}


@pytest.mark.parametrize("listed", [True, False])
def test_every_flipped_byte_is_detected_and_the_previous_one_used(tmp_path: Path, listed: bool) -> None:
    store, content = two_checkpoints(tmp_path)
    last = store.entries()[-1]
    undetected = 0
    for position in range(0, len(content), EVERY_BYTES):
        last.path.write_bytes(
            content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :]
        )
        if listed:
            loaded = store.load_last()
            assert loaded.entry.step == 1 and len(loaded.skipped) == 1
        else:
            undetected += is_same_or_refused(last.path)
    # Of a file that no manifest lists, the padding between tensors and the dates may differ, which changes no value.
    assert undetected < 0.5 * len(range(0, len(content), EVERY_BYTES))


def test_part_that_is_marked_as_a_folder_is_detected_without_a_manifest(tmp_path: Path) -> None:
    _, content = two_checkpoints(tmp_path)
    directory = content.rindex(b"archive/data/0")  # the name in the archive's own list, 46 bytes into its entry
    attributes = directory - 46 + 38
    flipped = content[:attributes] + bytes([content[attributes] ^ 0x10]) + content[attributes + 1 :]
    (tmp_path / "copy.pt").write_bytes(flipped)
    with pytest.raises(DamagedCheckpoint, match="archive/data/0"):
        load_from(tmp_path / "copy.pt")


@pytest.mark.parametrize("listed", [True, False])
def test_every_truncation_is_detected_and_the_previous_checkpoint_loaded(tmp_path: Path, listed: bool) -> None:
    store, content = two_checkpoints(tmp_path)
    last = store.entries()[-1]
    lengths = [*range(0, len(content), EVERY_BYTES), len(content) - 1]
    for length in lengths:
        last.path.write_bytes(content[:length])
        if listed:
            loaded = store.load_last()
            assert loaded.entry.step == 1 and "cut off" in loaded.skipped[0]
        else:
            with pytest.raises(CheckpointError):
                load_from(copied(last.path))


def test_bytes_added_at_the_end_are_detected(tmp_path: Path) -> None:
    store, content = two_checkpoints(tmp_path)
    store.entries()[-1].path.write_bytes(content + b"\0")
    assert store.load_last().entry.step == 1


def test_every_flipped_byte_of_the_manifest_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    store, _ = two_checkpoints(tmp_path)
    manifest = tmp_path / "manifest.json"
    content = manifest.read_bytes()
    for position in range(0, len(content), max(1, EVERY_BYTES // 3)):
        manifest.write_bytes(
            content[:position] + bytes([content[position] ^ 1 << position % 7]) + content[position + 1 :]
        )
        try:
            loaded = store.load_last()
        except DamagedCheckpoint:
            raise
        except CheckpointError as error:  # a digit of the format version was flipped
            assert "newer trainkit" in str(error) and content[position : position + 1].isdigit()
            continue
        assert loaded.skipped == [] and loaded.entry.step == 2 and loaded.payload["step"] == 2


def test_full_disk_raises_and_earlier_checkpoints_are_intact(tmp_path: Path, small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    saved = 0
    with pytest.raises(CheckpointError) as caught:
        for saved in range(100):
            store.save(payload_of(saved), name=f"step_{saved}", step=saved, epoch=0)
    message = str(caught.value)
    assert "No space left on device" in message and "3,60" in message and "run_dir=" in message
    assert saved == 2
    assert [entry.step for entry in store.entries()] == [0, 1]
    assert sorted(os.listdir(store.folder)) == ["manifest.json", "step_0.pt", "step_1.pt"]
    loaded = store.load_last()
    assert loaded.skipped == [] and loaded.entry.step == 1 and is_whole(loaded.payload)
    # Room is made, as the message says.
    store.delete(store.entries()[0])
    store.save(payload_of(2), name="step_2", step=2, epoch=0)
    assert store.load_last().entry.step == 2


def test_disk_that_is_full_to_the_last_byte_keeps_its_manifest(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    store.save({"a": 1}, name="step_0", step=0, epoch=0)
    with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while True:
            filler.write(bytes(1 << 16)) or filler.write(b"x")
    for step in range(1, 40):
        with pytest.raises(CheckpointError, match="No space"):
            store.save({"a": torch.ones(3000)}, name=f"step_{step}", step=step, epoch=0)
    with pytest.raises(CheckpointError, match="No space"):
        store.delete(store.entries()[0])
    assert store.load_last().payload == {"a": 1}
    assert sorted(os.listdir(store.folder)) == ["manifest.json", "step_0.pt"]


def test_full_disk_reaches_the_caller_of_a_background_save(small_disk: Path) -> None:
    store = CheckpointStore(small_disk)
    snapshot = CpuSnapshot()
    with pytest.raises(CheckpointError, match="No space left"):
        for step in range(10):
            save_copy(store, payload_of(step), snapshot, name=f"step_{step}", step=step, epoch=0).wait()
    assert is_whole(store.load_last().payload)


def test_read_only_disk_raises_and_can_still_be_read(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(payload_of(0), name="step_0", step=0, epoch=0)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        store.save(payload_of(1), name="step_1", step=1, epoch=0)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        CheckpointStore(small_disk / "other").save(payload_of(1), name="step_1", step=1, epoch=0)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        store.delete(store.entries()[0])
    assert store.load_last().entry.step == 0


def two_checkpoints(folder: Path) -> tuple[CheckpointStore, bytes]:
    store = CheckpointStore(folder)
    for step in (1, 2):
        payload = {"task": {"weight": torch.arange(100.0) * step, "bias": torch.ones(3)}, "step": step}
        store.save(payload, name=f"step_{step}", step=step, epoch=0)
    return store, store.entries()[-1].path.read_bytes()


def copied(path: Path) -> Path:
    """Put the file where no manifest lists it."""
    folder = path.parent / "elsewhere"
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(path, folder / "copy.pt"))


def is_same_or_refused(path: Path) -> bool:
    try:
        payload = load_from(copied(path)).payload
    except CheckpointError:
        return False
    assert payload["step"] == 2
    assert torch.equal(payload["task"]["weight"], torch.arange(100.0) * 2)
    assert torch.equal(payload["task"]["bias"], torch.ones(3))
    return True


def serve() -> None:
    """Fork a saver for each line read, see to it that it is killed, and print the last step that it saw saved."""
    for line in sys.stdin:
        mode, folder, first, kill_at = line.split()
        acknowledged, acknowledge = os.pipe()
        saver = os.fork()
        if saver == 0:
            os.close(acknowledged)
            MODES[mode](Path(folder), int(first), float(kill_at), acknowledge)
            os._exit(0)
        os.close(acknowledge)
        if not mode.startswith("at-"):
            # The clock starts when the saver is at work, so that short times fall into the first save too.
            os.read(acknowledged, 1)
            time.sleep(float(kill_at))
            os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
        with os.fdopen(acknowledged) as steps:
            print((["-1", *steps.read().split()])[-1], flush=True)


def last_two(entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
    return entries[-2:]


def save_for_ever(folder: Path, first: int, _: float, acknowledge: int) -> None:
    store = CheckpointStore(folder)
    os.write(acknowledge, b"\n")
    for step in itertools.count(first):
        entry = store.save(payload_of(step), name=f"step_{step}", step=step, epoch=0, keep=last_two)
        os.write(acknowledge, f"{step}\n".encode())
        assert entry == store.last()


def save_for_ever_in_the_background(folder: Path, first: int, _: float, acknowledge: int) -> None:
    store = CheckpointStore(folder)
    os.write(acknowledge, b"\n")
    snapshot = CpuSnapshot()
    for step in itertools.count(first):
        save = save_copy(store, payload_of(step), snapshot, name=f"step_{step}", step=step, epoch=0, keep=last_two)
        save.wait()
        os.write(acknowledge, f"{step}\n".encode())


def save_once(
    folder: Path, step: int, change: float, acknowledge: int, *, name: str = "step_2", prune: bool = False
) -> None:
    """Kill the own process before the given change of the disk, all of them counted."""
    count = itertools.count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def change_the_disk(*arguments: Any, **named: Any) -> Any:
            if next(count) == change:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return change_the_disk

    store = CheckpointStore(folder)
    payload = payload_of(step)
    for function in ("write", "fsync", "replace", "unlink", "rename"):
        setattr(os, function, counted(getattr(os, function)))
    written = os.write
    keep = (lambda entries: entries[-1:]) if prune else None
    store.save(payload, name=name, step=step, epoch=0, keep=keep)
    written(acknowledge, f"{step}\n".encode())


def replace_once(folder: Path, step: int, change: float, acknowledge: int) -> None:
    save_once(folder, step, change, acknowledge, name="step_1")


def prune_once(folder: Path, step: int, change: float, acknowledge: int) -> None:
    save_once(folder, step, change, acknowledge, prune=True)


MODES: dict[str, Callable[[Path, int, float, int], None]] = {
    "sync": save_for_ever,
    "async": save_for_ever_in_the_background,
    "at-save": save_once,
    "at-replace": replace_once,
    "at-prune": prune_once,
}
