"""A plugin of pytest: the processes of a test that hangs write their stacks and end, before the test is ended."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_SHARE = 0.8  # of the time limit: pytest-timeout ends the process of the test, and what its ranks did would be lost


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[object]:
    """Abort the ranks of a test that takes most of its time limit."""
    timer = threading.Timer(_SHARE * float(item.config.getoption("timeout")), abort, [item.nodeid])
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def abort(test: str) -> None:
    """Abort the processes that this one has started and that have started none: with faulthandler they say where."""
    print(f"{test} hangs; its stacks:", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(sys.__stderr__)
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    started = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in started} - started:
        started |= more
    for pid in started - set(parents.values()) - {os.getpid()}:
        with suppress(OSError):
            if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                print(f"the stacks of its process {pid}:", file=sys.__stderr__, flush=True)
                os.kill(pid, signal.SIGABRT)
