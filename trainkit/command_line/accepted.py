"""Which plain values an argument takes, as its annotation tells."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainkit.errors import UserError, nearest

_KINDS = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "Path": "str",
    "PathLike": "str",
    "None": "none",
    "NoneType": "none",
    "Duration": "duration",
    **dict.fromkeys(("list", "List", "Sequence", "Iterable", "Collection", "tuple", "Tuple", "set", "Set"), "list"),
    **dict.fromkeys(("dict", "Dict", "Mapping", "MutableMapping"), "dict"),
}
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "none": "null",
    "list": "a list",
    "dict": "a mapping",
    "duration": "a duration such as 500step, 2epoch or 30min",
}


@dataclass(frozen=True)
class Accepted:
    """Kinds of plain values, and single values; `None` for kinds: anything."""

    kinds: frozenset[str] | None
    choices: tuple[Any, ...] = ()

    def __or__(self, other: Accepted) -> Accepted:
        if self.kinds is None or other.kinds is None:
            return ANYTHING
        return Accepted(self.kinds | other.kinds, self.choices + other.choices)

    def complaint(self, value: Any) -> str | None:
        """Return why `value` cannot be right, `None` if it can."""
        if self.kinds is None or any(value == choice and type(value) is type(choice) for choice in self.choices):
            return None
        kind = _kind_of(value)
        if kind is None or kind in self.kinds - {"str", "list"} or (kind == "int" and "float" in self.kinds):
            return None
        if "duration" in self.kinds and kind not in ("dict", "none"):
            return _complaint_about_durations(value)
        if kind in self.kinds:
            return None
        near = nearest(str(value), [str(choice) for choice in self.choices])
        if kind == "float" and value == int(value) and "int" in self.kinds:
            near = f" Write {int(value)}."
        if "str" in self.kinds and kind in ("int", "float", "bool"):
            near = f" Write '\"{_shown(value)}\"' to have it as text."
        return (
            f"{_shown(value)} is {_WORDS[kind]}, but must be {self}.{near}"
            if not self.choices
            else (f"{_shown(value)} is not {self}.{near}")
        )

    def __str__(self) -> str:
        words = [_shown(choice) for choice in self.choices]
        words += [_WORDS[kind] for kind in _WORDS if kind in (self.kinds or ())]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else "anything"


ANYTHING = Accepted(None)


def read_annotation(node: ast.expr, alias: Callable[[str], ast.expr | None], depth: int = 0) -> Accepted:
    """Return what an annotation accepts; `alias` returns what a name that is none of ours stands for."""
    if depth > 8:
        return ANYTHING
    if isinstance(node, ast.Constant):
        return _read_constant(node.value, alias, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return read_annotation(node.left, alias, depth + 1) | read_annotation(node.right, alias, depth + 1)
    if isinstance(node, ast.Subscript):
        return _read_subscript(node, alias, depth)
    name = _name(node)
    if name in _KINDS:
        return Accepted(frozenset({_KINDS[name]}))
    meaning = alias(name) if isinstance(node, ast.Name) else None
    return ANYTHING if meaning is None else read_annotation(meaning, alias, depth + 1)


def _read_constant(value: Any, alias: Callable[[str], ast.expr | None], depth: int) -> Accepted:
    if not isinstance(value, str):
        return Accepted(frozenset({"none"})) if value is None else ANYTHING
    try:
        return read_annotation(ast.parse(value, mode="eval").body, alias, depth + 1)
    except SyntaxError:
        return ANYTHING


def _read_subscript(node: ast.Subscript, alias: Callable[[str], ast.expr | None], depth: int) -> Accepted:
    name = _name(node.value)
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        values = tuple(item.value for item in items if isinstance(item, ast.Constant))
        return Accepted(frozenset(), values) if len(values) == len(items) else ANYTHING
    if name in ("Optional", "Union", "Annotated"):
        accepted = read_annotation(items[0], alias, depth + 1)
        for item in items[1:] if name == "Union" else []:
            accepted = accepted | read_annotation(item, alias, depth + 1)
        return accepted | Accepted(frozenset({"none"})) if name == "Optional" else accepted
    return Accepted(frozenset({_KINDS[name]})) if name in _KINDS else ANYTHING


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _kind_of(value: Any) -> str | None:
    kinds = {bool: "bool", int: "int", float: "float", str: "str", type(None): "none", list: "list", dict: "dict"}
    return kinds.get(type(value))


def _complaint_about_durations(value: Any) -> str | None:
    from trainkit.duration import Duration

    try:
        Duration.parse_all(value, where="it")
    except UserError as error:
        return str(error).removeprefix("it = ")
    return None


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
