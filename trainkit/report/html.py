"""HTML pages, tables and sections, escaping, and number formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib import resources
from itertools import chain

from trainkit import __version__

# The browser fetches nothing, even if a hostile name contains markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_VOID = frozenset({"meta", "link", "br", "hr", "img", "input", "rect", "line", "polyline", "path", "circle", "polygon"})
_POWERS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Section:
    """A section of a page, with a link in the navigation."""

    key: str
    title: str
    content: SafeHtml


def page(title: str, *, header: SafeHtml, sections: Sequence[Section]) -> str:
    """Return the document."""
    links = [element("a", section.title, href=f"#{section.key}") for section in sections]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", title),
        element("style", SafeHtml(_file("page.css"))),
    )
    body = element(
        "body",
        element("header", header, element("nav", *links) if len(links) > 2 else None),
        element("main", *(element("section", element("h2", s.title), s.content, id=s.key) for s in sections)),
        element("footer", f"Written by trainkit {__version__}, {datetime.now():%Y-%m-%d %H:%M:%S}."),
        element("script", SafeHtml(_file("page.js"))),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def table(
    columns: Sequence[Content], rows: Sequence[Sequence[Content]], *, best: int | None = None, numbers: bool = False
) -> SafeHtml:
    """Return a table whose first column names the rows, with the row `best` marked.

    Columns of numbers are right-aligned; with `numbers` all but the first are, also if their cells are markup.
    """
    kinds = ["text"]
    for index in range(1, len(columns)):
        is_numeric = numbers or (bool(rows) and all(_is_number(row[index]) for row in rows))
        kinds.append("number" if is_numeric else "text")
    head = [element("th", name, class_=kind) for name, kind in zip(columns, kinds, strict=True)]
    body = []
    for number_of_row, (name, *values) in enumerate(rows):
        cells = [element("td", value, class_=kind) for value, kind in zip(values, kinds[1:], strict=True)]
        heading = element("th", name, scope="row", class_="text")
        body.append(element("tr", heading, *cells, class_="best" if number_of_row == best else None))
    content = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    return element("div", content, class_="table-frame")


def pairs(items: Sequence[tuple[str, Content]]) -> SafeHtml:
    """Return a list of names and values, without empty values."""
    filled = [(element("dt", name), element("dd", value)) for name, value in items if value not in (None, "")]
    return element("dl", *(part for pair in filled for part in pair), class_="pairs")


def figures(items: Sequence[tuple[str, str, str]]) -> SafeHtml | None:
    """Return a row of figures, each a name, a value and a note, without empty values; `None` if all are empty."""
    filled = [
        element(
            "div", element("dt", name), element("dd", value, element("span", note, class_="muted") if note else None)
        )
        for name, value, note in items
        if value
    ]
    return element("dl", *filled, class_="figures") if filled else None


def kpi_tile(name: str, value: str, note: str = "") -> SafeHtml:
    """Return a tile with one figure."""
    shown = element("dd", value, element("small", note) if note else None, class_="long" if len(value) > 16 else None)
    # Between the parts of a name first: in a narrow tile it would break inside of a word.
    first, *parts = name.split("/")
    breakable = join_html(first, *chain.from_iterable(("/", SafeHtml("<wbr>"), part) for part in parts))
    return element("div", element("dt", breakable), shown, class_="tile")


def _is_number(cell: Content) -> bool:
    if isinstance(cell, int | float):
        return True
    text = "" if cell is None or isinstance(cell, SafeHtml) else str(cell)
    # The signs with which `number` and `short` begin.
    return cell == "" or text[:1].isdigit() or text[:1] in ("-", "∞") or text == "NaN"


def _file(name: str) -> str:
    return (resources.files("trainkit.report") / name).read_text(encoding="utf-8")


class SafeHtml(str):
    """Text that is markup; any other text is escaped when it is put into an element."""

    __slots__ = ()


Content = SafeHtml | str | int | float | None


def element(name: str, /, *children: Content, **attributes: str | int | float | bool | None) -> SafeHtml:
    """Return `<name attribute="...">children</name>`; `None` children and attributes are dropped.

    A trailing underscore of an attribute's name is dropped (`class_`), others become hyphens (`stroke_width`).
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    # A `rect` may have a title inside; without children these have no closing tag.
    if name in _VOID and not children:
        return SafeHtml(f"<{opening}/>")
    return SafeHtml(f"<{opening}>{join_html(*children)}</{name}>")


def join_html(*children: Content) -> SafeHtml:
    """Return the children concatenated, plain text escaped."""
    return SafeHtml("".join(_escaped(child) for child in children if child is not None))


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def _escaped(child: Content) -> str:
    return child if isinstance(child, SafeHtml) else escape(str(child))


def number(value: float) -> str:
    """Return a number with four significant digits: `12,345`, `0.01235`, `1.2e-05`, `28.7G`, `NaN`."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if abs(value) >= 1e8:
        return short(float(f"{value:.4g}")) if abs(value) < 1e15 else f"{value:.4g}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def short(value: float) -> str:
    """Return a number for the ticks of an axis: `0.25`, `12k`, `3M`."""
    for power, letter in _POWERS:
        if abs(value) >= power:
            return f"{value / power:.4g}{letter}"
    return f"{value:.6g}"


def share(value: float) -> str:
    """Return a fraction as `12.3 %`."""
    return f"{100 * value:.1f} %"


def ticks(low: float, high: float, *, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    # A little less, as rounding must not choose the next larger step.
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
