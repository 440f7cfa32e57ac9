"""Run: what callbacks, loops and strategies see of a run on this rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from trainkit.data.batch import BatchPlan
from trainkit.data.data import Data
from trainkit.data.loader import BatchLoader
from trainkit.logger import Logger
from trainkit.loops.checkpointing import Checkpointer, StatefulCallback
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.precision import Precision
from trainkit.signals import StopSignals
from trainkit.state import TrainState
from trainkit.strategy import Strategy
from trainkit.task import TaskModule

if TYPE_CHECKING:
    from trainkit.loops.step_timer import StepTimer
    from trainkit.profiling import PeakMemoryTracker

logger = logging.getLogger(__name__)


class RunCallback(StatefulCallback, Protocol):
    """A callback, as far as a run is concerned."""

    def overridden_hooks(self) -> Mapping[str, Callable[..., None]]:
        """Return the methods to call, by the name of the hook."""

    def close(self) -> None:
        """Release what was acquired."""


@dataclass
class EvaluationProgress:
    """Progress of an evaluation on this rank."""

    stage: str
    num_batches: int | None
    batch: int = 0


@dataclass
class Run:
    """The argument of every callback hook. Read anything; change it through the methods."""

    task: TaskModule
    data: Data
    strategy: Strategy
    precision: Precision
    callbacks: Sequence[RunCallback]
    loggers: Sequence[Logger]
    signals: StopSignals
    seed: int
    run_dir: Path | None
    """The run's folder; `None` for a run that writes nothing."""
    config: str = ""
    """All settings of the run as YAML."""
    max_steps: int | None = None
    """Optimizer steps of the whole run, if `max_duration` determines them."""
    state: TrainState = field(default_factory=TrainState)
    loader: BatchLoader | None = None
    plan: BatchPlan | None = None
    reference_batch_size: ReferenceBatchSize | None = None
    """The global batch that the learning rate was chosen for, if it is known."""
    phase_optimizers: Sequence[PhaseOptimizer] = ()
    """One, or one for each phase of the task; none outside of training."""
    means: WeightedMeans | None = None
    """The means of the outputs of training steps since the last log."""
    evaluation: EvaluationProgress | None = None
    step_timer: StepTimer | None = None
    """Times the parts of steps, if a callback asked for it in `on_fit_start`."""
    stop_reason: str | None = None
    stopped_by: Signals | None = None
    """The signal that ended the run, the same on every rank."""
    resumed_from: str | None = None
    weights_are_finite: Callable[[], bool] = lambda: True
    """Returns True if the weights may be saved; collective."""

    def __post_init__(self) -> None:
        if self.loggers:
            from trainkit.loggers.guarded import SafeLogger

            self.loggers = [SafeLogger(destination) for destination in self.loggers]
        self.loaders: list[BatchLoader] = []  # of evaluations
        self._measured_at: dict[str, int] = {}  # metric -> the step at which it was logged
        self._hooks: dict[str, list[Callable[..., None]]] = {}
        for callback in self.callbacks:
            for name, hook in callback.overridden_hooks().items():
                self._hooks.setdefault(name, []).append(hook)
        self.checkpointer = Checkpointer(self)

    @cached_property
    def peak_memory(self) -> PeakMemoryTracker:
        """The peak of allocated device memory, which callbacks read."""
        from trainkit.profiling import PeakMemoryTracker

        return PeakMemoryTracker(self.strategy.device)

    @property
    def phase_optimizer(self) -> PhaseOptimizer | None:
        """The task's optimizer, or that of its first phase; `None` outside of training."""
        return self.phase_optimizers[0] if self.phase_optimizers else None

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and reports to the user."""
        return self.strategy.comm.is_main

    def hooks(self, name: str) -> list[Callable[..., None]]:
        """Return the methods of the callbacks that override a hook."""
        return self._hooks.get(name, [])

    def emit(self, hook: str, *arguments: Any) -> None:
        """Call the callbacks' methods for a hook."""
        for method in self.hooks(hook):
            method(self, *arguments)

    def request_stop(self, reason: str) -> None:
        """Stop training after this step, on all ranks; `reason` is written to the summary."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def sync_stop_signal(self) -> bool:
        """Set `stopped_by` to the first rank's signal; return True if any rank received one. Collective."""
        received = self.strategy.comm.all_gather_object(self.signals.received)
        self.stopped_by = next((number for number in received if number is not None), None)
        return self.stopped_by is not None

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write metrics under their full names (`validation/loss`); they must be the same on every rank."""
        self.state.metrics.update(metrics)
        self._measured_at.update(dict.fromkeys(metrics, self.state.step))
        for destination in self.loggers:
            destination.write(metrics, step=self.state.step)

    def log_text(self, name: str, text: str) -> None:
        """Write a text to the loggers that support it; does nothing on ranks without loggers."""
        for destination in self.loggers:
            destination.write_text(name, text, step=self.state.step)

    def log_image(self, name: str, image: Tensor) -> None:
        """Write an image: (height, width) or (channels, height, width), from 0 to 1 or in uint8."""
        if self.loggers:
            from trainkit.loggers.media import to_uint8_image

            picture = to_uint8_image(image)
            for destination in self.loggers:
                destination.write_image(name, picture, step=self.state.step)

    def log_histogram(self, name: str, values: Tensor) -> None:
        """Write a histogram of a tensor's elements."""
        if self.loggers:
            from trainkit.loggers.media import histogram_of

            histogram = histogram_of(values)
            for destination in self.loggers:
                destination.write_histogram(name, histogram, step=self.state.step)

    def report_exception(self, error: BaseException) -> None:
        """Call `on_exception` of the callbacks, logging what they raise themselves; not collective."""
        self.stop_reason = f"{type(error).__name__}: {error}"
        for method in self.hooks("on_exception"):
            try:
                method(self, error)
            except Exception:
                logger.exception("on_exception failed after %s", self.stop_reason)

    def close(self) -> None:
        """Close the checkpointer, loaders, callbacks and loggers, each even if another fails; not collective."""
        errors: list[Exception] = []
        closing: list[Callable[[], None]] = [self.checkpointer.close]
        closing += [loader.close for loader in (*self.loaders, *([] if self.loader is None else [self.loader]))]
        for close in closing + [item.close for item in self.callbacks] + [item.close for item in self.loggers]:
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def metrics_of_this_step(self) -> dict[str, float]:
        """Return the metrics that were logged at the present step."""
        metrics, measured_at = self.state.metrics, self._measured_at
        return {name: metrics[name] for name, step in measured_at.items() if step == self.state.step}
