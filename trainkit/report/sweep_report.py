"""The report of a sweep: a table of its jobs, the best first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainkit.errors import UserError
from trainkit.report.html import Content, SafeHtml, Section, element, join_html, number, page, table

SWEEP = "sweep.json"
_MOST_METRICS = 6


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    number: int
    run_dir: str
    """Name of its folder in the sweep's folder."""
    values: dict[str, str]
    """The value typed for each key."""
    metrics: dict[str, float]
    error: str | None
    report: str | None
    """Path of its report, relative to the sweep's folder."""


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep and its objective."""

    jobs: list[Job]
    metric: str
    mode: str

    def rank(self, job: Job) -> tuple[bool, float, int]:
        """Return the key that sorts jobs, the best first, those that failed last."""
        # As in the sweep itself: a run without validation has only the training metric.
        value = job.metrics.get(self.metric, job.metrics.get(f"train/{self.metric.partition('/')[2]}", math.nan))
        lost = job.error is not None or math.isnan(value)
        return lost, 0.0 if lost else value if self.mode == "min" else -value, job.number


def read_sweep(folder: Path) -> Sweep:
    """Return the jobs of a sweep; raises UserError if `sweep.json` cannot be read."""
    try:
        saved = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
        jobs = [_job(folder, outcome) for outcome in saved["jobs"]]
        return Sweep(jobs, str(saved["objective"]["metric"]), str(saved["objective"]["mode"]))
    # The file may be edited or damaged in any way.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / SWEEP} cannot be read: {error}") from None


def differing(values: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ between jobs; for a single job all its keys."""
    keys = dict.fromkeys(key for mapping in values for key in mapping)
    return [key for key in keys if len({mapping.get(key) for mapping in values}) > 1 or len(values) == 1]


def sweep_report(folder: Path) -> str:
    """Return the HTML of a sweep's report."""
    sweep = read_sweep(folder)
    failed = sum(job.error is not None for job in sweep.jobs)
    order = f"ordered by {sweep.metric}, the {'smallest' if sweep.mode == 'min' else 'largest'} first"
    subtitle = f"{len(sweep.jobs)} jobs{f', {failed} failed' if failed else ''}, {order}"
    title = f"Sweep {folder.absolute().name}"
    header = join_html(element("h1", title), element("p", subtitle, class_="subtitle"))
    return page(title, header=header, sections=[Section("table", "Jobs", _table(sweep))])


def _job(folder: Path, outcome: dict[str, Any]) -> Job:
    # By name alone, so that a sweep's folder may be moved.
    run_dir = Path(outcome["run_dir"]).name
    values = dict(text.partition("=")[::2] for text in outcome["overrides"])
    # Numbers that are not finite are `null` in JSON.
    metrics = {name: float("nan" if value is None else value) for name, value in (outcome.get("metrics") or {}).items()}
    report = f"{run_dir}/report.html" if (folder / run_dir / "report.html").is_file() else None
    return Job(int(outcome["number"]), run_dir, values, metrics, outcome.get("error"), report)


def _table(sweep: Sweep) -> SafeHtml:
    jobs = sorted(sweep.jobs, key=sweep.rank)
    varied = differing([job.values for job in jobs])
    metrics = _shown_metrics(sweep)
    any_failed = any(job.error is not None for job in jobs)
    rows: list[Sequence[Content]] = []
    for job in jobs:
        name = element("a", str(job.number), href=quote(job.report)) if job.report else str(job.number)
        values = [element("code", job.values.get(key, "-")) for key in varied]
        measured = [number(job.metrics[metric]) if metric in job.metrics else "-" for metric in metrics]
        error = "" if job.error is None else "failed: " + job.error.partition("\n")[0]
        rows.append([name, *values, *measured, *([error] if any_failed else [])])
    best = 0 if metrics and len(jobs) > 1 and jobs[0].error is None else None
    return table(["job", *varied, *metrics, *([""] if any_failed else [])], rows, best=best)


def _shown_metrics(sweep: Sweep) -> list[str]:
    """Return the validation metrics, or else those of training, the objective first."""
    names = dict.fromkeys(name for job in sweep.jobs for name in job.metrics)
    shown = [name for name in names if name.startswith("validation/")]
    shown = shown or [name for name in names if name.rpartition("/")[2] in ("loss", "accuracy")]
    return sorted(shown, key=lambda name: (name != sweep.metric, name))[:_MOST_METRICS]
