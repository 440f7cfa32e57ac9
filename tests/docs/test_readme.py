"""The table of extras and the picture in the README."""

import html
import re
import tomllib
from pathlib import Path

from trainkit.cli.main import main

ROOT = Path(__file__).parents[2]


def test_every_extra_of_the_package_is_in_the_table():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| extra | needed for |")[2].partition("\n\n")[0]
    first_column = [row.split("|")[1] for row in table.splitlines() if row]
    named = re.findall(r"`(\w+)`", " ".join(first_column))
    assert sorted(named) == sorted(project["optional-dependencies"])


def test_the_picture_of_a_run_shows_a_command_that_can_be_typed(capsys):
    picture = html.unescape((ROOT / "docs/images/progress.svg").read_text(encoding="utf-8")).replace("\xa0", " ")
    (command,) = re.findall(r">(trainkit fit [^<]+)<", picture)
    assert main([*command.split()[1:], "--cfg", "job"]) == 0, capsys.readouterr().err
