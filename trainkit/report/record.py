"""RunData: the content of a run folder, and its metrics as curves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.checkpoint.store import CHECKPOINTS, CheckpointEntry, Manifest, parse_manifest
from trainkit.errors import UserError
from trainkit.profiling import Timeline, read_timeline
from trainkit.report.config_diff import ConfigChange, read_config_diff
from trainkit.run_dir.failure import CALLERS, FailureRecord, read_failures
from trainkit.run_dir.failure import FILENAME as WARNINGS
from trainkit.run_dir.folder import FILENAME as ENVIRONMENT
from trainkit.run_dir.folder import read_config

CONFIG = "config.yaml"
SUMMARY = "summary.json"
STEP_TIMES = "step_times.jsonl"
PROFILE = "profile.json"
PARTITION = "partition.txt"
_TAIL_BYTES = 6000
_TAIL_LINES = 30
METRICS = "metrics.jsonl"
RANK_LOSSES = "rank_losses.jsonl"
_NOT_METRICS = ("step", "time")
_NUMBERED = re.compile(r"(?<=learning_rate)\.\d+$")  # groups of parameters


@dataclass(frozen=True)
class RunData:
    """The content of a run folder."""

    folder: Path
    curves: Mapping[str, Curve]
    summary: Mapping[str, Any]
    """Empty if the run has not ended, or was killed."""
    environment: Mapping[str, Any]
    config: Mapping[str, Any]
    failures: Sequence[FailureRecord]
    warnings: Sequence[Mapping[str, Any]]
    timeline: Timeline | None
    manifest: Manifest | None
    rank_losses: Sequence[Mapping[str, Any]]
    """Who died while the run went on, and from where it did."""
    step_times: Sequence[Mapping[str, Any]]
    profile: Mapping[str, Any]
    partition: str
    config_diff: Sequence[ConfigChange] | None = None
    """Differences of the config to its recipe; `None` if they are not known."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """The last lines of the logs of other ranks, by file name."""

    @property
    def status(self) -> str:
        """`finished`, `stopped`, `failed`, or `unfinished` if the run recorded no end."""
        if self.failures and self.summary.get("status") != "finished":
            return "failed"
        return str(self.summary.get("status", "unfinished"))

    @property
    def recipe(self) -> str:
        """The recipe, or else the task's class."""
        recipe = self.config.get("recipe")
        return str(recipe or str(self.environment.get("task", "")).rpartition(".")[2] or self.folder.name)

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of every metric."""
        saved = self.summary.get("metrics")
        if isinstance(saved, Mapping) and saved:
            # JSON has `null` for a number that is not finite.
            return {name: math.nan if value is None else float(value) for name, value in saved.items()}
        return {name: curve.values[-1] for name, curve in self.curves.items()}

    @cached_property
    def best(self) -> CheckpointEntry | None:
        """The best checkpoint; `None` if no metric is monitored."""
        if self.manifest is None or self.manifest.monitor is None:
            return None
        metric, mode = self.manifest.monitor
        measured = [entry for entry in self.manifest.entries if not math.isnan(entry.metrics.get(metric, math.nan))]
        sign = 1.0 if mode == "min" else -1.0
        # Of equal values the first counts, as in the store: `min` takes the first that it meets.
        return min(measured, key=lambda entry: sign * entry.metrics[metric], default=None)

    @property
    def cause(self) -> FailureRecord | None:
        """The failure to show first: that of the rank that failed first, or else that of the caller.

        A killed rank records nothing; then the caller's failure is the cause, and those of other ranks follow from it.
        """
        ranks = [record for record in self.failures if record.process is not None]
        callers = [record for record in self.failures if record.process is None]
        if not callers:
            return ranks[0] if ranks else None
        # Under torchrun each rank is its own caller, and the last one may fail because of the first.
        return ranks[0] if callers[0].message in [record.message for record in ranks] else callers[0]


def read_run(folder: Path) -> RunData:
    """Return the data of a run; raises UserError if `folder` is not a run folder."""
    if not is_run(folder):
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}, {METRICS} or {SUMMARY}.")
    return RunData(
        folder=folder,
        curves=read_curves(folder),
        summary=_json(folder / SUMMARY),
        environment=_json(folder / ENVIRONMENT),
        config=_yaml(folder / CONFIG),
        failures=read_failures(folder),
        warnings=list(read_lines(folder / WARNINGS)),
        timeline=read_timeline(folder),
        manifest=_manifest(folder / CHECKPOINTS),
        rank_losses=[loss for loss in read_lines(folder / RANK_LOSSES) if _is_loss(loss)],
        step_times=_in_order(read_lines(folder / STEP_TIMES)),
        profile=_json(folder / PROFILE),
        partition=_text(folder / PARTITION),
        config_diff=read_config_diff(folder),
        logs={path.name: tail for path in sorted(folder.glob("rank_*.log")) if (tail := _tail(path))},
    )


def _is_loss(loss: Mapping[str, Any]) -> bool:
    numbers = (loss.get("step"), loss.get("seconds"))
    return {"lost", "from", "ranks"} <= loss.keys() and all(isinstance(number, int | float) for number in numbers)


def is_run(folder: Path) -> bool:
    """Return True if a folder is a run folder."""
    return any((folder / name).is_file() for name in (CONFIG, METRICS, SUMMARY, ENVIRONMENT, CALLERS))


def _manifest(folder: Path) -> Manifest | None:
    try:
        return parse_manifest(folder)
    # The report is also for runs that failed: a damaged manifest only empties its section.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError):
        # Cut off by a kill, or not written by trainkit.
        return {}
    return content if isinstance(content, dict) else {}


def _yaml(path: Path) -> dict[str, Any]:
    if not path.is_file() or not path.stat().st_size:
        return {}
    import yaml  # here, as a run from Python has no config

    try:
        # The C parser is several times faster, but not in every build of PyYAML.
        content = yaml.load(read_config(path), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except UserError:
        raise
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            # From the end: logs of long runs are large.
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])


def _in_order(lines: Any) -> list[dict[str, Any]]:
    """Return lines in order of steps; lines of a resumed run replace earlier ones of the same steps."""
    valid_lines: list[dict[str, Any]] = []
    for line in lines:
        if not isinstance(line.get("step"), int):
            continue
        while valid_lines and valid_lines[-1]["step"] >= line["step"]:
            valid_lines.pop()
        valid_lines.append(line)
    return valid_lines


@dataclass
class Curve:
    """One metric over the steps at which it was logged."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def read_curves(folder: Path) -> dict[str, Curve]:
    """Return the metrics of a run by their full names; incomplete lines are skipped.

    Values of a resumed run replace earlier ones of the same steps.
    """
    curves: dict[str, Curve] = {}
    for line in read_lines(folder / METRICS):
        step = line.get("step")
        if not isinstance(step, int):
            continue
        for name, value in line.items():
            # Most values are floats, and a run has many: they skip the checks.
            number = value if type(value) is float else as_number(value)
            if number is None or name in _NOT_METRICS:
                continue
            curve = curves.get(name)
            if curve is None:
                curve = curves[name] = Curve()
            while curve.steps and curve.steps[-1] >= step:
                curve.steps.pop()
                curve.values.pop()
            curve.steps.append(step)
            curve.values.append(number)
    return curves


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file with one object per line."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    content = json.loads(line)
                except (ValueError, RecursionError):
                    # A kill leaves a last line that is cut off.
                    continue
                if isinstance(content, dict):
                    yield content
    except OSError:
        return


def as_number(value: Any) -> float | None:
    """Return a logged value as a number, also from text (`"NaN"`, `"Infinity"`); `None` if it is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def downsample(curve: Curve, *, most: int) -> Curve:
    """Return about `most` points of a curve: the minimum and maximum of each interval.

    The first value of each interval that is not finite is kept too.
    """
    if len(curve.steps) <= most:
        return curve
    # Extremes and not every n-th point, which could miss a spike. An interval gives up to three points, and the curve
    # its two ends.
    intervals = max(most // 4, 1)
    length = len(curve.steps)
    chosen: list[int] = [0, length - 1]
    for interval in range(intervals):
        start, stop = interval * length // intervals, (interval + 1) * length // intervals
        chosen += [start + index for index in _extremes(curve.values[start:stop])]
    indices = sorted(set(chosen))
    return Curve([curve.steps[index] for index in indices], [curve.values[index] for index in indices])


def averaged(curve: Curve, *, most: int) -> Curve | None:
    """Return the means of `most` intervals of a curve; `None` if it has fewer than 4 points per interval."""
    length = len(curve.steps)
    if length < 4 * most:
        return None
    mean = Curve()
    for interval in range(most):
        start, stop = interval * length // most, (interval + 1) * length // most
        finite = list(filter(math.isfinite, curve.values[start:stop]))
        if finite:
            # The middle of the interval: the mean has no step itself.
            mean.steps.append(curve.steps[(start + stop - 1) // 2])
            mean.values.append(sum(finite) / len(finite))
    return mean


def _extremes(values: list[float]) -> list[int]:
    """Return the indices of the minimum, the maximum, and the first value that is not finite."""
    finite = list(filter(math.isfinite, values))
    indices = [values.index(min(finite)), values.index(max(finite))] if finite else []
    if len(finite) < len(values):
        indices.append(next(index for index, value in enumerate(values) if not math.isfinite(value)))
    return indices


def base_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the metrics of each chart: `loss` -> `train/loss`, `validation/loss`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stage, _, base = name.partition("/")
        key = base if stage in ("train", "validation", "test") and base else name
        key = _NUMBERED.sub("", key)
        groups.setdefault(key, []).append(name)
    return groups
