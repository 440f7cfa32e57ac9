"""Which metrics are drawn together, and in which part of a report."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.report.chart import Series, chart
from trainkit.report.markup import Markup
from trainkit.report.metrics import Curve, base_names

MOST_CHARTS = 60
_STAGE_COLOURS = {"train": 0, "validation": 1, "test": 2}
_NOT_DRAWN = ("train/epoch",)


def curve_charts(runs: Mapping[str, Mapping[str, Curve]], *, kinds: tuple[str, ...]) -> list[Markup]:
    """Return a chart for each metric of these kinds; stages of one run, or several runs, are drawn together."""
    names = dict.fromkeys(name for curves in runs.values() for name in curves)
    wanted = [name for name in sorted(names, key=_order) if kind_of(name) in kinds]
    charts = []
    groups = base_names(wanted) if len(runs) == 1 else {name: [name] for name in wanted}
    for base, members in groups.items():
        series = []
        for number_of_run, (run, curves) in enumerate(runs.items()):
            for place, name in enumerate(members):
                if name in curves:
                    colour = number_of_run if len(runs) > 1 else _colour(name, members, place)
                    series.append(Series(run or _told_apart(name, members), curves[name], colour))
        charts.append(chart(base, series))
    return charts[:MOST_CHARTS]


def _colour(name: str, members: list[str], place: int) -> int:
    stages = [member.partition("/")[0] for member in members]
    return _STAGE_COLOURS.get(name.partition("/")[0], place) if len(set(stages)) == len(stages) else place


def _told_apart(name: str, members: list[str]) -> str:
    """Return what a metric is called beside the others of its picture: its stage, or else what is different."""
    stages = {member.partition("/")[0] for member in members}
    return name.partition("/")[0] if len(stages) == len(members) else name.rpartition("/")[2]


def kind_of(name: str) -> str:
    """Return which section a metric belongs to: `learning`, `optimization`, `speed`, `memory`, or none (empty)."""
    base = name.rpartition("/")[2]
    if name in _NOT_DRAWN:
        return ""
    if base.endswith(("_per_second", "_wait_percent")) or base == "mfu" or name.startswith("time/"):
        return "speed"
    if "memory" in name or base.endswith(("_bytes", "_mib", "_gib", "_mb", "_gb")):
        return "memory"
    if base.startswith("learning_rate") or "/learning_rate" in name or "gradient" in name or base == "skipped_steps":
        return "optimization"
    return "learning"


def _order(name: str) -> tuple[int, int, str]:
    base = name.rpartition("/")[2]
    return ("learning", "optimization", "speed", "memory", "").index(kind_of(name)), base != "loss", base
