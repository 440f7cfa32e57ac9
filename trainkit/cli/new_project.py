"""`trainkit new NAME`: a project with a task, data, a recipe and a test that pass as they are."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from trainkit.cli.main import Arguments
from trainkit.errors import UserError
from trainkit.storage import local_path

if TYPE_CHECKING:
    from importlib.abc import Traversable  # it moves in later versions of Python

_EXAMPLE = "trainkit new my_project"


def new(arguments: Arguments) -> int:
    """Write the project in a new folder."""
    if len(arguments.overrides) != 1:
        raise UserError(f"new takes one name. Type {_EXAMPLE}")
    path = local_path(arguments.overrides[0], what="the folder of a project")
    _check_name(path)
    for written in create_project(path):
        print(f"  {written}")
    print(f"\ncd {path}\ntrainkit fit --config-dir conf recipe={path.name}\npython -m pytest")
    return 0


def create_project(path: Path) -> list[Path]:
    """Write the files of a project named as the folder `path`, and return their paths."""
    names = {"name": path.name, "prefix": "".join(word.capitalize() for word in path.name.split("_"))}
    return list(_written(resources.files("trainkit.cli") / "template", path, names))


def _written(template: Traversable, folder: Path, names: Mapping[str, str]) -> Iterator[Path]:
    """Write a folder of templates; `package` and `name` in file names stand for the project's name."""
    folder.mkdir(parents=True, exist_ok=True)
    # Sorted, as file systems list folders in any order and the paths are printed.
    for source in sorted(template.iterdir(), key=lambda source: source.name):
        name = source.name.removesuffix(".template")
        if source.is_dir():
            yield from _written(source, folder / (names["name"] if name == "package" else name), names)
        else:
            file = folder / name.replace("name", names["name"])
            file.write_text(Template(source.read_text(encoding="utf-8")).substitute(names), encoding="utf-8")
            yield file


def _check_name(path: Path) -> None:
    name = path.name
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name != name.strip("_"):
        near = "".join(letter if letter.isalnum() else "_" for letter in name.lower()).strip("_") or "my_project"
        near = (
            near if near.isidentifier() and not keyword.iskeyword(near) and not _is_taken(near) else f"project_{near}"
        )
        raise UserError(f"'{name}' is not a valid package name. Did you mean '{near}'? Type trainkit new {near}")
    if _is_taken(name):
        raise UserError(f"'{name}' is the name of another package; choose another name. Type {_EXAMPLE}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already; choose another name.")


def _is_taken(name: str) -> bool:
    """Return True for folders of every project, and for modules that can be imported from outside of this folder."""
    here = Path.cwd()
    elsewhere = [folder for folder in sys.path if folder and Path(folder).absolute() != here]
    reserved = {"conf", "runs", "tests", "trainkit", *sys.stdlib_module_names}
    # Not by importing: that runs a package's code.
    return name in reserved or PathFinder.find_spec(name, elsewhere) is not None
