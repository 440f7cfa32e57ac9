"""The report of one run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

from trainkit.report.chart import chart, chart_grid
from trainkit.report.config_changes import Change, as_text, read_changes
from trainkit.report.failure_part import failure_part
from trainkit.report.gantt import timeline_figure, timeline_figures
from trainkit.report.markup import Markup, element, joined
from trainkit.report.metric_charts import curve_charts, kind_of
from trainkit.report.metrics import METRICS
from trainkit.report.numbers import number, seconds, short, size
from trainkit.report.page import Section, page, pairs, table, tile
from trainkit.report.record import RunRecord, files_beside
from trainkit.report.step_breakdown import breakdown, memory_series, profile_part, waiting_chart


def run_page(record: RunRecord) -> str:
    """Return the HTML of a run's report."""
    sections = [
        _learning(record),
        _speed(record),
        _timeline(record),
        _memory(record),
        _checkpoints(record),
        _warnings(record),
        _settings(record),
        _environment(record),
        _files(record),
    ]
    header = joined(_title(record), failure_part(record), _tiles(record))
    title = f"{record.recipe} · {record.folder.absolute().name}"
    return page(title, header=header, sections=[section for section in sections if section is not None])


# ---- The head


def _title(record: RunRecord) -> Markup:
    environment, summary = record.environment, record.summary
    reason = summary.get("exit_reason") if record.status != "failed" else None
    if record.status == "unfinished":
        reason = "no end was recorded: the run is still going on, or it was killed"
    started = environment.get("started")
    when = f"{datetime.fromtimestamp(started):%Y-%m-%d %H:%M}" if isinstance(started, int | float) else ""
    layout = [environment.get("strategy"), environment.get("plan"), environment.get("precision")]
    return joined(
        element(
            "div",
            element("h1", record.recipe),
            element("span", record.status, class_=f"badge {record.status}"),
            element("span", reason, class_="muted") if reason else None,
            class_="title-line",
        ),
        element("p", " · ".join(str(part) for part in (record.name, when, *layout) if part), class_="subtitle"),
    )


def _tiles(record: RunRecord) -> Markup:
    summary, environment = record.summary, record.environment
    tiles: list[Markup] = []
    best = record.best
    if best is not None and record.manifest is not None and record.manifest.monitor is not None:
        metric = record.manifest.monitor.metric
        tiles.append(tile(f"best {metric}", number(best.metrics[metric]), f"at step {best.step:,}"))
    for name in ("validation/loss", "validation/accuracy", "train/loss"):
        if name in record.metrics and len(tiles) < 3:
            tiles.append(tile(f"last {name}", number(record.metrics[name])))
    steps = summary.get("steps", max((curve.steps[-1] for curve in record.curves.values()), default=None))
    if steps is not None:
        planned = environment.get("max_steps")
        note = f"of {planned:,} planned" if isinstance(planned, int) and planned > steps else ""
        tiles.append(tile("steps", f"{steps:,}", note))
    if summary:
        tiles.append(tile("epochs", f"{float(summary.get('epochs', 0)):.4g}"))
        tiles.append(tile("time", seconds(float(summary.get("seconds", 0)))))
        rate = float(summary.get("samples_per_second", 0))
        tiles.append(tile("samples a second", f"{rate:,.0f}" if rate >= 100 else number(rate), "whole run"))
    parameters = environment.get("parameters")
    if isinstance(parameters, int):
        tiles.append(tile("parameters", short(float(f"{parameters:.3g}"))))
    return element("dl", *tiles, class_="tiles")


# ---- The sections


def _learning(record: RunRecord) -> Section | None:
    charts = curve_charts({"": record.curves}, kinds=("learning", "optimization"))
    if not charts:
        written = (record.folder / METRICS).is_file()
        hint = "nothing was logged yet" if written else "no metrics.jsonl was written; add the logger jsonl"
        return Section("learning", "Learning curves", element("p", f"There are no curves: {hint}.", class_="muted"))
    rows = [[name, number(value)] for name, value in sorted(record.metrics.items()) if kind_of(name) == "learning"]
    final = element("details", element("summary", "last values"), table(["metric", "last"], rows))
    return Section("learning", "Learning curves", joined(chart_grid(charts), final if rows else None))


def _speed(record: RunRecord) -> Section | None:
    parts = [breakdown(record.step_times), profile_part(record.profile)]
    charts = curve_charts({"": record.curves}, kinds=("speed",))
    waiting = waiting_chart(record.step_times)
    if waiting is not None:
        charts.append(waiting)
    if not charts and not any(parts):
        return None
    return Section("speed", "Where the time goes", joined(parts[0], chart_grid(charts), parts[1]))


def _timeline(record: RunRecord) -> Section | None:
    timeline = record.timeline
    if timeline is None:
        return None
    partition = None
    if record.partition:
        partition = element("details", element("summary", "how the task was cut"), element("pre", record.partition))
    content = joined(timeline_figure(timeline), timeline_figures(timeline), partition)
    return Section("timeline", f"One step under {timeline.strategy}", content)


def _memory(record: RunRecord) -> Section | None:
    charts = curve_charts({"": record.curves}, kinds=("memory",))
    measured = memory_series(record.step_times)
    if measured:
        charts.insert(0, chart("memory (MiB)", measured))
    return Section("memory", "Memory", chart_grid(charts)) if charts else None


def _checkpoints(record: RunRecord) -> Section | None:
    if record.manifest is None or not record.manifest.entries:
        return None
    monitor, best = record.manifest.monitor, record.best
    entries = record.manifest.entries
    rows = [
        [
            joined(entry.name, " ", element("span", "★ best", title="the best") if entry is best else None),
            f"{entry.step:,}",
            number(entry.metrics[monitor.metric]) if monitor and monitor.metric in entry.metrics else "-",
            entry.reason,
            size(entry.size),
        ]
        for entry in entries
    ]
    columns = ["checkpoint", "step", monitor.metric if monitor else "metric", "saved because", "size"]
    marked = entries.index(best) if best is not None else None
    near = os.path.relpath(record.folder)
    continued = f"Continue: trainkit resume {record.folder.absolute() if near.startswith('..') else near}"
    content = joined(table(columns, rows, best=marked), element("p", element("code", continued), class_="muted"))
    return Section("checkpoints", "Checkpoints", content)


def _warnings(record: RunRecord) -> Section | None:
    if not record.warnings:
        return None
    items = [
        element("li", str(item.get("text", "")), " ", element("span", _source(item), class_="muted"))
        for item in record.warnings
    ]
    return Section(
        "warnings",
        f"Warnings ({len(items)})",
        element("div", element("ul", *items, class_="warnings"), class_="table-frame"),
    )


def _source(item: Mapping[str, object]) -> str:
    return f"rank {item.get('process', 0)}, {str(item.get('where', '')).rpartition('/')[2]}"


def _settings(record: RunRecord) -> Section | None:
    if not record.config:
        text = "The run was started from Python without a config; its code is what it did."
        return Section("settings", "Settings", element("p", text, class_="muted"))
    changes = read_changes(record.folder)
    if changes is None:
        said = element("p", "There is no recipe to compare with.", class_="muted")
    elif not changes:
        said = element("p", f"As the recipe {record.recipe} says.")
    else:
        said = joined(
            element("p", f"Against the recipe {record.recipe}:"), changes_table(changes, ("recipe", "this run"))
        )
    whole = element("pre", "\n".join(_yaml_lines(record.config)))
    return Section("settings", "Settings", joined(said, element("details", element("summary", "all settings"), whole)))


def changes_table(changes: Iterable[Change], names: tuple[str, str]) -> Markup:
    """Return a row for each key that differs."""
    rows = [
        [element("code", change.key), element("code", change.before or "-"), element("code", change.after or "-")]
        for change in changes
    ]
    return table(["key", *names], rows)


def _yaml_lines(tree: Mapping[str, object], indent: int = 0) -> Iterable[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield f"{' ' * indent}{key}:"
            yield from _yaml_lines(value, indent + 2)
        else:
            yield f"{' ' * indent}{key}: {as_text(value)}"


def _environment(record: RunRecord) -> Section | None:
    known = record.environment
    if not known:
        return None
    git = known.get("git")
    commit = f"{git['commit'][:12]}{', with changes that are not committed' if git.get('dirty') else ''}" if git else ""
    versions = known.get("versions")
    items: list[tuple[str, Markup | str | None]] = [
        ("command", element("code", known["command"]) if known.get("command") else None),
        ("task", f"{known.get('task')}, {number(known.get('parameters', 0))} parameters"),
        ("layout", _layout(known)),
        ("device", str(known.get("device", ""))),
        ("precision", str(known.get("precision", ""))),
        ("seed", str(known.get("seed", ""))),
        ("resumed from", str(known.get("resumed_from") or "")),
        ("git", commit),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items()) if versions else ""),
        ("system", f"{known.get('system')}, {known.get('cpus')} CPUs, {known.get('threads')} thread(s) a process"),
    ]
    return Section("environment", "Environment", element("div", pairs(items), class_="card"))


def _layout(known: Mapping[str, Any]) -> str:
    return f"{known.get('strategy')}, {known.get('processes')} process(es): {known.get('plan') or 'ready-made batches'}"


def _files(record: RunRecord) -> Section | None:
    names = files_beside(record.folder)
    if not names:
        return None
    links = [element("a", name, href=quote(name)) for name in names]
    listed = [joined(link, "  ") for link in links]
    note = element("p", "Chrome traces (.json) open in ui.perfetto.dev or chrome://tracing.", class_="muted")
    traces = any("trace" in name or name.startswith("timeline_rank") for name in names)
    return Section("files", "Files", element("div", element("p", *listed), note if traces else None, class_="card"))
