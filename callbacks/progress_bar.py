"""How far the run has come: a live display on a terminal, one line at each log point elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainkit.callback import Callback
from trainkit.checkpoints.store import CheckpointEntry, CheckpointError, CheckpointStore, Monitor
from trainkit.console import Table, clock, number, on_terminal, say, show
from trainkit.errors import UserError

from .live_display import LiveDisplay
from .progress import Progress, named

if TYPE_CHECKING:
    from trainkit.run import Run


class ProgressBar(Callback):
    """Shows progress on rank 0, and at the end a table of the metrics and of the checkpoints.

    The display is drawn by a thread of its own that only reads counters: a step costs nothing.

    Args:
        refresh_per_second: How often the display on a terminal is drawn again.

    """

    def __init__(self, *, refresh_per_second: float = 4.0) -> None:
        if not 0 < refresh_per_second <= 60:
            raise UserError(
                f"progress_bar.refresh_per_second must be above 0 and at most 60, got {refresh_per_second}."
            )
        self.refresh_per_second = refresh_per_second
        self._progress: Progress | None = None
        self._display: LiveDisplay | None = None

    def on_fit_start(self, run: Run) -> None:
        if run.is_main:
            self._start(run)

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        if run.is_main and run.optimization is None:  # not in a fit: this evaluation is all there is
            self._start(run)

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        if self._progress is not None and self._display is None:
            say("  ".join(self._progress.words(metrics, now=time.monotonic())))

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if self._progress is None:
            return
        in_fit = run.optimization is not None
        if not in_fit:
            self.close()
        if self._display is None and metrics:
            say("  ".join([*([f"step {run.state.step:,}"] if in_fit else []), *named(metrics)]))

    def on_fit_end(self, run: Run) -> None:
        if self._progress is None:
            return
        self.close()
        say(_ending(run))
        show(_metrics(run))
        if run.checkpointer.store is not None and run.checkpointer.store.entries():
            show(_checkpoints(run.checkpointer.store))

    def close(self) -> None:
        self._progress = None
        if self._display is not None:
            self._display.stop()
            self._display = None

    def _start(self, run: Run) -> None:
        self.close()
        self._progress = Progress(run)
        if on_terminal():
            self._display = LiveDisplay(self._progress, refresh_per_second=self.refresh_per_second)
            self._display.start()


def _ending(run: Run) -> str:
    state = run.state
    return (
        f"{run.stop_reason or 'finished'}: {state.step:,} steps, {number(round(state.epochs, 2))} epochs, "
        f"{state.samples:,} samples, {clock(state.seconds)}"
    )


def _metrics(run: Run) -> Table:
    shown = sorted(run.state.metrics.items(), key=lambda item: (item[0].split("/")[0] == "train", item[0]))
    return Table("Metrics", ["metric", "last"], [[name, number(value)] for name, value in shown])


def _checkpoints(store: CheckpointStore) -> Table:
    """Return what is saved, with the best one marked where the run chose by a metric."""
    entries = store.entries()
    monitor, best = _best(store)
    columns = ["checkpoint", "step", "saved because of", *([monitor.metric] if monitor else []), ""]
    table = Table(f"Checkpoints in {store.folder}", columns)
    for index, entry in enumerate(entries):
        measured = entry.metrics.get(monitor.metric) if monitor else None
        values = ["-" if measured is None else number(measured)] if monitor else []
        marks = ["best"] * (entry == best) + ["last"] * (index == len(entries) - 1)
        table.rows.append([entry.path.name, f"{entry.step:,}", entry.reason, *values, ", ".join(marks)])
        if entry == best:
            table.highlighted.add(index)
    return table


def _best(store: CheckpointStore) -> tuple[Monitor | None, CheckpointEntry | None]:
    """Return what the run chooses by, and its choice; nothing where it does not choose, or has not yet."""
    try:
        monitor = store.monitor()
        return monitor, store.best(*monitor)
    except CheckpointError:
        return None, None
