"""Comparison of several runs: curves, final metrics and differing settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from os.path import commonpath
from pathlib import Path

from trainkit.console import seconds
from trainkit.errors import UserError
from trainkit.report.charts import curve_charts, kind_of_metric
from trainkit.report.config_diff import differing_keys
from trainkit.report.html import Content, SafeHtml, Section, element, join_html, number, page, table
from trainkit.report.record import RunData
from trainkit.report.step_breakdown import breakdown
from trainkit.report.sweep_report import Job, job_names, read_sweep

_SMALL_IS_GOOD = ("loss", "error", "perplexity", "bits_per_character", "mae", "mse")
_OF_LAST_INTERVAL = ("train/samples_per_second", "train/steps_per_second")
_LARGE_IS_GOOD = ("accuracy", "f1", "auc", "precision", "recall", "per_second", "mfu")


def comparison_report(records: Sequence[RunData]) -> str:
    """Return the HTML of a comparison with the first run."""
    names = short_names(records)
    sections = [
        Section("result", "Result", _result(records, names)),
        Section("speed", "Speed", _speed(records, names)),
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


def _result(records: Sequence[RunData], names: Sequence[str]) -> SafeHtml:
    """Return the best value of what each run monitors, the last values of what its steps return, and their curves."""
    rows: list[Sequence[Content]] = [_row("steps", _of_summaries(records, "steps"))]
    monitors = [None if record.manifest is None else record.manifest.monitor for record in records]
    for monitor in dict.fromkeys(filter(None, monitors)):
        best = [
            record.best if monitored == monitor else None for record, monitored in zip(records, monitors, strict=True)
        ]
        values = [None if entry is None else entry.metrics.get(monitor.metric) for entry in best]
        rows.append(_row(f"best {monitor.metric}", values, monitor.mode))
    rows += _last_values(records, kinds=("learning", "optimization"))
    return join_html(table(["metric", *names], rows, numbers=True), _curves(records, names, kinds=("learning",)))


def _speed(records: Sequence[RunData], names: Sequence[str]) -> SafeHtml:
    """Return the times and rates of the runs, and where the time goes."""
    times = _of_summaries(records, "seconds")
    rows: list[Sequence[Content]] = [["time", *("-" if value is None else seconds(value) for value in times)]]
    rows.append(_row("samples per second, whole run", _of_summaries(records, "samples_per_second"), "max"))
    # Those of the last log point say less than those of the whole run.
    rows += [row for row in _last_values(records, kinds=("speed", "memory")) if row[0] not in _OF_LAST_INTERVAL]
    curves = _curves(records, names, kinds=("speed", "memory"))
    return join_html(table(["", *names], rows, numbers=True), curves, _breakdowns(records, names))


def _of_summaries(records: Sequence[RunData], key: str) -> list[float | None]:
    return [float(record.summary[key]) if key in record.summary else None for record in records]


def _last_values(records: Sequence[RunData], *, kinds: tuple[str, ...]) -> list[Sequence[Content]]:
    metric_names = dict.fromkeys(name for record in records for name in record.metrics)
    wanted = [name for name in metric_names if kind_of_metric(name) in kinds]
    wanted.sort(key=lambda name: (name.startswith("train/"), name))
    return [_row(name, [record.metrics.get(name) for record in records], _goal(name)) for name in wanted]


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


def _curves(records: Sequence[RunData], names: Sequence[str], *, kinds: tuple[str, ...]) -> SafeHtml | None:
    charts = curve_charts({name: record.curves for name, record in zip(names, records, strict=True)}, kinds=kinds)
    return element("div", *charts, class_="charts") if charts else None


def _breakdowns(records: Sequence[RunData], names: Sequence[str]) -> SafeHtml | None:
    sections = [(name, breakdown(record.step_times)) for name, record in zip(names, records, strict=True)]
    parts = [element("div", element("h3", name), part) for name, part in sections if part is not None]
    return element("div", *parts, class_="charts") if parts else None


def _differences(records: Sequence[RunData], names: Sequence[str]) -> Section | None:
    if not all(record.config for record in records):
        return None
    rows = differing_keys([record.config for record in records])
    if all(record.config_diff is not None for record in records):
        # Another strategy brings keys of its own: of these only what somebody has set.
        typed = {change.key for record in records for change in record.config_diff or ()}
        rows = [(key, values) for key, values in rows if not key.startswith("strategy.") or key in typed]
    layouts = [str(record.environment.get("strategy", "")) for record in records]
    if len(set(layouts)) > 1:
        rows.insert(0, ("strategy", layouts))
    if not rows:
        return Section("setup", "Setup", element("p", "No differences."))
    cells = [
        [
            element("code", key),
            *(element("code", v or "-", class_="differs" if v != values[0] else None) for v in values),
        ]
        for key, values in rows
    ]
    return Section("setup", "Setup", table(["key that differs", *names], cells))
