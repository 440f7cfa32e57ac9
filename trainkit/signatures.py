"""What a `_target_` takes, read from its source where that is enough, so that no slow package has to be imported.

A class or function that is defined plainly at the top of a module is read as text. For everything else (decorators,
metaclasses, several base classes, names that are made when the module runs) the module is imported and asked.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from trainkit.accepted import ANYTHING, Accepted, read_annotation
from trainkit.errors import UserError, nearest
from trainkit.extras import remedy

_SUPPLIED_FIRST = ("self", "cls")
# They take any arguments by their signature, and refuse each of them when they run.
_WITHOUT_ARGUMENTS = ("torch.nn.Module", "torch.nn.modules.module.Module", "trainkit.task.TaskModule")


class TargetError(UserError):
    """A `_target_` that leads nowhere."""


@dataclass(frozen=True)
class Parameter:
    """One argument that can be given by name."""

    required: bool = False
    accepted: Accepted = ANYTHING


@dataclass(frozen=True)
class Signature:
    """The arguments that can be given by name; `open` if others are taken too."""

    parameters: dict[str, Parameter]
    open: bool = False


@cache
def signature_of(target: str) -> Signature:
    """Return what the class or function at the dotted path `target` takes; raises TargetError where there is none."""
    module, attributes = _split(target)
    missing = _missing_package(module)
    if missing is not None:
        raise TargetError(f"{module} needs the package '{missing}', which is not installed. {remedy(missing)}")
    if len(attributes) == 1:
        read = _read(module, attributes[0], depth=0)
        if read is not None:
            return read
    return _ask(module, attributes)


def _split(target: str) -> tuple[str, list[str]]:
    """Return the longest part of `target` that is a module, and the names within it."""
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise TargetError(f"{target!r} is not a dotted path; write _target_: my_package.my_module.MyClass")
    for length in range(len(parts) - 1, 0, -1):
        if _is_module(".".join(parts[:length])):
            return ".".join(parts[:length]), parts[length:]
    if parts[0] in sys.modules or _is_module(parts[0]):
        raise AssertionError("the first part is a module")  # the loop ends with it
    near = nearest(parts[0], _top_level_names())
    raise TargetError(f"there is no module '{parts[0]}' here.{near} {remedy(parts[0])}")


@cache
def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and (error.name == name or name.startswith(f"{error.name}.")):
            return False  # a part of the name itself is no package
        raise TargetError(f"{name} needs the package '{error.name}', which is not installed. {remedy(error.name)}") from None


def _top_level_names() -> list[str]:
    """Return the modules that lie in the working folder: what a mistyped name most likely meant."""
    return [module.name for module in iter_modules([str(Path.cwd())])]


# ---- Reading the source


@cache
def _tree(module: str) -> ast.Module | None:
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_text(encoding="utf-8"), filename=spec.origin)
    except SyntaxError as error:
        raise TargetError(f"{module} cannot be read: {error.msg} ({spec.origin}:{error.lineno})") from None
    except OSError:
        return None


def _missing_package(module: str) -> str | None:
    """Return the first package that the module imports when it runs and that is not installed."""
    tree = _tree(module)
    for statement in [] if tree is None else tree.body:
        names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        if isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            names = [statement.module]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.modules and not _is_module(top):
                return top
    return None


def _read(module: str, name: str, *, depth: int) -> Signature | None:
    """Return the signature of a name as the module's source tells it; None where it does not."""
    if f"{module}.{name}" in _WITHOUT_ARGUMENTS:
        return Signature({})
    tree = _tree(module)
    statement = None if tree is None or depth > 10 else _defined(tree, name)
    if isinstance(statement, ast.ImportFrom):
        home = _home(module, statement, name)
        return None if home is None else _read(*home, depth=depth + 1)
    if isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
        return _of_arguments(module, statement.args, bound=False)
    if not isinstance(statement, ast.ClassDef) or statement.decorator_list or statement.keywords:
        return None
    methods = {item.name: item for item in statement.body if isinstance(item, ast.FunctionDef)}
    constructor = methods.get("__init__")
    if "__new__" in methods or (constructor is not None and constructor.decorator_list):
        return None
    if constructor is not None:
        return _of_arguments(module, constructor.args, bound=True)
    if any("__init__" in ast.unparse(item) for item in statement.body if isinstance(item, ast.Assign)):
        return None
    if not statement.bases:
        return Signature({})
    if len(statement.bases) == 1 and isinstance(statement.bases[0], ast.Name):
        return _read(module, statement.bases[0].id, depth=depth + 1)
    return None


def _defined(tree: ast.Module, name: str) -> ast.stmt | None:
    """Return the statement at the top of a module that gives `name` its meaning; None if several do."""
    found: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)) and statement.name == name:
            found.append(statement)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            if any((alias.asname or alias.name) == name for alias in statement.names):
                found.append(statement)
        elif isinstance(statement, ast.Assign):
            if any(isinstance(target, ast.Name) and target.id == name for target in statement.targets):
                found.append(statement)
        elif any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
            if isinstance(statement, (ast.If, ast.Try, ast.With, ast.For)):
                return None
    return found[0] if len(found) == 1 else None


def _home(module: str, statement: ast.ImportFrom, name: str) -> tuple[str, str] | None:
    """Return the module and the name there of what `statement` imports as `name`."""
    original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
    source = statement.module or ""
    if statement.level:
        spec = find_spec(module)
        package = module if spec is not None and spec.submodule_search_locations else module.rpartition(".")[0]
        parts = package.split(".")
        source = ".".join(filter(None, [*parts[: len(parts) - statement.level + 1], source]))
    return (source, original) if source and _is_module(source) else None


def _of_arguments(module: str, arguments: ast.arguments, *, bound: bool) -> Signature:
    by_position = [*arguments.posonlyargs, *arguments.args][1 if bound else 0 :]
    num_optional = len(arguments.defaults)
    parameters = {}
    for index, argument in enumerate(by_position):
        required = index < len(by_position) - num_optional
        parameters[argument.arg] = Parameter(required, _accepted(module, argument))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters[argument.arg] = Parameter(default is None, _accepted(module, argument))
    for argument in arguments.posonlyargs:
        parameters.pop(argument.arg, None)
    return Signature(parameters, open=arguments.kwarg is not None)


def _accepted(module: str, argument: ast.arg) -> Accepted:
    return ANYTHING if argument.annotation is None else read_annotation(argument.annotation, lambda n: _alias(module, n))


def _alias(module: str, name: str, depth: int = 0) -> ast.expr | None:
    """Return what `name` stands for, where it is `name = ...` in the module or one that it imports it from."""
    tree = _tree(module)
    statement = None if tree is None or depth > 5 else _defined(tree, name)
    if isinstance(statement, ast.Assign):
        return statement.value
    if isinstance(statement, ast.ImportFrom):
        home = _home(module, statement, name)
        return None if home is None else _alias(*home, depth=depth + 1)
    return None


# ---- Asking the object


def _ask(module: str, attributes: list[str]) -> Signature:
    found: Any = _imported(module)
    for depth, attribute in enumerate(attributes):
        if not hasattr(found, attribute):
            where = ".".join([module, *attributes[:depth]])
            public = [name for name in dir(found) if not name.startswith("_")]
            raise TargetError(f"{where} has no '{attribute}'.{nearest(attribute, public)}")
        found = getattr(found, attribute)
    if not callable(found):
        raise TargetError(f"{module}.{'.'.join(attributes)} is a {type(found).__name__}; a _target_ is a class or function.")
    constructor = getattr(found, "__init__", None)
    if inspect.isclass(found) and getattr(constructor, "__qualname__", "") == "Module.__init__":
        return Signature({})  # of torch.nn: it takes anything by its signature, and refuses it when it runs
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # a builtin that does not say
        return Signature({}, open=True)
    parameters = {
        name: Parameter(parameter.default is parameter.empty, _of_annotation(parameter.annotation))
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    is_open = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return Signature(parameters, open=is_open)


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise TargetError(
            f"{module} needs the package '{error.name}', which is not installed. {remedy(error.name or '')}"
        ) from None


def _of_annotation(annotation: Any) -> Accepted:
    if annotation is inspect.Parameter.empty:
        return ANYTHING
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    try:
        return read_annotation(ast.parse(text, mode="eval").body, lambda name: None)
    except SyntaxError:
        return ANYTHING
