"""Progress of a run: a live display on a terminal, a live line in a notebook, one line per log point elsewhere.

epoch 2/10  step 800  loss 0.1502  validation/loss 0.1421 *  validation/accuracy 0.9613 *  0:38
epoch 3/10  ━━━━━━━━━━━━━━━━━╺──────────────  step 1,240/4,000  31%  ETA 2:10
loss 0.1234  accuracy 0.9812  12,345 samples/s  0:58  learning_rate 0.001
validation  ━━━━━━━━━╺───────────────────────  12/40

The lines of evaluations stay, above the display; a star marks the best value so far.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le

from trainkit.callback import Callback
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore, Monitor
from trainkit.console import Table, clock, in_notebook, number, on_terminal, printable, say, show, size, terminal
from trainkit.devices import has_streams
from trainkit.errors import CheckpointError
from trainkit.metrics.latest import LatestLoss
from trainkit.rng import SavedGenerators
from trainkit.run import Run
from trainkit.settings import check_arguments

if TYPE_CHECKING:
    from rich.text import Text

_BAR_WIDTH = 24
_CURVE_WIDTH = 16  # columns: with it the table of metrics fits into 80
_CURVE_POINTS = 512  # that are kept of a metric
_CURVE_LEVELS = "▁▂▃▄▅▆▇█"
_SHOWN_LAST = ("train/learning_rate", "train/data_wait_fraction", "train/grad_norm")
_SHOWN_ELSEWHERE = ("train/epoch", "train/samples_per_second", "train/steps_per_second")


class ProgressBar(Callback):
    """Shows progress on the main rank, and at the end a table of the metrics and one of the checkpoints.

    A background thread draws the display and only reads counters: a step costs nothing.

    Args:
        refresh_per_second: Refresh rate of the display on a terminal; in a notebook at most 1.

    """

    def __init__(self, *, refresh_per_second: Annotated[float, Gt(0), Le(60)] = 4.0) -> None:
        check_arguments(ProgressBar.__init__, locals(), of="progress_bar")
        self.refresh_per_second = refresh_per_second
        self.prints_evaluation = True
        """Whether the metrics of an evaluation by itself are printed; a command prints them itself."""
        self._progress: RunProgress | None = None
        self._display: LiveProgress | NotebookProgress | None = None
        self._in_notebook = in_notebook()  # where it is made: ranks are other processes
        self._modes: dict[str, str] = {}  # of monitored metrics
        self._best: dict[str, tuple[float, int]] = {}  # the value and its step
        self._curves: dict[str, Curve] = {}

    def on_fit_start(self, run: Run) -> None:
        if run.is_main:
            if has_streams(run.strategy.device):
                run.peak_memory.restart()
            self._start(run)
            self._modes, self._best, self._curves = _modes(run), {}, {}

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        if run.is_main and run.phase_optimizer is None:  # validate, test or predict
            self._start(run)

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        if self._progress is None:
            return
        self._follow(metrics, run.state.step)
        if self._display is None:
            say("  ".join(self._progress.line(metrics, now=time.monotonic())))

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if self._progress is None:
            return
        if run.phase_optimizer is None:
            self.close()
            if self.prints_evaluation and metrics:
                say("  ".join(_named(metrics)))
            return
        self._follow(metrics, run.state.step)
        if metrics:
            self._say_evaluation(self._progress, metrics)

    def on_fit_end(self, run: Run) -> None:
        self._show_outcome(run, run.stop_reason or "finished", is_sound=run.stopped_by is None)

    def on_exception(self, run: Run, error: BaseException) -> None:
        # All steps may be done: what they came to, and which checkpoints are intact, is worth more than ever.
        if isinstance(error, CheckpointError) and run.state.step > 0:
            self._show_outcome(run, "ended by an error", is_sound=False)

    def _show_outcome(self, run: Run, outcome: str, *, is_sound: bool) -> None:
        """Print how far training came, in place of the display, with tables of metrics and checkpoints."""
        if self._progress is None:
            return
        draws_curves = self._display is not None
        self.close()
        state = run.state
        done = [f"{state.step:,} steps", f"{number(round(state.epochs, 2))} epochs", f"{state.samples:,} samples"]
        done.append(clock(state.seconds))
        if state.seconds > 0:
            done.append(f"{number(round(state.samples / state.seconds, 1))} samples/s")
        if has_streams(run.strategy.device):
            done.append(f"peak memory {size(run.peak_memory.of_run())}")
        finished = f"{outcome}: {', '.join(done)}"
        is_sound = is_sound and all(
            math.isfinite(value) for name, value in state.metrics.items() if name.endswith("loss")
        )
        say(f"✓ {finished}" if draws_curves and is_sound else finished)
        if state.metrics:
            since = "" if run.resumed_from is None else " since the resume"
            show(self._metric_table(state.metrics, since=since, draws_curves=draws_curves))
        if run.checkpointer.store is not None and run.checkpointer.store.entries():
            show(_checkpoint_table(run.checkpointer.store))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.run.has_display = False
            self._progress = None
        if self._display is not None:
            self._display.stop()
            self._display = None

    def _follow(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the best value and the curve of each metric of which the better direction is known."""
        for name, value in metrics.items():
            mode = self._modes.get(name, "min" if name.endswith("loss") else None)
            sign = -1 if mode == "max" else 1
            if mode is None or math.isnan(value):
                continue
            if name not in self._best or sign * value < sign * self._best[name][0]:
                self._best[name] = value, step
            self._curves.setdefault(name, Curve()).add(step, value)

    def _say_evaluation(self, progress: RunProgress, metrics: Mapping[str, float]) -> None:
        """Write the line of an evaluation, which stays above the display."""
        state = progress.run.state
        loss = [f"loss {number(state.metrics['train/loss'])}"] if "train/loss" in state.metrics else []
        values = [
            f"{item} *" if self._best.get(name, (0, -1))[1] == state.step else item
            for name, item in zip(metrics, _named(metrics), strict=True)
        ]
        elapsed = clock(time.monotonic() - progress.started)
        if self._display is None:
            say("  ".join([progress.step(), f"epoch {progress.epoch()}", *values, elapsed]))
        else:
            epoch, step = f"epoch {progress.epoch()}", f"step {state.step:,}"
            self._display.say([[epoch, step, *loss, *values], [epoch, *loss, *values], [epoch, *values]], last=elapsed)

    def _metric_table(self, metrics: Mapping[str, float], *, since: str, draws_curves: bool) -> Table:
        table = Table("Metrics", ["metric", "last"])
        if self._best:
            table.columns = [*table.columns, f"best{since}", "at step", *(["curve"] if draws_curves else [])]
        # Those of validation first. The line above has the rates of the whole run, and the epochs.
        for name, value in sorted(metrics.items(), key=lambda item: (item[0].startswith("train/"), item[0])):
            if name in _SHOWN_ELSEWHERE:
                continue
            row = [name, number(value)]
            if name in self._best:
                best, step = self._best[name]
                row += [number(best), f"{step:,}", self._curves[name].drawn(_CURVE_WIDTH)]
            # Cut or filled: a table has a cell for each column.
            table.rows.append([*row, "", "", ""][: len(table.columns)])
        return table

    def _start(self, run: Run) -> None:
        self.close()
        self._progress = RunProgress(run)
        with SavedGenerators():  # `rich` draws from python's generator when it is imported
            if on_terminal():
                self._display = LiveProgress(self._progress, refresh_per_second=self.refresh_per_second)
            elif self._in_notebook:
                self._display = NotebookProgress(self._progress, refresh_per_second=min(1.0, self.refresh_per_second))
        run.has_display = self._display is not None
        # Tasks with phases have a loss for each, and no common one.
        if run.has_display and run.means is not None and not run.phase_optimizers[0].phase:
            run.means.latest = LatestLoss()


class Curve:
    """The values of a metric over the steps, drawn in one line."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []  # step, value
        self._num_added, self._stride = 0, 1

    def add(self, step: int, value: float) -> None:
        """Add a value; of a long run only every second one is kept, then every fourth, and so on."""
        if self._num_added % self._stride == 0:
            self._points.append((step, value))
        self._num_added += 1
        if len(self._points) > _CURVE_POINTS:
            del self._points[1::2]
            self._stride *= 2

    def drawn(self, width: int) -> str:
        """Return the means over equal numbers of steps as at most `width` blocks, the smallest as the lowest."""
        points = [(step, value) for step, value in self._points if math.isfinite(value)]
        if len(points) < 2:
            return ""
        width, (first, _), (last, _) = min(width, len(points)), points[0], points[-1]
        cells: list[list[float]] = [[] for _ in range(width)]
        for step, value in points:
            cells[(step - first) * width // (last - first + 1)].append(value)
        means: list[float] = []
        for values in cells:  # one without a value goes on as the one before; the first one has a value
            means.append(sum(values) / len(values) if values else means[-1])
        low, scale = min(means), (len(_CURVE_LEVELS) - 1) / ((max(means) - min(means)) or 1.0)
        return "".join(_CURVE_LEVELS[round((mean - low) * scale)] for mean in means)


def _modes(run: Run) -> dict[str, str]:
    """Return `min` or `max` for each metric that the run monitors."""
    modes = {callback.monitored: callback.mode for callback in run.callbacks if hasattr(callback, "mode")}
    with suppress(CheckpointError):  # no metric is monitored
        if run.checkpointer.store is not None:
            monitor = run.checkpointer.store.monitor()
            modes[monitor.metric] = monitor.mode
    return {name: mode for name, mode in modes.items() if name is not None and mode is not None}


def _checkpoint_table(store: CheckpointStore) -> Table:
    """Return the saved checkpoints, with the best one marked if the run monitors a metric."""
    entries = store.entries()
    monitor: Monitor | None = None
    best: CheckpointEntry | None = None
    with suppress(CheckpointError):  # no metric is monitored, or none was measured yet
        best, monitor = store.best(*store.monitor()), store.monitor()
    columns = ["checkpoint", "step", "reason", *([monitor.metric] if monitor else []), ""]
    table = Table(f"Checkpoints in {store.folder}", columns)
    for index, entry in enumerate(entries):
        values = [number(entry.metrics[monitor.metric]) if monitor.metric in entry.metrics else "-"] if monitor else []
        marks = ["best"] * (entry == best) + ["last"] * (index == len(entries) - 1)
        table.rows.append([entry.path.name, f"{entry.step:,}", entry.reason, *values, ", ".join(marks)])
        if entry == best:
            table.highlighted.add(index)
    return table


class RunProgress:
    """Progress of a run since construction, as numbers and text; only reads, so any thread may call it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.started = time.monotonic()
        self._first_step = run.state.step
        self._first_samples = run.state.samples

    def line(self, metrics: Mapping[str, float], *, now: float) -> list[str]:
        """Return the items of the line of a log point with the given metrics."""
        items = [self.step(), f"epoch {self.epoch()}", *self.training_metrics(metrics)]
        items += [f"{self.samples_per_second(metrics, now=now):,.0f} samples/s", clock(now - self.started)]
        remaining = self.seconds_left(now=now)
        return items if remaining is None else [*items, f"ETA {clock(remaining)}"]

    def step(self) -> str:
        """Return `step 120/4,000`, without the total if it is unknown."""
        total = "" if self.run.max_steps is None else f"/{self.run.max_steps:,}"
        return f"step {self.run.state.step:,}{total}"

    def epoch(self) -> str:
        """Return `3/10`: the current epoch, counted from 1, and the total if it is known."""
        steps = self.run.loader.num_steps if self.run.loader is not None else None
        total = math.ceil(self.run.max_steps / steps) if steps and self.run.max_steps is not None else None
        state = self.run.state
        current = max(1, state.epoch + (state.position > 0))  # after an epoch's last step it is still that epoch
        return f"{current}" if total is None else f"{min(current, total)}/{total}"

    def fraction(self) -> float | None:
        """Return the fraction of the run that is done, or of the epoch if the total is unknown."""
        state = self.run.state
        if self.run.max_steps:
            return min(1.0, state.step / self.run.max_steps)
        return min(1.0, state.position / state.epoch_length) if state.epoch_length else None

    def with_latest_loss(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of the last log point, with the loss of a later step of this rank if one has arrived."""
        means = self.run.means
        latest = None if means is None or means.latest is None else means.latest.read()
        if latest is None or latest[0] <= self.run.logged_at("train/loss"):
            return metrics
        return {**metrics, "train/loss": latest[1]}

    def training_metrics(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the training metrics, such as `loss 0.6931`, the loss first."""
        names = [name for name in metrics if name.startswith("train/") and name not in _SHOWN_ELSEWHERE]
        names.sort(key=lambda name: name != "train/loss")  # several ranks reduce them in the order of their names
        return [f"{name.removeprefix('train/')} {number(metrics[name])}" for name in names]

    def samples_per_second(self, metrics: Mapping[str, float], *, now: float) -> float:
        """Return the rate of the last log interval, or before there is one the mean since the start."""
        measured = metrics.get("train/samples_per_second")
        # Not of the log point after the first step, which compiles and starts workers.
        if measured is not None and self.run.logged_at("train/samples_per_second") > self._first_step + 1:
            return measured
        return (self.run.state.samples - self._first_samples) / max(now - self.started, 1e-9)

    def seconds_left(self, *, now: float) -> float | None:
        """Return the remaining seconds at the mean pace so far, including evaluations; `None` if unknown."""
        done = self.run.state.step - self._first_step
        if self.run.max_steps is None or done == 0:
            return None
        return (now - self.started) / done * max(0, self.run.max_steps - self.run.state.step)


class LiveProgress:
    """Draws the progress of a run below other output, from construction on, in a background thread."""

    def __init__(self, progress: RunProgress, *, refresh_per_second: float) -> None:
        from rich.live import Live

        self._shown = ExitStack()
        # Taken before the start, which replaces both streams.
        streams, console = (sys.stdout, sys.stderr), terminal()
        self._width: Callable[[], int] = lambda: console.width
        draw = ProgressText(progress, width=self._width).draw
        display = Live(get_renderable=draw, console=console, refresh_per_second=refresh_per_second, transient=True)
        display.start(refresh=True)  # a line printed while the first picture is drawn would repeat it
        self._shown.callback(display.stop)
        self._shown.enter_context(_log_to_current_stderr(streams))

    def say(self, lines: Sequence[Sequence[str]], *, last: str) -> None:
        """Write above the display the first of the lines that fits with `last`, or what fits of the last one."""
        items = next((line for line in lines if len("  ".join([*line, last])) <= self._width()), lines[-1])
        say(fitting([*items, last], self._width(), keep=last))

    def stop(self) -> None:
        """Remove the display; may be called twice."""
        self._shown.close()


class NotebookProgress:
    """Rewrites the last line of a notebook's output, from construction on, in a background thread.

    By a carriage return, which ranks in other processes can write too.
    """

    def __init__(self, progress: RunProgress, *, refresh_per_second: float) -> None:
        self._text = ProgressText(progress)
        self._line = ""
        self._writing = Lock()  # a line of the main thread and the display's would mix
        self._ended = Event()
        # A daemon, or a run that fails could not end its process.
        self._thread = Thread(target=self._refresh, args=(1 / refresh_per_second,), name="progress", daemon=True)
        self._write()
        self._thread.start()

    def say(self, lines: Sequence[Sequence[str]], *, last: str) -> None:
        """Write the first of the lines, and `last`, above that of the display."""
        with self._writing:
            print("\r" + printable("  ".join([*lines[0], last])).ljust(len(self._line)), flush=True)
            self._line = ""
        self._write()

    def stop(self) -> None:
        """Leave the last state in the output; may be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        # Joined before the last write, or the thread could write below it.
        self._thread.join()
        self._write()
        say("")

    def _refresh(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            self._write()

    def _write(self) -> None:
        line = "  ".join(filter(None, self._text.draw().plain.split("\n")))
        with self._writing:
            if line != self._line:
                print("\r" + line.ljust(len(self._line)), end="", flush=True)
                self._line = line


class ProgressText:
    """The progress of a run as lines of text with bars."""

    def __init__(self, progress: RunProgress, *, width: Callable[[], int] = lambda: sys.maxsize) -> None:
        from rich.text import Text

        self._text = Text
        self._width = width
        self._progress = progress

    def draw(self) -> Text:
        """Return the current display, which has the same number of lines throughout a fit."""
        run, now = self._progress.run, time.monotonic()
        lines = [] if run.phase_optimizer is None else [self._headline(now), self._numbers(now)]
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
        # Copied at once: the main thread may be adding to it.
        metrics = dict(self._progress.with_latest_loss(dict(self._progress.run.state.metrics)))
        rate = f"{self._progress.samples_per_second(metrics, now=now):,.0f} samples/s"
        elapsed = clock(now - self._progress.started)
        # What callbacks add comes last: a narrow terminal must show what the step returns.
        last = {name: metrics.pop(name) for name in _SHOWN_LAST if name in metrics}
        returned, other = self._progress.training_metrics(metrics), self._progress.training_metrics(last)
        return self._text(fitting([*returned, rate, elapsed, *other], self._width()))

    def _evaluation(self) -> Text:
        """Return the bar of the running evaluation, or an empty line: the display would jump without it."""
        evaluation = self._progress.run.evaluation
        line = self._text()
        if evaluation is None:
            return line
        line.append(printable(f"{evaluation.stage}  "), style="bold")
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
def _log_to_current_stderr(streams: tuple[object, ...]) -> Iterator[None]:
    """Redirect log handlers of the given streams, which the display has replaced, to the current `sys.stderr`.

    Otherwise they would write into the middle of the display.
    """
    # logging has no public list of its loggers.
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    handlers = [handler for log in loggers if isinstance(log, logging.Logger) for handler in log.handlers]
    redirected = [(h, h.stream) for h in handlers if isinstance(h, logging.StreamHandler) and h.stream in streams]
    for handler, _ in redirected:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in redirected:
            handler.setStream(stream)


def fitting(items: Sequence[str], width: int, *, keep: str = "") -> str:
    """Return a line of the first item, and of each further one that leaves it at most `width` wide.

    There is room for `keep`, the last item, unless the first one takes it.
    """
    first, *rest = map(printable, items)
    line = first
    for index, item in enumerate(rest, start=1):
        needed = 2 + len(item) + (2 + len(keep) if keep and index < len(rest) else 0)
        if len(line) + needed <= width:
            line = f"{line}  {item}"
    return line


def _named(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {number(value)}" for name, value in metrics.items()]
