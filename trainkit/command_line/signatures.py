"""What a `_target_` takes.

A class or function that is defined plainly at the top of a module is read as text, without importing it. For
everything else (decorators, metaclasses, several base classes, names that are made when the module runs) the module
is imported and asked.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from trainkit.command_line.accepted import ANYTHING, Accepted, read_annotation
from trainkit.command_line.extras import remedy
from trainkit.command_line.source import TargetError, definition, is_module, missing_package
from trainkit.errors import nearest

# By their signatures they take anything, and refuse it when they run.
_WITHOUT_ARGUMENTS = (("trainkit.task", "TaskModule"), ("torch.nn.modules.module", "Module"))


@dataclass(frozen=True)
class Parameter:
    """One argument that can be given by name."""

    required: bool = False
    accepted: Accepted = ANYTHING
    default: str = ""
    """As it is written in Python; empty where there is none."""
    annotation: str = ""
    """As it is written in Python; empty where there is none."""


@dataclass(frozen=True)
class Signature:
    """The arguments that can be given by name; `open` if others are taken too."""

    parameters: dict[str, Parameter]
    open: bool = False


@cache
def signature_of(target: str) -> Signature:
    """Return what the class or function at the dotted path `target` takes; raises TargetError where there is none."""
    module, attributes = split_target(target)
    missing = missing_package(module)
    if missing is not None:
        raise TargetError(f"{module} needs the package '{missing}', which is not installed. {remedy(missing)}")
    read = _read(module, attributes[0]) if len(attributes) == 1 else None
    return _ask(module, attributes) if read is None else read


def split_target(target: str) -> tuple[str, list[str]]:
    """Return the longest part of `target` that is a module, and the names within it."""
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise TargetError(f"{target!r} is no dotted path; write for example my_package.my_module.MyClass")
    for length in range(len(parts) - 1, 0, -1):
        if is_module(".".join(parts[:length])):
            return ".".join(parts[:length]), parts[length:]
    near = nearest(parts[0], [module.name for module in iter_modules([str(Path.cwd())])])
    raise TargetError(f"there is no module '{parts[0]}' here.{near} {remedy(parts[0])}")


# ---- Reading the source


def _read(module: str, name: str) -> Signature | None:
    """Return the signature of a name as the source tells it; None where it does not."""
    found = definition(module, name)
    if found is None:
        return None
    home, statement = found
    if isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
        return _of_arguments(home, statement.args, bound=False)
    if isinstance(statement, ast.ClassDef) and not statement.decorator_list and not statement.keywords:
        return Signature({}) if (home, statement.name) in _WITHOUT_ARGUMENTS else _read_class(home, statement)
    return None


def _read_class(module: str, statement: ast.ClassDef) -> Signature | None:
    functions = {item.name: item for item in statement.body if isinstance(item, ast.FunctionDef)}
    constructor = functions.get("__init__")
    assigned = [ast.unparse(item) for item in statement.body if isinstance(item, ast.Assign)]
    if "__new__" in functions or any("__init__" in text or "__new__" in text for text in assigned):
        return None
    if constructor is not None:
        return None if constructor.decorator_list else _of_arguments(module, constructor.args, bound=True)
    if not statement.bases:
        return Signature({})
    base = statement.bases[0]
    return _read(module, base.id) if len(statement.bases) == 1 and isinstance(base, ast.Name) else None


def _of_arguments(module: str, arguments: ast.arguments, *, bound: bool) -> Signature:
    by_position = [*arguments.posonlyargs, *arguments.args]
    num_required = len(by_position) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*[None] * num_required, *arguments.defaults]
    given = [
        pair
        for index, pair in enumerate(zip(by_position, defaults, strict=True))
        if index >= max(bound, len(arguments.posonlyargs))
    ]
    given += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters = {argument.arg: _parameter(module, argument, default) for argument, default in given}
    return Signature(parameters, open=arguments.kwarg is not None)


def _parameter(module: str, argument: ast.arg, default: ast.expr | None) -> Parameter:
    return Parameter(
        required=default is None,
        accepted=_accepted(module, argument),
        default="" if default is None else ast.unparse(default),
        annotation="" if argument.annotation is None else ast.unparse(argument.annotation),
    )


def _accepted(module: str, argument: ast.arg) -> Accepted:
    def alias(name: str) -> ast.expr | None:
        found = definition(module, name)
        return found[1].value if found is not None and isinstance(found[1], ast.Assign) else None

    accepted = ANYTHING if argument.annotation is None else read_annotation(argument.annotation, alias)
    if "duration" in (accepted.kinds or ()) and definition(module, "Duration") != definition(
        "trainkit.duration", "Duration"
    ):
        return ANYTHING  # another class of that name
    return accepted


# ---- Asking the object


def _ask(module: str, attributes: list[str]) -> Signature:
    found = _imported(module)
    for depth, attribute in enumerate(attributes):
        if not hasattr(found, attribute):
            where = ".".join([module, *attributes[:depth]])
            public = [name for name in dir(found) if not name.startswith("_")]
            public += [below.name for below in iter_modules(getattr(found, "__path__", []))]
            raise TargetError(f"{where} has no '{attribute}'.{nearest(attribute, public)}")
        found = getattr(found, attribute)
    if not callable(found):
        name = ".".join([module, *attributes])
        raise TargetError(f"{name} is a {type(found).__name__}; a _target_ is a class or function.")
    if inspect.isclass(found) and getattr(found.__init__, "__qualname__", "") == "Module.__init__":
        return Signature({})
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # a builtin that does not say
        return Signature({}, open=True)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = {
        name: Parameter(
            required=parameter.default is parameter.empty,
            accepted=_of_annotation(parameter.annotation),
            default="" if parameter.default is parameter.empty else repr(parameter.default),
            annotation=_text_of(parameter.annotation),
        )
        for name, parameter in signature.parameters.items()
        if parameter.kind in named
    }
    return Signature(parameters, open=any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()))


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise TargetError(
            f"{module} needs the package '{missing}', which is not installed. {remedy(missing)}"
        ) from None


def _of_annotation(annotation: Any) -> Accepted:
    if annotation is inspect.Parameter.empty:
        return ANYTHING
    try:
        return read_annotation(ast.parse(_text_of(annotation), mode="eval").body, lambda name: None)
    except SyntaxError:
        return ANYTHING


def _text_of(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
