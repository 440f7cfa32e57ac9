"""A folder that several processes ask for at once is made once, and never taken away from one that has it."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.data.prepare import prepare_folder

_PROGRAM = """
import fcntl, os, sys, time
from pathlib import Path
from trainkit.data.prepare import prepare_folder

locks, folder = sys.argv[1] == "locks", Path(sys.argv[2])

def refuse(*_):
    raise OSError("no locks here")

def make(part):
    with (folder.parent.parent / "made").open("a") as made:
        made.write("x")
    (part / "first").write_text("1")
    time.sleep(0.3)
    (part / "second").write_text(str(os.getpid()))

if not locks:
    fcntl.flock = refuse
print("ready", flush=True)
sys.stdin.readline()
prepare_folder(folder, make=make)
print(sorted(os.listdir(folder)), (folder / "second").read_text(), os.stat(folder).st_ino, flush=True)
"""


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_four_processes_at_once_have_the_same_complete_folder(locks: str, tmp_path: Path) -> None:
    folder = tmp_path / "data/made_once"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, locks, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert found[0].startswith("['first', 'second'] ")
    assert set(found) == {found[0]}  # made by the same process, and never put in the place of another
    assert len((tmp_path / "made").read_text()) == (1 if locks == "locks" else 4)
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
