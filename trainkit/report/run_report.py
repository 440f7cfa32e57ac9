"""The report of one run, written when the run ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from trainkit.console import seconds, size
from trainkit.errors import Stopped
from trainkit.files import open_new
from trainkit.report.charts import chart, curve_charts, kind_of_metric, timeline_chart
from trainkit.report.config_diff import ConfigChange, write_config_diff
from trainkit.report.html import (
    SafeHtml,
    Section,
    element,
    join_html,
    kpi_tile,
    number,
    page,
    pairs,
    short,
    table,
)
from trainkit.report.record import CONFIG, METRICS, PARTITION, SUMMARY, RunData, is_run, read_run
from trainkit.report.step_breakdown import breakdown, memory_series, profile_part, waiting_chart
from trainkit.run_dir.failure import FailureRecord, clear_failures, record_failure_of_caller

# Errors whose message is enough; the traceback is folded.
_FOLDED = ("UserError", "NonFiniteLoss", "CheckpointError", "ConfigError", "RankFailure")
_PYTHON_HEADING = "Traceback (most recent call last)"
_TRACES = ("*trace*.json*", "timeline_rank_*.json")
_LINKED = (CONFIG, METRICS, SUMMARY, PARTITION, "rank_*.log", *_TRACES, "learning_rates.html", "predictions.pt")
REPORT = "report.html"
COMPARISON = "comparison.html"

logger = logging.getLogger(__name__)


def run_report(record: RunData) -> str:
    """Return the HTML of a run's report."""
    parts = (_learning, _speed, _timeline, _memory, _checkpoints, _warnings, _settings, _environment, _files)
    sections = [section for part in parts if (section := part(record)) is not None]
    header = join_html(_title(record), _failure(record), _tiles(record))
    return page(f"{record.recipe} · {record.folder.absolute().name}", header=header, sections=sections)


# ---- The head


def _title(record: RunData) -> SafeHtml:
    environment, summary = record.environment, record.summary
    # A failure has a section of its message, so that the reason is not shown twice.
    reason = summary.get("exit_reason") if record.status != "failed" else None
    if record.status == "unfinished":
        reason = "no end was recorded: the run is still running, or was killed"
    started = environment.get("started")
    when = f"{datetime.fromtimestamp(started):%Y-%m-%d %H:%M}" if isinstance(started, int | float) else ""
    layout = [environment.get("strategy"), environment.get("plan"), environment.get("precision")]
    badge = element("span", record.status, class_=f"badge {record.status}")
    note = element("span", reason, class_="muted") if reason else None
    folder = record.folder.absolute()
    items = [f"{folder.parent.name}/{folder.name}", when, *layout]
    return join_html(
        element("div", element("h1", record.recipe), badge, note, class_="title-line"),
        element("p", " · ".join(str(item) for item in items if item), class_="subtitle"),
    )


def _tiles(record: RunData) -> SafeHtml:
    summary, environment = record.summary, record.environment
    tiles: list[SafeHtml] = []
    best = record.best
    if best is not None and record.manifest is not None and record.manifest.monitor is not None:
        metric = record.manifest.monitor.metric
        tiles.append(kpi_tile(f"best {metric}", number(best.metrics[metric]), f"at step {best.step:,}"))
    for name in ("validation/loss", "validation/accuracy", "train/loss"):
        if name in record.metrics and len(tiles) < 3:
            tiles.append(kpi_tile(f"last {name}", number(record.metrics[name])))
    steps = summary.get("steps", max((curve.steps[-1] for curve in record.curves.values()), default=None))
    if steps is not None:
        planned = environment.get("max_steps")
        note = f"of {planned:,} planned" if isinstance(planned, int) and planned > steps else ""
        tiles.append(kpi_tile("steps", f"{steps:,}", note))
    if summary:
        tiles.append(kpi_tile("epochs", f"{float(summary.get('epochs', 0)):.4g}"))
        tiles.append(kpi_tile("time", seconds(float(summary.get("seconds", 0)))))
        rate = float(summary.get("samples_per_second", 0))
        tiles.append(kpi_tile("samples per second", f"{rate:,.0f}" if rate >= 100 else number(rate), "whole run"))
    parameters = environment.get("parameters")
    if isinstance(parameters, int):
        tiles.append(kpi_tile("parameters", short(float(f"{parameters:.3g}"))))
    return element("dl", *tiles, class_="tiles")


# ---- The sections


def _learning(record: RunData) -> Section | None:
    marks = {int(loss["step"]): str(loss["lost"]) for loss in record.rank_losses}
    charts = curve_charts({"": record.curves}, kinds=("learning", "optimization"), marks=marks)
    if not charts:
        written = (record.folder / METRICS).is_file()
        hint = "nothing was logged yet" if written else "no metrics.jsonl was written; add the logger jsonl"
        return Section("learning", "Learning curves", element("p", f"No curves: {hint}.", class_="muted"))
    rows = [
        [name, number(value)] for name, value in sorted(record.metrics.items()) if kind_of_metric(name) == "learning"
    ]
    final = element("details", element("summary", "last values"), table(["metric", "last"], rows))
    grid = element("div", *charts, class_="charts")
    note = (
        "A value of training is the mean since the log point before, and is drawn at the middle of these steps. In a "
        "failed run the losses of rank 0 since the last log point follow, step by step."
    )
    content = join_html(grid, element("p", note, class_="muted"), _rank_losses(record), final if rows else None)
    return Section("learning", "Learning curves", content)


def _rank_losses(record: RunData) -> SafeHtml | None:
    """Return a table of the ranks that died while the run went on, which the charts mark."""
    if not record.rank_losses:
        return None
    rows = [
        [number(loss["step"]), str(loss["lost"]), str(loss["from"]), f"{loss['seconds']:.1f} s", str(loss["ranks"])]
        for loss in record.rank_losses
    ]
    columns = ["step", "lost", "went on from", "after", "ranks"]
    summary = element("summary", f"ranks lost {_counted(len(rows), 'time', 's')}, marked in the charts")
    return element("details", summary, table(columns, rows), open=True)


def _speed(record: RunData) -> Section | None:
    parts = [breakdown(record.step_times), profile_part(record.profile)]
    charts = curve_charts({"": record.curves}, kinds=("speed",))
    waiting = waiting_chart(record.step_times)
    if waiting is not None:
        charts.append(waiting)
    if not charts and not any(parts):
        return None
    grid = element("div", *charts, class_="charts")
    return Section("speed", "Where the time goes", join_html(parts[0], grid, parts[1]))


def _timeline(record: RunData) -> Section | None:
    timeline = record.timeline
    if timeline is None:
        return None
    partition = None
    if record.partition:
        partition = element("details", element("summary", "partition of the task"), element("pre", record.partition))
    return Section("timeline", f"One step under {timeline.strategy}", join_html(timeline_chart(timeline), partition))


def _memory(record: RunData) -> Section | None:
    charts = curve_charts({"": record.curves}, kinds=("memory",))
    measured = memory_series(record.step_times)
    if measured:
        charts.insert(0, chart("memory (MiB)", measured, from_zero=True))
    return Section("memory", "Memory", element("div", *charts, class_="charts")) if charts else None


def _checkpoints(record: RunData) -> Section | None:
    if record.manifest is None or not record.manifest.entries:
        return None
    monitor, best = record.manifest.monitor, record.best
    entries = record.manifest.entries
    rows = [
        [
            join_html(entry.name, " ", element("span", "★ best", title="best checkpoint") if entry is best else None),
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
    continued = f"To continue: trainkit resume {record.folder.absolute() if near.startswith('..') else near}"
    content = join_html(table(columns, rows, best=marked), element("p", element("code", continued), class_="muted"))
    return Section("checkpoints", "Checkpoints", content)


def _warnings(record: RunData) -> Section | None:
    if not record.warnings:
        return None
    items = []
    for item in record.warnings:
        source = f"rank {item.get('process', 0)}, {str(item.get('where', '')).rpartition('/')[2]}"
        items.append(element("li", str(item.get("text", "")), " ", element("span", source, class_="muted")))
    content = element("div", element("ul", *items, class_="warnings"), class_="table-frame")
    return Section("warnings", f"Warnings ({len(items)})", content)


def _settings(record: RunData) -> Section | None:
    if not record.config:
        text = "The run was started from Python, without a config."
        return Section("settings", "Settings", element("p", text, class_="muted"))
    changes = record.config_diff
    if changes is None:
        summary = element("p", "No recipe to compare with.", class_="muted")
    elif not changes:
        summary = element("p", f"As the recipe {record.recipe} says.")
    else:
        rows = [[element("code", text or "-") for text in (it.key, it.before, it.after)] for it in changes]
        differences = table(["key", "recipe", "this run"], rows)
        summary = join_html(element("p", f"Against the recipe {record.recipe}:"), differences)
    config_text = element("pre", (record.folder / CONFIG).read_text(encoding="utf-8", errors="replace"))
    details = element("details", element("summary", "all settings"), config_text)
    return Section("settings", "Settings", join_html(summary, details))


def _environment(record: RunData) -> Section | None:
    facts = record.environment
    if not facts:
        return None
    git = facts.get("git")
    commit = f"{git['commit'][:12]}{', with uncommitted changes' if git.get('dirty') else ''}" if git else ""
    versions = ", ".join(f"{name} {version}" for name, version in (facts.get("versions") or {}).items())
    plan = facts.get("plan") or "pre-batched dataset"
    threads = _counted(facts.get("threads"), "thread", "s")
    items: list[tuple[str, SafeHtml | str | None]] = [
        ("command", element("code", facts["command"]) if facts.get("command") else None),
        ("task", f"{facts.get('task')}, {number(facts.get('parameters', 0))} parameters"),
        ("layout", f"{facts.get('strategy')}, {_counted(facts.get('processes'), 'process', 'es')}: {plan}"),
        ("device", str(facts.get("device", ""))),
        ("precision", str(facts.get("precision", ""))),
        ("seed", str(facts.get("seed", ""))),
        ("resumed from", str(facts.get("resumed_from") or "")),
        ("git", commit),
        ("versions", versions),
        ("system", f"{facts.get('system')}, {facts.get('cpus')} CPUs, {threads} a process"),
    ]
    return Section("environment", "Environment", element("div", pairs(items), class_="card"))


def _counted(count: object, noun: str, plural: str) -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def _files(record: RunData) -> Section | None:
    names = sorted({path.name for pattern in _LINKED for path in record.folder.glob(pattern)})
    if not names:
        return None
    listed = [join_html(element("a", name, href=quote(name)), "  ") for name in names]
    note = element("p", "Chrome traces (.json) open in ui.perfetto.dev or chrome://tracing.", class_="muted")
    traces = any("trace" in name or name.startswith("timeline_rank") for name in names)
    return Section("files", "Files", element("div", element("p", *listed), note if traces else None, class_="card"))


def _failure(record: RunData) -> SafeHtml | None:
    """Return the failure section: the first failure, and those of all ranks; `None` if the run did not fail."""
    cause = record.cause
    if record.status != "failed":
        return None
    if cause is None:
        reason = str(record.summary.get("exit_reason", "an error that was not recorded"))
        return element("div", element("h2", "The run failed"), element("p", reason, class_="message"), class_="failure")
    when = f"{datetime.fromtimestamp(cause.when):%Y-%m-%d %H:%M:%S}"
    traceback = element("pre", cause.traceback.strip()) if cause.traceback else None
    folded = cause.error in _FOLDED
    if traceback is not None and (folded or _PYTHON_HEADING in cause.traceback):
        traceback = element("details", element("summary", "traceback"), traceback, open=not folded)
    logs = [
        element("details", element("summary", f"last lines of {name}"), element("pre", tail))
        for name, tail in record.logs.items()
    ]
    return element(
        "div",
        element("h2", f"The run failed: {cause.error}"),
        element("p", cause.message, class_="message"),
        pairs([("where", _where(cause)), ("when", when)]),
        traceback,
        _others(record, cause),
        join_html(element("h3", "Last events"), *logs) if logs else None,
        class_="failure",
        id="failure",
    )


def _where(cause: FailureRecord) -> str:
    if cause.process is None:
        return "the process that started the ranks"
    step = f"after step {cause.step:,}" if cause.step else "before the first step"
    evaluation = f", in the evaluation of {cause.evaluation}" if cause.evaluation else ""
    return ", ".join(part for part in (f"rank {cause.process}", step, cause.phase) if part) + evaluation


def _others(record: RunData, cause: FailureRecord) -> SafeHtml | None:
    """Return a table of the ranks that recorded a failure, the first on top; `None` if only the cause did."""
    ranks = [item for item in record.failures if item.process is not None]
    if not [item for item in ranks if item is not cause]:
        return None
    rows = []
    for item in ranks:
        first_line = item.message.splitlines()[0] if item.message else ""
        late = f"+{item.when - ranks[0].when:.2f} s"
        rows.append([f"rank {item.process}", late, str(item.step), item.phase, f"{item.error}: {first_line}"])
    return join_html(element("h3", "All ranks"), table(["", "failed", "steps", "in", "with"], rows))


@contextmanager
def reported(
    folder: Path, *, is_main: Callable[[], bool], config_diff: Callable[[], Sequence[ConfigChange] | None]
) -> Iterator[None]:
    """Write the report of the run in `folder` when the block ends, with or without an error.

    For the process that starts the ranks, or each rank under torchrun: `is_main`, called at the end, returns True if it
    writes. `config_diff` returns the differences of the config to its recipe, `None` if unknown. An error in
    writing is only logged.
    """
    # Of an earlier run in this folder, which a resume continues: its failures would be shown as those of this one.
    clear_failures(folder)
    try:
        yield
    # Also KeyboardInterrupt and SystemExit: a report matters most for a run that ended early.
    except BaseException as error:
        if folder.is_dir() and not isinstance(error, Stopped):
            record_failure_of_caller(folder, error)
        if is_run(folder):
            record = _write_or_warn(folder, config_diff)
            if record is not None:
                cause = record.cause
                # Shown below the traceback.
                position = [] if cause is None or cause.process is None else [_where(cause)]
                error.add_note("\n".join([*position, f"report: {folder / REPORT}"]))
        raise
    if is_main() and folder.is_dir():
        _write_or_warn(folder, config_diff)


def write_report(folder: Path) -> Path:
    """Write the report of the run in `folder` and return its path; raises UserError if there is no run."""
    return _write(read_run(folder))


def _write(record: RunData) -> Path:
    return write_page(run_report(record), record.folder / REPORT)


def write_page(text: str, path: Path) -> Path:
    """Write a file atomically and return its path."""
    # With the process's number: under torchrun several may write at once.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(open_new(part), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _write_or_warn(folder: Path, config_diff: Callable[[], Sequence[ConfigChange] | None]) -> RunData | None:
    """Write the report and return what it shows; `None` if it could not be written."""
    try:
        changes = config_diff()
        if changes is not None:
            write_config_diff(folder, changes)
        record = read_run(folder)
        _write(record)
        return record
    # The run has ended, and must not fail because of its report.
    except Exception as error:
        logger.warning("the report of %s could not be written: %s: %s", folder, type(error).__name__, error)
        return None
