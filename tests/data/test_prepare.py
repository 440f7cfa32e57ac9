"""A folder that several processes prepare at once is made once, and never replaced."""

import fcntl
import os
import time
from functools import partial
from pathlib import Path

import pytest

from trainkit.data.prepare import prepare_folder
from trainkit.distributed.launcher import run_processes


def refuse(*_: object) -> None:
    raise OSError("no locks here")


def prepare_with_others(locks: bool, folder: Path, number: int) -> tuple[list[str], str, int]:
    """Prepare the folder once all four processes are here; return its files, who made it, and its inode."""
    begun, made = folder.parents[1] / "begun", folder.parents[1] / "made"

    def make(part: Path) -> None:
        (made / str(number)).touch()
        (part / "first").write_text("1")
        while not locks and len(list(made.iterdir())) < 4:  # all of them make it at once
            time.sleep(0.01)
        (part / "second").write_text(str(os.getpid()))

    if not locks:
        fcntl.flock = refuse
    (begun / str(number)).touch()
    while len(list(begun.iterdir())) < 4:
        time.sleep(0.01)
    prepare_folder(folder, make=make)
    return sorted(os.listdir(folder)), (folder / "second").read_text(), folder.stat().st_ino


@pytest.mark.parametrize("locks", [True, False])
def test_four_processes_at_once_have_the_same_complete_folder(locks: bool, tmp_path: Path) -> None:
    folder = tmp_path / "data/made_once"
    (tmp_path / "begun").mkdir()
    (tmp_path / "made").mkdir()
    calls = [partial(prepare_with_others, locks, folder, number) for number in range(4)]
    outcomes = run_processes(calls, patience=0.0, timeout=600)
    assert [outcome.failure for outcome in outcomes] == [None] * 4
    found = [outcome.value for outcome in outcomes]
    assert found[0][0] == ["first", "second"]
    assert found == [found[0]] * 4  # made by the same process, and never put in the place of another
    assert len(list((tmp_path / "made").iterdir())) == (1 if locks else 4)
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def make(part: Path) -> None:
        (part / "first").write_text("1")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        prepare_folder(tmp_path / "folder", make=make)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    prepare_folder(tmp_path / "folder", make=lambda part: pytest.fail("made again"))
