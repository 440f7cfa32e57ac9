"""HTML and SVG whose texts cannot be mistaken for markup."""

from __future__ import annotations

from html import escape


class Markup(str):
    """A text that is markup already; any other text is escaped where it is put into an element."""

    __slots__ = ()


Content = Markup | str | int | float | None
_VOID = frozenset({"meta", "link", "br", "hr", "img", "input", "rect", "line", "polyline", "path", "circle", "polygon"})


def element(name: str, /, *children: Content, **attributes: str | int | float | bool | None) -> Markup:
    """Return `<name attribute="...">children</name>`; `None` children and attributes are left out.

    A trailing underscore of an attribute's name is dropped (`class_`), others become hyphens (`stroke_width`).
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID and not children:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{joined(*children)}</{name}>")


def joined(*children: Content) -> Markup:
    """Return the children one after the other, those that are plain text escaped."""
    return Markup("".join(_escaped(child) for child in children if child is not None))


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def _escaped(child: Content) -> str:
    return child if isinstance(child, Markup) else escape(str(child))
