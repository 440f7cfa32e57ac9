"""A whole page: the head with its style, the sections, and nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources

from trainkit.report.markup import Content, Markup, element, joined

# Nothing is fetched, whatever a hostile name may have smuggled in.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Section:
    """A part of a page, with a place in the list at its top."""

    key: str
    title: str
    content: Markup


def page(title: str, *, header: Markup, sections: Sequence[Section]) -> str:
    """Return the document."""
    links = [element("a", section.title, href=f"#{section.key}") for section in sections]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", title),
        element("style", Markup(_file("page.css"))),
    )
    body = element(
        "body",
        element("header", header, element("nav", *links) if len(links) > 2 else None),
        element("main", *(_section(section) for section in sections)),
        element("footer", _footer()),
        element("script", Markup(_file("page.js"))),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def table(columns: Sequence[Content], rows: Sequence[Sequence[Content]], *, best: int | None = None) -> Markup:
    """Return a table whose first column names the rows; cells that are numbers go to the right."""
    numeric = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    head = element(
        "tr", *(element("th", name, class_="number" if numeric[i] else None) for i, name in enumerate(columns))
    )
    body = [
        element(
            "tr",
            *(
                element("th", cell, scope="row", class_="text")
                if i == 0
                else element("td", cell, class_="number" if numeric[i] else "text")
                for i, cell in enumerate(row)
            ),
            class_="best" if number == best else None,
        )
        for number, row in enumerate(rows)
    ]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="table-frame")


def pairs(items: Sequence[tuple[str, Content]]) -> Markup:
    """Return names with what they stand for, those without a value left out."""
    known = [(name, value) for name, value in items if value not in (None, "")]
    return element("dl", *(joined(element("dt", name), element("dd", value)) for name, value in known), class_="pairs")


def tile(name: str, value: str, note: str = "") -> Markup:
    """Return a figure that stands out."""
    long = "long" if len(value) > 16 else None
    return element(
        "div",
        element("dt", name),
        element("dd", value, element("small", note) if note else None, class_=long),
        class_="tile",
    )


def _section(section: Section) -> Markup:
    return element("section", element("h2", section.title), section.content, id=section.key)


def _is_number(cell: Content) -> bool:
    if isinstance(cell, int | float):
        return True
    text = "" if cell is None or isinstance(cell, Markup) else str(cell)
    return cell == "" or text[:1].isdigit() or text[:1] in ("-", "∞") or text == "NaN"


def _footer() -> str:
    from trainkit import __version__

    return f"Written by trainkit {__version__}, {datetime.now():%Y-%m-%d %H:%M:%S}."


def _file(name: str) -> str:
    return (resources.files("trainkit.report") / name).read_text(encoding="utf-8")
