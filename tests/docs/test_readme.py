"""The table of extras in the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_extra_of_the_package_is_in_the_table():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| extra | needed for |")[2].partition("\n\n")[0]
    first_column = [row.split("|")[1] for row in table.splitlines() if row]
    named = re.findall(r"`(\w+)`", " ".join(first_column))
    assert sorted(named) == sorted(project["optional-dependencies"])
