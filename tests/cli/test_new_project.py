"""`trainkit new`: a project that works as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.cli.compose import compose_config
from trainkit.cli.main import main


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def _run(*argv):
    return subprocess.run(
        argv,
        cwd="rings",
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_new_project_is_written_and_composes(capsys, tmp_path, monkeypatch):
    assert main(["new", "two_rings"]) == 0
    assert "trainkit fit --config-dir conf recipe=two_rings" in capsys.readouterr().out
    monkeypatch.chdir("two_rings")
    for path in Path().rglob("*"):
        assert path.is_dir() or not any(sign in path.read_text() for sign in ("{{", "}}", "{name}", "{prefix}"))
    monkeypatch.syspath_prepend(tmp_path / "two_rings")
    with compose_config(["conf"]) as composer:
        tree = composer.settings(["recipe=two_rings"]).tree
    assert tree["task"]["_target_"] == "two_rings.task.TwoRingsTask"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-project", "Did you mean 'my_project'?"),
        ("3d", "Did you mean 'project_3d'?"),
        ("class", "is not a valid package name"),
        ("__init__", "Did you mean 'init'?"),
        ("json-", "Did you mean 'project_json'?"),
        *[
            (name, f"'{name}' is the name of another package")
            for name in ("torch", "json", "numpy", "random", "trainkit", "pytest", "hydra_plugins", "conf", "runs")
        ],
        ("full", "exists already"),
    ],
)
def test_an_invalid_name_is_refused_with_a_valid_one(name, said, capsys):
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    assert main(["new", name]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["full"]


def test_an_empty_folder_becomes_a_project():
    Path("rings").mkdir()
    assert main(["new", "rings"]) == 0
    assert Path("rings/rings/task.py").is_file()


@pytest.mark.slow
def test_a_new_project_passes_its_own_test_and_trains(monkeypatch):
    assert main(["new", "rings"]) == 0
    tested = _run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
    monkeypatch.chdir("rings")
    assert main(["fit", "--config-dir", "conf", "recipe=rings", "run_dir=run", "trainer.max_duration=2epoch"]) == 0
    assert Path("run/summary.json").exists()
