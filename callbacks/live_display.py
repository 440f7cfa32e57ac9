"""The progress display on a terminal.

epoch 3/10  ━━━━━━━━━━━━━━━━━╺──────────────  step 1,240/4,000  31%  ETA 2:10
loss 0.1234  accuracy 0.9812  learning_rate 0.001  12,345 samples/s  0:58
validation  ━━━━━━━━━╺───────────────────────  12/40
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from trainkit.console import clock, terminal

from .progress import Progress, named

if TYPE_CHECKING:
    from rich.text import Text

_BAR_WIDTH = 24


class LiveDisplay:
    """Draws a run's progress below whatever else is printed, a few times a second, in a thread of its own."""

    def __init__(self, progress: Progress, *, refresh_per_second: float) -> None:
        from rich.text import Text

        self._text = Text
        self._progress = progress
        self._refresh_per_second = refresh_per_second
        self._shown = ExitStack()

    def start(self) -> None:
        """Draw from now on; what is printed meanwhile appears above."""
        from rich.live import Live

        live = Live(
            get_renderable=self.draw,
            console=terminal(),
            refresh_per_second=self._refresh_per_second,
            transient=True,
        )
        streams = (sys.stdout, sys.stderr)
        self._shown.enter_context(live)
        self._shown.enter_context(_logged_to_the_present_stderr(streams))

    def stop(self) -> None:
        """Leave the terminal as it was; may be called twice."""
        self._shown.close()

    def draw(self) -> Text:
        """Return the display of this moment; it has the same number of lines in every moment of a fit."""
        run, now = self._progress.run, time.monotonic()
        lines = [] if run.optimization is None else [self._headline(now), self._numbers(now)]
        return self._text("\n", no_wrap=True, overflow="ellipsis").join([*lines, self._evaluation()])

    def _headline(self, now: float) -> Text:
        run, progress = self._progress.run, self._progress
        line = self._text()
        line.append(f"epoch {progress.epoch()}  ", style="bold")
        fraction = progress.fraction()
        if fraction is not None:
            self._bar(line, fraction, "cyan")
        line.append(f"  {progress.step()}")
        if fraction is not None:
            line.append(f"  {fraction:.0%}")
        remaining = progress.seconds_left(now=now)
        if run.signals.received is not None:
            line.append(f"  {run.signals.received.name}: stopping", style="bold yellow")
        elif remaining is not None:
            line.append(f"  ETA {clock(remaining)}", style="bold")
        return line

    def _numbers(self, now: float) -> Text:
        # A copy is made at once, while the main thread may be adding metrics.
        metrics = dict(self._progress.run.state.metrics)
        words = self._progress.training_metrics(metrics)
        words.append(f"{self._progress.samples_per_second(metrics, now=now):,.0f} samples/s")
        words.append(clock(now - self._progress.started))
        return self._text("  ".join(words))

    def _evaluation(self) -> Text:
        """Return the bar of the evaluation that is going on, else the results of the last validation."""
        evaluation = self._progress.run.evaluation
        if evaluation is None:
            metrics = dict(self._progress.run.state.metrics)
            last = {name: value for name, value in metrics.items() if name.startswith("validation/")}
            return self._text("  ".join(named(last)), style="green")
        line = self._text()
        line.append(f"{evaluation.stage}  ", style="bold")
        total = evaluation.num_batches
        if total:
            self._bar(line, min(1.0, evaluation.batch / total), "green")
        line.append(f"  {evaluation.batch:,}" + (f"/{total:,}" if total else ""))
        return line

    def _bar(self, line: Text, fraction: float, colour: str) -> None:
        done = round(fraction * _BAR_WIDTH)
        line.append("━" * done, style=colour)
        line.append("─" * (_BAR_WIDTH - done), style="dim")


@contextmanager
def _logged_to_the_present_stderr(streams: tuple[object, ...]) -> Iterator[None]:
    """Let handlers of log messages that hold one of the streams write to `sys.stderr` meanwhile.

    They took hold of it before the display replaced it, and would write into the middle of the display.
    """
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    handlers = [handler for found in loggers if isinstance(found, logging.Logger) for handler in found.handlers]
    held = [(h, h.stream) for h in handlers if isinstance(h, logging.StreamHandler) and h.stream in streams]
    for handler, _ in held:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in held:
            handler.setStream(stream)
