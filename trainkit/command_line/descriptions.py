"""What the docstring of a `_target_` says of it and of each argument; read as text, nothing is imported for it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache

from trainkit.command_line.signatures import split_target
from trainkit.command_line.source import TargetError, definition

_ARGUMENT = re.compile(r"^( +)(\*{0,2}\w+)(?: *\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class Description:
    """What a class or function is, and what its arguments mean."""

    summary: str = ""
    """The docstring's first paragraph, on one line."""
    arguments: dict[str, str] = field(default_factory=dict)
    """The meaning of each argument, on one line."""


@cache
def description_of(target: str) -> Description:
    """Return what the docstring at the dotted path `target` says; of a class without one, what its base's says."""
    try:
        module, names = split_target(target)
    except TargetError:
        return Description()
    return _described(module, names[0]) if len(names) == 1 else Description()


def read_docstring(docstring: str) -> Description:
    """Return the parts of a docstring with a section `Args:`."""
    lines = docstring.expandtabs().splitlines()
    paragraph = docstring.strip().split("\n\n")[0]
    start = next((index + 1 for index, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:")), len(lines))
    arguments: dict[str, str] = {}
    indent, name = None, ""
    for line in lines[start:]:
        if line.strip() and not line.startswith(" "):
            break  # the next section
        found = _ARGUMENT.match(line)
        if found and (indent is None or len(found[1]) <= indent):
            indent, name = len(found[1]), found[2].lstrip("*")
            arguments[name] = found[3].strip()
        elif name and line.strip():
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return Description(" ".join(paragraph.split()), arguments)


def _described(module: str, name: str) -> Description:
    found = definition(module, name)
    if found is None:
        return Description()
    home, statement = found
    if isinstance(statement, ast.FunctionDef):
        return read_docstring(ast.get_docstring(statement) or "")
    if not isinstance(statement, ast.ClassDef):
        return Description()
    own = read_docstring(ast.get_docstring(statement) or "")
    functions = {item.name: item for item in statement.body if isinstance(item, ast.FunctionDef)}
    constructor = functions.get("__init__")
    arguments = dict(own.arguments)
    if constructor is not None:
        arguments = read_docstring(ast.get_docstring(constructor) or "").arguments | arguments
    bases = [base.id for base in statement.bases if isinstance(base, ast.Name)]
    for base in bases:
        above = _described(home, base)
        arguments = above.arguments | arguments
        own = own if own.summary else above
    return Description(own.summary, arguments)
