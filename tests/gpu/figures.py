"""What the tests of a stage saw, one JSON line each: a stage that is killed keeps those it had."""

from __future__ import annotations

import json
import os
from typing import Any

VARIABLE = "TRAINKIT_GPU_FIGURES"


def note(**seen: Any) -> None:
    """Add a line to the stage's figures; without a stage print it."""
    line, file = json.dumps(seen, default=str), os.environ.get(VARIABLE)
    if file is None:
        print(line)
        return
    with open(file, "a", encoding="utf-8") as figures:  # whole lines, also from several processes
        figures.write(line + "\n")


def figure(name: str, value: float | str) -> None:
    """Note a figure."""
    note(figure=name, value=value)


def failed(name: str, why: str) -> None:
    """Note what failed, and why."""
    note(failed=name, why=why if len(why) < 800 else f"{why[:400]} ... {why[-400:]}")


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome of each test."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # its reports come again in the main process
        return
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        failed(report.nodeid, str(report.longrepr) if crash is None else crash.message)
    elif report.when == "call" or report.skipped:
        note(outcome=report.outcome)


def pytest_collectreport(report: Any) -> None:
    """Note a file that cannot be imported."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        failed(report.nodeid, str(report.longrepr))
