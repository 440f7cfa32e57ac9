"""Modules that importing trainkit loads, and the independence of the core from implementations."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from typing_extensions import is_protocol

import trainkit
import trainkit.strategy

CORE = Path(trainkit.__file__).parent
OUTSIDE_THE_CORE = ("trainkit.strategies", "trainkit.callbacks", "trainkit.recipes")


def loaded_by(statement, *names):
    """Return those of the named modules that a fresh interpreter has loaded after a statement."""
    program = f"import sys; {statement}; print(*[name for name in {names!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    return ended.stdout.split()


def test_import_trainkit_imports_neither_torch_nor_anything_else_that_is_slow():
    slow = ("torch", "numpy", "hydra", "omegaconf", "rich", "tensorboard", "yaml", "sklearn")
    assert loaded_by("import trainkit", *slow) == []


@pytest.mark.slow
def test_the_trainer_imports_no_hydra_rich_or_tensorboard():
    unwanted = ("hydra", "omegaconf", "rich", "tensorboard", "sklearn", "matplotlib")
    assert loaded_by("from trainkit import *", *unwanted) == []


@pytest.mark.parametrize("name", trainkit.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(trainkit, name).__name__ == name


@pytest.mark.parametrize("name", ["DDP", "DataParallel", "FSDP", "Fusion", "Pipeline"])
def test_a_strategy_can_be_imported_from_its_package(name):
    folder = {"DataParallel": "dp"}.get(name, name.lower())
    package = importlib.import_module(f"trainkit.strategies.{folder}")
    assert f"{name}Strategy" in package.__all__
    assert getattr(package, f"{name}Strategy").__name__ == f"{name}Strategy"
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        trainkit.Trianer  # noqa: B018


def test_the_public_names_are_sorted_and_listed_by_dir():
    assert sorted(trainkit.__all__) == trainkit.__all__ == dir(trainkit)


@pytest.mark.parametrize("file", sorted(CORE.rglob("*.py")), ids=lambda file: str(file.relative_to(CORE)))
def test_the_core_imports_no_strategies_callbacks_or_recipes(file):
    for node in ast.walk(ast.parse(file.read_text())):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: the core imports by full names"
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in imported:
            assert not name.startswith(OUTSIDE_THE_CORE), f"line {node.lineno}: {name}"


def test_the_loops_never_ask_which_strategy_they_drive():
    for name in (
        "loops/fit_loop.py",
        "trainer.py",
        "run.py",
        "data/loader.py",
        "metrics/accumulate.py",
        "optim/optimizer.py",
    ):
        tree = ast.parse((CORE / name).read_text())
        asked = [
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "isinstance"
            and "strategy" in ast.unparse(node.args[0]).lower()
            and ast.unparse(node.args[1]) != "str"
            and not is_protocol(getattr(trainkit.strategy, ast.unparse(node.args[1]), object))
        ]
        assert asked == [], name
