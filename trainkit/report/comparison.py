"""Comparison of several runs: curves, final metrics and differing settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from os.path import commonpath
from pathlib import Path

from trainkit.console import seconds
from trainkit.errors import UserError
from trainkit.logger import kind_of_metric
from trainkit.report.charts import curve_charts
from trainkit.report.config_diff import differing_keys
from trainkit.report.html import Content, SafeHtml, Section, element, join_html, number, page, table
from trainkit.report.record import RunData
from trainkit.report.step_breakdown import breakdown
from trainkit.report.sweep_report import Job, job_names, read_sweep

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
    lines = []
    for index, (record, name) in enumerate(zip(records, names, strict=True)):
        layout = record.environment.get("strategy", "")
        text = f"{name}: {record.status}{f', {layout}' if layout else ''}"
        lines.append(element("li", element("i", class_=f"swatch c{index % 8}"), text))
    header = join_html(element("h1", f"{len(records)} runs of {kinds}"), element("ul", *lines, class_="legend runs"))
    shown = [section for section in sections if section is not None]
    return page(f"Comparison: {', '.join(names)}", header=header, sections=shown)


def short_names(records: Sequence[RunData]) -> list[str]:
    """Return the overrides in which jobs of one sweep differ, or else the distinct parts of the folders' paths."""
    folders = [record.folder.absolute() for record in records]
    jobs: dict[Path, Job] = {}
    with suppress(UserError):  # not a sweep
        jobs = {folders[0].parent / job.run_dir: job for job in read_sweep(folders[0].parent).jobs}
    if all(folder in jobs for folder in folders):
        names = job_names([jobs[folder].values for folder in folders])
        if len(set(names)) == len(names):
            return names
    # The common folder of all runs: what follows it tells them apart.
    common = commonpath([str(folder.parent) for folder in folders])
    return [str(folder)[len(common) :].lstrip("/") or str(folder) for folder in folders]


def _metrics(records: Sequence[RunData], names: Sequence[str]) -> SafeHtml:
    metric_names = dict.fromkeys(name for record in records for name in record.metrics)
    wanted = sorted(
        (name for name in metric_names if kind_of_metric(name)), key=lambda name: (name.startswith("train/"), name)
    )
    times = [record.summary.get("seconds") for record in records]
    rows: list[Sequence[Content]] = [
        _row("steps", [float(record.summary["steps"]) if "steps" in record.summary else None for record in records]),
        ["time", *("-" if value is None else seconds(float(value)) for value in times)],
        *(_row(name, [record.metrics.get(name) for record in records], _goal(name)) for name in wanted),
    ]
    return table(["metric", *names], rows, numbers=True)


def _row(name: str, values: Sequence[float | None], goal: str = "") -> list[Content]:
    """Return a row with the best value marked, and the difference of each to the first run's."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    # Of equal values none is the best.
    best = {"min": min, "max": max}[goal](finite) if goal and len(set(finite)) > 1 else None
    base = values[0]
    cells: list[Content] = [name]
    for index, value in enumerate(values):
        text = "-" if value is None else number(value)
        note = None
        if index and value is not None and base and math.isfinite(value) and math.isfinite(base) and value != base:
            note = element("small", f" {100 * (value / base - 1):+.1f} %", class_="muted")
        emphasised = element("b", text, class_="good") if value is not None and value == best else text
        cells.append(join_html(emphasised, note))
    return cells


def _goal(name: str) -> str:
    base = name.rpartition("/")[2]
    if base.endswith(_SMALL_IS_GOOD):
        return "min"
    return "max" if base.endswith(_LARGE_IS_GOOD) else ""


def _curves(
    key: str, title: str, records: Sequence[RunData], names: Sequence[str], *, kinds: tuple[str, ...]
) -> Section | None:
    charts = curve_charts({name: record.curves for name, record in zip(names, records, strict=True)}, kinds=kinds)
    return Section(key, title, element("div", *charts, class_="charts")) if charts else None


def _breakdowns(records: Sequence[RunData], names: Sequence[str]) -> Section | None:
    sections = [(name, breakdown(record.step_times)) for name, record in zip(names, records, strict=True)]
    parts = [element("div", element("h3", name), part) for name, part in sections if part is not None]
    return Section("breakdown", "Where the time goes", element("div", *parts, class_="charts")) if parts else None


def _differences(records: Sequence[RunData], names: Sequence[str]) -> Section | None:
    if not all(record.config for record in records):
        return None
    rows = differing_keys([record.config for record in records])
    if not rows:
        return Section("settings", "Settings", element("p", "No differences."))
    cells = [
        [
            element("code", key),
            *(element("code", v or "-", class_="differs" if v != values[0] else None) for v in values),
        ]
        for key, values in rows
    ]
    return Section("settings", "Differing settings", table(["key", *names], cells))
