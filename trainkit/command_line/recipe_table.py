"""The table of recipes: name, what it is, and what to type."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import yaml

from trainkit.command_line.cli import Arguments
from trainkit.command_line.command_help import choices


def recipes(arguments: Arguments) -> int:
    """Print a line for each recipe of the package and of the given config folders."""
    rows = [
        (name, _line(path.read_text(encoding="utf-8"))) for name, path in sorted(choices(arguments, "recipe").items())
    ]
    folders = "".join(f" --config-dir {folder}" for folder in arguments.config_dirs)
    width = max((len(name) for name, _ in rows), default=0)
    for name, line in rows:
        print(f"{name:<{width}}  {line}\n{'':<{width}}  trainkit fit{folders} recipe={name}\n")
    return 0


def _line(text: str) -> str:
    """Return the first line of the docstring of the module that a recipe's task is in; it is not imported."""
    settings = yaml.safe_load(text) or {}
    target = str((settings.get("task") or {}).get("_target_", ""))
    try:
        spec = find_spec(target.rpartition(".")[0])
        docstring = (
            ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) if spec and spec.origin else ""
        )
    except (ImportError, ValueError, SyntaxError, OSError):
        return f"({target} cannot be read)"
    return (docstring or "").strip().partition("\n")[0]
