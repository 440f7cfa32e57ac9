"""The private names of torch that the sources use: each is there, and in the table of docs/architecture.md."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("trainkit", "strategies", "callbacks", "recipes")


def is_private(name: str) -> bool:
    return any(re.match(r"_(?!_)", part) for part in name.split("."))


def names_in(source: str) -> set[str]:
    """Return the private names of torch in a source, in full, as it imports them or reaches them by attributes."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.asname or name.name.split(".")[0]: name.name for name in node.names if name.asname}
            imported |= {"torch": "torch"} if any(name.name.split(".")[0] == "torch" for name in node.names) else {}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            imported |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return imported.get(node.id, "") if isinstance(node, ast.Name) else ""

    reached = {dotted(node) for node in ast.walk(tree) if isinstance(node, (ast.Attribute, ast.Name))}
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    names = {name for name in {*imported.values(), *reached, *modules} if name.split(".")[0] == "torch"}
    # A name that another continues is only on the way to it.
    return {name for name in names if is_private(name) and not any(other.startswith(name + ".") for other in names)}


def used() -> set[str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return set().union(*(names_in(path.read_text()) for path in files))


def listed() -> list[str]:
    section = (ROOT / "docs/architecture.md").read_text().split("## Private names of torch")[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def resolved(name: str) -> Any:
    """Return what a dotted name names; raises AttributeError with the name if it is gone."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


def test_every_private_name_of_torch_is_listed_and_every_listed_one_is_used():
    names, rows = used(), listed()
    assert len(rows) == len(set(rows)) > 20
    assert [name for name in sorted(names) if not any((name + ".").startswith(row + ".") for row in rows)] == []
    assert [row for row in rows if not any((name + ".").startswith(row + ".") for name in names)] == []


@pytest.mark.parametrize("name", sorted(used()))
def test_this_torch_has_the_private_name(name):
    resolved(name)  # raises AttributeError


def test_names_are_found_however_they_are_imported():
    source = """
import torch, torch.distributed as dist
import torch._functorch.apis as functions
from torch.autograd import Variable as V
from torch._subclasses.fake_tensor import FakeTensor
torch._C._x.y(V._engine.call(), dist._store(), torch.Tensor.__add__, functions.vmap)
"""
    assert names_in(source) == {
        "torch._C._x.y",
        "torch.autograd.Variable._engine.call",
        "torch.distributed._store",
        "torch._functorch.apis.vmap",
        "torch._subclasses.fake_tensor.FakeTensor",
    }
    with pytest.raises(AttributeError, match="_no_such_name"):
        resolved("torch._C._no_such_name")
