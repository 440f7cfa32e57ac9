"""The installed package: the wheel holds the tree, and all ways of installing give a working command line."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The folder at the root, and where its files are found once they are installed.
FOLDERS = {
    "trainkit": "trainkit",
    "strategies": "trainkit/strategies",
    "callbacks": "trainkit/callbacks",
    "conf": "trainkit/conf",
    "recipes": "trainkit/recipes",
}
TINY = ["recipe=digits_mlp", "data.num_train=32", "data.batch_size=16", "trainer.max_duration=2step"]
QUIET = ["callbacks=[]", "logger=[]", "trainer.report=false"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The files that git knows or would take up, so that a build leaves nothing beside them."""
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            *FOLDERS,
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    folder = tmp_path_factory.mktemp("sources")
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "pip", "wheel", *_OFFLINE, "--wheel-dir", folder, sources)
    (path,) = folder.glob("trainkit_torch-*.whl")
    return path


_OFFLINE = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")


def _run(*command, cwd=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=environment,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _environment(folder, *install):
    """Make a virtual environment that borrows all packages of this one but trainkit, and install into it."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    packages = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    borrowed = packages.parent / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "trainkit" not in entry.name and entry.suffix != ".pth":
            (borrowed / entry.name).symlink_to(entry)
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")
    _run(python, "-m", "pip", "install", *_OFFLINE, *install)
    return python


def _works(python, folder, *settings):
    """Check that the command line lists the recipes and trains, started in `folder`."""
    assert "trainkit fit recipe=char_lm" in _run(python, "-m", "trainkit", "recipes", cwd=folder)
    run_dir = python.parent / "run"
    _run(python, "-m", "trainkit", "fit", *TINY, *settings, f"run_dir={run_dir}", cwd=folder)
    assert (run_dir / "summary.json").exists()


def test_the_wheel_holds_every_file_of_the_tree_and_nothing_else(sources, wheel):
    expected = set()
    for folder, installed in FOLDERS.items():
        for path in (sources / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".yaml", ".typed", ".html", ".css", ".js", ".template"):
                expected.add(f"{installed}/{path.relative_to(sources / folder)}")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert expected - found == set(), "name their package in pyproject.toml"
    assert found - expected == set()


def test_the_wheel_puts_one_name_into_site_packages(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"trainkit"}


def test_the_wheel_works_from_another_folder_and_at_the_root(wheel, sources, tmp_path):
    python = _environment(tmp_path / "environment", wheel)
    _works(python, tmp_path)
    assert "trainkit fit recipe=digits" in _run(python.parent / "trainkit", "recipes", cwd=tmp_path)
    find = "from importlib.util import find_spec; print(find_spec('trainkit.strategies.single').origin)"
    where = _run(python, "-c", find, cwd=tmp_path)
    assert str(tmp_path / "environment") in where
    assert "trainkit fit recipe=digits" in _run(python, "-m", "trainkit", "recipes", cwd=sources)
    _run(python, "-m", "trainkit", "fit", *TINY, *QUIET, f"run_dir={tmp_path / 'run'}", cwd=sources)


def test_python_dash_m_works_at_the_root_after_an_editable_install(sources, tmp_path):
    python = _environment(tmp_path / "environment", "-e", sources)
    _works(python, sources, *QUIET)
    assert "trainkit fit recipe=digits" in _run(python, "-m", "trainkit", "recipes", cwd=tmp_path)
