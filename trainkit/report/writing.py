"""Writing `report.html` into folders."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.errors import Stopped
from trainkit.failure import forget_failures, record_failure_of_caller

logger = logging.getLogger(__name__)

REPORT = "report.html"
COMPARISON = "comparison.html"


@contextmanager
def reported(folder: Path | None, *, is_main: Callable[[], bool]) -> Iterator[None]:
    """Enter with a run into `folder`; its report is written when it ends, well or not. `None`: nothing is written.

    In the process that started the ranks, or in each of them under torchrun: there `is_main` says afterwards which one
    writes. A report that cannot be written is only logged.
    """
    if folder is None:
        yield
        return
    forget_failures(folder)
    try:
        yield
    except BaseException as error:
        if folder.is_dir():
            if not isinstance(error, Stopped):
                record_failure_of_caller(folder, error)
            _write_or_warn(folder)
        raise
    if is_main() and folder.is_dir():
        _write_or_warn(folder)


def write_report(folder: Path) -> Path:
    """Write the report of the run in `folder` and return its path; raises UserError if there is no run."""
    from trainkit.report.record import read_run
    from trainkit.report.run_page import run_page

    return write_page(run_page(read_run(folder)), folder / REPORT)


def write_page(text: str, path: Path) -> Path:
    """Replace a file at one instant."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="replace")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _write_or_warn(folder: Path) -> None:
    try:
        write_report(folder)
    except Exception as error:
        logger.warning("the report of %s could not be written: %s: %s", folder, type(error).__name__, error)
