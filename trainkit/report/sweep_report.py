"""The report of a sweep: its jobs, the best first, their curves, and what each value of a key brought."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from trainkit.console import seconds
from trainkit.errors import UserError
from trainkit.report.charts import curve_charts
from trainkit.report.html import Content, SafeHtml, Section, element, join_html, number, page, table
from trainkit.report.record import read_curves

SWEEP = "sweep.json"
_MOST_METRICS = 6
_MOST_CURVES = 8  # of a chart: it has as many colours


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    number: int
    run_dir: str
    """Name of its folder in the sweep's folder."""
    values: dict[str, str]
    """The value typed for each key."""
    metrics: dict[str, float]
    value: float
    """Of the objective, at the run's best checkpoint; NaN if it is not known."""
    seconds: float | None
    error: str | None
    report: str | None
    """Path of its report, relative to the sweep's folder."""


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep and its objective."""

    jobs: list[Job]
    metric: str
    mode: str

    @property
    def sign(self) -> int:
        """The factor that makes a good value small."""
        return 1 if self.mode == "min" else -1

    def rank(self, job: Job) -> tuple[bool, float, int]:
        """Return the key that sorts jobs, the best first, those that failed last."""
        lost = job.error is not None or math.isnan(job.value)
        return lost, 0.0 if lost else self.sign * job.value, job.number


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
    sections = [Section("table", "Jobs", _table(sweep)), _curves(sweep, folder), _values(sweep)]
    return page(title, header=header, sections=[section for section in sections if section is not None])


def job_names(jobs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the values in which jobs differ, as they were typed; `jobs` have a value for each key."""
    keys = differing(jobs)
    return [" ".join(f"{key}={values.get(key, '-')}" for key in keys) for values in jobs]


def _curves(sweep: Sweep, folder: Path) -> Section | None:
    """Return the curves of the best jobs, in common charts."""
    jobs = sorted(sweep.jobs, key=sweep.rank)
    names = job_names([job.values for job in jobs])
    runs = {
        f"{job.number}: {name}": read_curves(folder / job.run_dir)
        for job, name in zip(jobs[:_MOST_CURVES], names, strict=False)
    }
    charts = curve_charts(runs, kinds=("learning",))
    title = "Learning curves" if len(jobs) <= _MOST_CURVES else f"Learning curves of the best {_MOST_CURVES} jobs"
    return Section("curves", title, element("div", *charts, class_="charts")) if charts else None


def _values(sweep: Sweep) -> Section | None:
    """Return for each key that the jobs vary a table of its values, with the objective that jobs had with each."""
    jobs = [job for job in sweep.jobs if not sweep.rank(job)[0]]
    tables = []
    for key in differing([job.values for job in sweep.jobs]):
        reached: dict[str, list[float]] = {}
        for job in jobs:
            reached.setdefault(job.values.get(key, "-"), []).append(job.value)
        # With a value of its own for each job, the table of jobs says it.
        if 1 < len(reached) < len(jobs):
            best = [sweep.sign * min(sweep.sign * value for value in values) for values in reached.values()]
            rows: list[Sequence[Content]] = [
                [element("code", value), str(len(values)), number(top), number(median(values))]
                for (value, values), top in zip(reached.items(), best, strict=True)
            ]
            marked = min(range(len(best)), key=lambda row: sweep.sign * best[row])
            tables.append(table([key, "jobs", f"best {sweep.metric}", "median"], rows, best=marked))
    return Section("values", "By value", element("div", *tables, class_="charts")) if tables else None


def _job(folder: Path, outcome: dict[str, Any]) -> Job:
    # By name alone, so that a sweep's folder may be moved.
    run_dir = Path(outcome["run_dir"]).name
    values = dict(text.partition("=")[::2] for text in outcome["overrides"])
    # Numbers that are not finite are `null` in JSON.
    metrics = {name: float("nan" if value is None else value) for name, value in (outcome.get("metrics") or {}).items()}
    report = f"{run_dir}/report.html" if (folder / run_dir / "report.html").is_file() else None
    value = float("nan" if outcome.get("value") is None else outcome["value"])
    took = outcome.get("seconds")
    took = None if took is None else float(took)
    return Job(int(outcome["number"]), run_dir, values, metrics, value, took, outcome.get("error"), report)


def _table(sweep: Sweep) -> SafeHtml:
    jobs = sorted(sweep.jobs, key=sweep.rank)
    varied = differing([job.values for job in jobs])
    metrics = _shown_metrics(sweep)
    any_failed = any(job.error is not None for job in jobs)
    rows: list[Sequence[Content]] = []
    for job in jobs:
        name = element("a", str(job.number), href=quote(job.report)) if job.report else str(job.number)
        values = [element("code", job.values.get(key, "-")) for key in varied]
        shown = {**job.metrics, **({} if math.isnan(job.value) else {sweep.metric: job.value})}
        measured = [number(shown[metric]) if metric in shown else "-" for metric in metrics]
        measured.append("-" if job.seconds is None else seconds(job.seconds))
        error = "finished" if job.error is None else "failed: " + job.error.partition("\n")[0]
        rows.append([name, *values, *measured, *([error] if any_failed else [])])
    best = 0 if metrics and len(jobs) > 1 and jobs[0].error is None else None
    titles = [f"{name} (kept)" if name == sweep.metric else name for name in metrics]
    return table(["job", *varied, *titles, "time", *(["status"] if any_failed else [])], rows, best=best)


def _shown_metrics(sweep: Sweep) -> list[str]:
    """Return the validation metrics, or else those of training, the objective first."""
    names = dict.fromkeys(name for job in sweep.jobs for name in job.metrics)
    shown = [name for name in names if name.startswith("validation/")]
    shown = shown or [name for name in names if name.rpartition("/")[2] in ("loss", "accuracy")]
    return sorted(shown, key=lambda name: (name != sweep.metric, name))[:_MOST_METRICS]
