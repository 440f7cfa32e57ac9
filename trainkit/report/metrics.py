"""The metrics of a run as curves, read from `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
_NOT_METRICS = ("step", "time")
_NUMBERED = re.compile(r"(?<=learning_rate)\.\d+$")  # groups of parameters


@dataclass
class Curve:
    """One metric over the steps at which it was logged."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def last(self) -> float:
        """The value logged last."""
        return self.values[-1]


def read_curves(folder: Path) -> dict[str, Curve]:
    """Return the metrics of a run by their full names; lines that a kill has torn are left out.

    What was logged again after a resume takes the place of what was logged before at those steps.
    """
    curves: dict[str, Curve] = {}
    for line in read_lines(folder / METRICS):
        step = line.get("step")
        if not isinstance(step, int):
            continue
        for name, value in line.items():
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
    """Yield the JSON objects of a file with one in each line."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    content = json.loads(line)
                except ValueError:
                    continue
                if isinstance(content, dict):
                    yield content
    except OSError:
        return


def as_number(value: Any) -> float | None:
    """Return a logged value, which is a text where JSON has no number for it (`"NaN"`, `"Infinity"`)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def thinned(curve: Curve, *, most: int) -> Curve:
    """Return at most about `most` points of a curve, the least and the greatest of each stretch of it kept.

    Values that are not finite are kept too, one of each stretch: they are what one looks for.
    """
    if len(curve.steps) <= most:
        return curve
    stretches = max(most // 4, 1)
    length = len(curve.steps)
    kept: list[int] = [0, length - 1]
    for stretch in range(stretches):
        start, stop = stretch * length // stretches, (stretch + 1) * length // stretches
        kept += [start + index for index in _extremes(curve.values[start:stop])]
    indices = sorted(set(kept))
    return Curve([curve.steps[index] for index in indices], [curve.values[index] for index in indices])


def averaged(curve: Curve, *, most: int) -> Curve | None:
    """Return the mean of each of `most` stretches of a curve with many more points; `None` for others."""
    length = len(curve.steps)
    if length < 4 * most:
        return None
    mean = Curve()
    for stretch in range(most):
        start, stop = stretch * length // most, (stretch + 1) * length // most
        finite = list(filter(math.isfinite, curve.values[start:stop]))
        if finite:
            mean.steps.append(curve.steps[(start + stop - 1) // 2])
            mean.values.append(sum(finite) / len(finite))
    return mean


def _extremes(values: list[float]) -> list[int]:
    """Return the places of the least and the greatest number, and of the first that is not finite."""
    if all(map(math.isfinite, values)):
        return [values.index(min(values)), values.index(max(values))]
    finite = [value for value in values if math.isfinite(value)]
    kept = [next(index for index, value in enumerate(values) if not math.isfinite(value))]
    return kept + ([values.index(min(finite)), values.index(max(finite))] if finite else [])


def final_values(curves: dict[str, Curve]) -> dict[str, float]:
    """Return the latest value of each metric."""
    return {name: curve.last for name, curve in curves.items()}


def base_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the metrics that belong into one picture: `loss` -> `train/loss`, `validation/loss`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stage, _, base = name.partition("/")
        key = base if stage in ("train", "validation", "test") and base else name
        key = _NUMBERED.sub("", key)
        groups.setdefault(key, []).append(name)
    return groups
