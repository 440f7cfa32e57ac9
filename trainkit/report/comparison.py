"""Comparison of several runs: curves, final metrics and differing settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os.path import commonpath

from trainkit.report.charts import chart_grid, curve_charts, kind_of
from trainkit.report.config_diff import differing_keys
from trainkit.report.html import SafeHtml, Section, element, join_html, number, page, seconds
from trainkit.report.record import RunData
from trainkit.report.step_breakdown import breakdown

_SMALL_IS_GOOD = ("loss", "error", "perplexity", "bits_per_character", "mae", "mse")
_LARGE_IS_GOOD = ("accuracy", "f1", "auc", "precision", "recall", "per_second", "mfu")


def comparison_report(records: Sequence[RunData]) -> str:
    """Return the HTML of a comparison with the first run."""
    names = short_names(records)
    sections = [
        Section("metrics", "Final metrics", _metrics(records, names)),
        _curves("learning", "Learning curves", records, names, kinds=("learning", "optimization")),
        _curves("speed", "Speed", records, names, kinds=("speed", "memory")),
        _breakdowns(records, names),
        _differences(records, names),
    ]
    kinds = " and ".join(dict.fromkeys(record.recipe for record in records))
    header = join_html(
        element("h1", f"{len(records)} runs of {kinds}"),
        element(
            "ul", *(_line(record, names[index], index) for index, record in enumerate(records)), class_="legend runs"
        ),
    )
    return page(
        f"Comparison: {', '.join(names)}",
        header=header,
        sections=[section for section in sections if section is not None],
    )


def short_names(records: Sequence[RunData]) -> list[str]:
    """Return the distinct parts of the folders' paths."""
    folders = [str(record.folder.absolute()) for record in records]
    common = commonpath([str(record.folder.absolute().parent) for record in records])
    return [folder[len(common) :].lstrip("/") or folder for folder in folders]


def _line(record: RunData, name: str, index: int) -> SafeHtml:
    layout = record.environment.get("strategy", "")
    text = f"{name}: {record.status}{f', {layout}' if layout else ''}"
    return element("li", element("i", class_=f"swatch c{index % 8}"), text)


def _metrics(records: Sequence[RunData], names: Sequence[str]) -> SafeHtml:
    known = dict.fromkeys(name for record in records for name in record.metrics)
    wanted = sorted((name for name in known if kind_of(name)), key=lambda name: (name.startswith("train/"), name))
    rows = [
        ("steps", [float(record.summary["steps"]) if "steps" in record.summary else None for record in records], ""),
        *((name, [record.metrics.get(name) for record in records], _goal(name)) for name in wanted),
    ]
    body = [_row(name, values, goal) for name, values, goal in rows]
    times = [record.summary.get("seconds") for record in records]
    cells = [element("td", "-" if value is None else seconds(float(value)), class_="number") for value in times]
    body.insert(1, element("tr", element("th", "time", scope="row"), *cells))
    head = element("tr", element("th", "metric"), *(element("th", name, class_="number") for name in names))
    whole = element("table", element("thead", head), element("tbody", *body))
    return element("div", whole, class_="table-frame")


def _row(name: str, values: Sequence[float | None], goal: str) -> SafeHtml:
    """Return a row with the best value marked, and the difference of each to the first run's."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    best = {"min": min, "max": max}[goal](finite) if goal and len(set(finite)) > 1 else None
    base = values[0]
    cells = []
    for index, value in enumerate(values):
        text = "-" if value is None else number(value)
        note = None
        if index and value is not None and base and math.isfinite(value) and math.isfinite(base) and value != base:
            note = element("small", f" {100 * (value / base - 1):+.1f} %", class_="muted")
        emphasised = element("b", text, class_="good") if value is not None and value == best else text
        cells.append(element("td", join_html(emphasised, note), class_="number"))
    return element("tr", element("th", name, scope="row"), *cells)


def _goal(name: str) -> str:
    base = name.rpartition("/")[2]
    if base.endswith(_SMALL_IS_GOOD):
        return "min"
    return "max" if base.endswith(_LARGE_IS_GOOD) else ""


def _curves(
    key: str, title: str, records: Sequence[RunData], names: Sequence[str], *, kinds: tuple[str, ...]
) -> Section | None:
    charts = curve_charts({name: record.curves for name, record in zip(names, records, strict=True)}, kinds=kinds)
    return Section(key, title, chart_grid(charts)) if charts else None


def _breakdowns(records: Sequence[RunData], names: Sequence[str]) -> Section | None:
    parts = []
    for name, record in zip(names, records, strict=True):
        found = breakdown(record.step_times)
        if found is not None:
            parts.append(element("div", element("h3", name), found))
    return Section("breakdown", "Where the time goes", element("div", *parts, class_="charts")) if parts else None


def _differences(records: Sequence[RunData], names: Sequence[str]) -> Section | None:
    if not all(record.config for record in records):
        return None
    rows = differing_keys([record.config for record in records])
    if not rows:
        return Section("settings", "Settings", element("p", "No differences."))
    head = element("tr", element("th", "key"), *(element("th", name) for name in names))
    body = [
        element(
            "tr",
            element("th", element("code", key), scope="row"),
            *(
                element("td", element("code", value or "-"), class_="text differs" if value != values[0] else "text")
                for value in values
            ),
        )
        for key, values in rows
    ]
    whole = element("table", element("thead", head), element("tbody", *body))
    return Section("settings", "Differing settings", element("div", whole, class_="table-frame"))
