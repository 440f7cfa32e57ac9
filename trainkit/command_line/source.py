"""What a module's source tells of its names, so that no slow package has to be imported to know it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from trainkit.command_line.extras import remedy
from trainkit.errors import UserError

_MOST_HOPS = 10


class TargetError(UserError):
    """A `_target_` that leads nowhere."""


@cache
def spec_of(name: str) -> ModuleSpec | None:
    """Return where a module is, as `find_spec` does; packages around it are imported only if there is no other way."""
    module = sys.modules.get(name)
    if module is not None and module.__spec__ is not None:
        return module.__spec__
    parent = name.rpartition(".")[0]
    if not parent:
        return find_spec(name)
    path = getattr(sys.modules.get(parent), "__path__", None)
    if path is None:
        around = spec_of(parent)
        path = None if around is None else around.submodule_search_locations
    found = None if path is None else _found_below(name, list(path))
    return found or find_spec(name)


def _found_below(name: str, path: list[str]) -> ModuleSpec | None:
    for finder in sys.meta_path:
        found = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if found is not None:
            return found
    return None


@cache
def is_module(name: str) -> bool:
    """Return whether a module can be found. Raises TargetError if a package around it cannot be imported."""
    try:
        return spec_of(name) is not None
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            return False  # a part of the name itself is no package
        raise TargetError(f"{name} needs the package '{missing}', which is not installed. {remedy(missing)}") from None
    except ValueError:  # a module that was made while running
        return name in sys.modules


@cache
def tree_of(module: str) -> ast.Module | None:
    """Return a module's source, read; None if it is not written in Python. Raises TargetError for wrong syntax."""
    spec = spec_of(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_text(encoding="utf-8"), filename=spec.origin)
    except SyntaxError as error:
        raise TargetError(f"{module} cannot be read: {error.msg} ({spec.origin}:{error.lineno})") from None
    except OSError:
        return None


def missing_package(module: str) -> str | None:
    """Return the first package that the module imports when it runs and that is not installed."""
    tree = tree_of(module)
    for statement in [] if tree is None else tree.body:
        names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        if isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            names = [statement.module]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.modules and not is_module(top):
                return top
    return None


def definition(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Return the statement that gives `name` its meaning, and the module it is in; imports are followed.

    None where the source alone does not tell: several statements do, or one inside an `if` or `try`.
    """
    for _ in range(_MOST_HOPS):
        tree = tree_of(module)
        statement = None if tree is None else _at_the_top(tree, name)
        if not isinstance(statement, ast.ImportFrom):
            return None if statement is None else (module, statement)
        home = _home(module, statement, name)
        if home is None:
            return None
        module, name = home
    return None


def _at_the_top(tree: ast.Module, name: str) -> ast.stmt | None:
    meanings = [statement for statement in _statements(tree.body) if _may_define(statement, name)]
    plain = (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Assign)
    return meanings[0] if len(meanings) == 1 and isinstance(meanings[0], plain) else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, and in place of an `if TYPE_CHECKING:` those in it."""
    for statement in body:
        is_typing = isinstance(statement, ast.If) and _is_name(statement.test, "TYPE_CHECKING") and not statement.orelse
        yield from statement.body if isinstance(statement, ast.If) and is_typing else [statement]


def _may_define(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return statement.name == name
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return any((alias.asname or alias.name) == name for alias in statement.names)
    if isinstance(statement, (ast.Expr, ast.AnnAssign)):
        return isinstance(statement, ast.AnnAssign) and _is_name(statement.target, name)
    if isinstance(statement, ast.Assign):
        return any(_is_name(target, name) for target in statement.targets)
    return any(_is_name(node, name) or getattr(node, "name", None) == name for node in ast.walk(statement))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _home(module: str, statement: ast.ImportFrom, name: str) -> tuple[str, str] | None:
    """Return the module and the name there of what `statement` imports as `name`."""
    original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
    source = statement.module or ""
    if statement.level:
        spec = spec_of(module)
        is_package = spec is not None and spec.submodule_search_locations is not None
        parts = module.split(".") if is_package else module.split(".")[:-1]
        source = ".".join(filter(None, [*parts[: len(parts) - statement.level + 1], source]))
    return (source, original) if source and is_module(source) else None
