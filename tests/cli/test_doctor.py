"""`trainkit doctor`: its checks, remedies and exit code."""

import io
import shutil
import sys
from pathlib import Path

import pytest

from trainkit.cli import doctor as doctor_module
from trainkit.cli.doctor import OK, PROBLEM, WARNING, Check, run_checks
from trainkit.cli.main import main
from trainkit.cli.signatures import EXTRAS


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def no_ranks(monkeypatch):
    monkeypatch.setattr(doctor_module, "_collective", lambda ranks: Check(f"{ranks} ranks", OK, "not started here"))


def _found(folder="runs"):
    return {result.subject: result for result in run_checks(Path(folder))}


def test_a_machine_that_can_train_gets_exit_code_0_and_no_file_is_left(no_ranks, capsys, tmp_path):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for subject in ("python", "torch", "devices", "backends", "packages", "shared memory", "open files", "clock"):
        assert f"  {subject}" in shown
    assert "runs is writable" in shown and "2 ranks" in shown and "0 problems" in shown
    assert "\x1b" not in shown
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_run_folder_is_a_problem_with_a_remedy(no_ranks, capsys):
    Path("file").write_text("")
    assert main(["doctor", "run_dir=file/runs"]) == 1
    shown = capsys.readouterr().out
    assert (
        "PROBLEM  run folder" in shown and "-> choose another folder: run_dir=PATH" in shown and "1 problem," in shown
    )


def test_little_free_space_is_a_warning(no_ranks, monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    found = _found()
    assert found["run folder"].state == found["shared memory"].state == WARNING
    assert "--shm-size" in found["shared memory"].remedy


def test_few_open_files_are_a_warning_with_the_command(no_ranks, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = _found()["open files"]
    assert (found.state, found.remedy) == (WARNING, "worker processes need more: ulimit -n 4096")


def test_ranks_that_cannot_connect_are_a_problem(monkeypatch):
    from trainkit.strategies.ddp.strategy import DDPStrategy

    def launch(self, run):
        raise RuntimeError("connection refused")

    monkeypatch.setattr(DDPStrategy, "launch", launch)
    found = _found()["2 ranks"]
    assert found.state == PROBLEM
    assert "connection refused" in found.text and "127.0.0.1" in found.remedy


def test_an_installation_without_extras_is_ok_and_gets_the_command_that_installs_them(no_ranks, monkeypatch):
    for loaded in [name for name in sys.modules if name.startswith("hydra_plugins.")]:
        monkeypatch.delitem(sys.modules, loaded)
    for package in ("hydra_plugins", *EXTRAS):  # as if they were not installed
        monkeypatch.setitem(sys.modules, package, None)
    found = _found()["packages"]
    assert found.state == OK
    assert set(found.text.partition("not installed: ")[2].split(", ")) == set(EXTRAS)
    assert found.remedy.startswith("if needed: pip install 'trainkit-torch[recipes,")


def test_states_are_coloured_on_a_terminal(no_ranks, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["doctor"]) == 0
    assert "\x1b[32mok" in terminal.getvalue()


def test_another_key_is_refused(capsys):
    assert main(["doctor", "run_dri=x"]) == 2
    assert "Did you mean 'run_dir'?" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_are_started_and_run_an_all_reduce(capsys):
    assert main(["doctor"]) == 0
    assert "an all-reduce takes" in capsys.readouterr().out
