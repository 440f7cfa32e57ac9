"""The report of a sweep: a table of its jobs, and a chart with a line for each job."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainkit.errors import UserError
from trainkit.report.html import SafeHtml, Section, element, join_html, number, page
from trainkit.report.timeline_chart import Job, parallel_coordinates

SWEEP = "sweep.json"
_MOST_METRICS = 6


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep and its objective."""

    jobs: list[Job]
    metric: str
    mode: str

    def ranked(self) -> list[Job]:
        """Return the jobs, the best first, those that failed last."""
        return sorted(self.jobs, key=self._rank)

    def value(self, job: Job) -> float:
        """Return the objective of a job; NaN if it was not measured."""
        return job.metrics.get(self.metric, job.metrics.get(f"train/{self.metric.partition('/')[2]}", math.nan))

    def _rank(self, job: Job) -> tuple[bool, float, int]:
        value = self.value(job)
        lost = job.error is not None or math.isnan(value)
        return lost, 0.0 if lost else value if self.mode == "min" else -value, job.number


def read_sweep(folder: Path) -> Sweep:
    """Return the jobs of a sweep; raises UserError if `sweep.json` cannot be read."""
    try:
        saved = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
        jobs = [_job(folder, outcome) for outcome in saved["jobs"]]
        return Sweep(jobs, str(saved["objective"]["metric"]), str(saved["objective"]["mode"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / SWEEP} cannot be read: {error}") from None


def sweep_report(folder: Path) -> str:
    """Return the HTML of a sweep's report."""
    sweep = read_sweep(folder)
    ranked, keys = sweep.ranked(), _varied(sweep.jobs)
    failed = sum(job.error is not None for job in ranked)
    order = f"ordered by {sweep.metric}, the {'smallest' if sweep.mode == 'min' else 'largest'} first"
    subtitle = f"{len(ranked)} jobs{f', {failed} failed' if failed else ''}, {order}"
    sections = [Section("table", "Jobs", _table(ranked, keys, _shown_metrics(sweep)))]
    drawn = [job for job in ranked if math.isfinite(sweep.value(job))]
    if len(drawn) > 1:
        picture = parallel_coordinates(drawn, keys, goal=sweep.metric, value=sweep.value, mode=sweep.mode)
        sections.insert(0, Section("picture", f"From settings to {sweep.metric}", picture))
    header = join_html(element("h1", f"Sweep {folder.absolute().name}"), element("p", subtitle, class_="subtitle"))
    return page(f"Sweep {folder.absolute().name}", header=header, sections=sections)


def _job(folder: Path, outcome: dict[str, Any]) -> Job:
    run_dir = Path(outcome["run_dir"]).name
    values = dict(text.partition("=")[::2] for text in outcome["overrides"])
    # Numbers that are not finite are `null` in JSON.
    metrics = {name: float("nan" if value is None else value) for name, value in (outcome.get("metrics") or {}).items()}
    report = f"{run_dir}/report.html" if (folder / run_dir / "report.html").is_file() else None
    return Job(int(outcome["number"]), values, metrics, outcome.get("error"), report)


def _varied(jobs: Sequence[Job]) -> list[str]:
    keys = dict.fromkeys(key for job in jobs for key in job.values)
    return [key for key in keys if len({job.values.get(key) for job in jobs}) > 1 or len(jobs) == 1]


def _shown_metrics(sweep: Sweep) -> list[str]:
    """Return the validation metrics, or else those of training, the objective first."""
    names = dict.fromkeys(name for job in sweep.jobs for name in job.metrics)
    shown = [name for name in names if name.startswith("validation/")]
    shown = shown or [name for name in names if name.rpartition("/")[2] in ("loss", "accuracy")]
    return sorted(shown, key=lambda name: (name != sweep.metric, name))[:_MOST_METRICS]


def _table(jobs: Sequence[Job], keys: Sequence[str], metrics: Sequence[str]) -> SafeHtml:
    head = element(
        "tr",
        element("th", "job"),
        *(element("th", key) for key in keys),
        *(element("th", name, class_="number") for name in metrics),
    )
    body = []
    for place, job in enumerate(jobs):
        name = element("a", str(job.number), href=quote(job.report)) if job.report else str(job.number)
        cells = [element("td", element("code", job.values.get(key, "-")), class_="text") for key in keys]
        if job.error is not None:
            first = job.error.splitlines()[0] if job.error else ""
            cells.append(element("td", f"failed: {first}", class_="text", colspan=max(len(metrics), 1)))
        else:
            cells += [
                element("td", number(job.metrics[metric]) if metric in job.metrics else "-", class_="number")
                for metric in metrics
            ]
        best = "best" if place == 0 and metrics and job.error is None and len(jobs) > 1 else None
        body.append(element("tr", element("th", name, scope="row"), *cells, class_=best))
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="table-frame")
