"""Saving the run: at intervals, when a metric is better than before, at the end, and when something goes wrong."""

from __future__ import annotations

import logging
import math
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Literal

from trainkit.callback import Callback
from trainkit.checkpoints.store import CheckpointEntry, CheckpointError, CheckpointStore, Monitor
from trainkit.duration import Duration, Interval
from trainkit.errors import NonFiniteLoss, UserError, nearest
from trainkit.optimization import Optimization
from trainkit.state import TrainState
from trainkit.strategy import Strategy

from .save_retries import SaveRetries

if TYPE_CHECKING:
    from trainkit.run import Run

logger = logging.getLogger(__name__)

BEST = "best"
"""The reason of checkpoints that were saved because their metric was among the best."""


class Checkpoint(Callback):
    """Keeps the latest checkpoints and the best ones, and removes the others once a newer one is verified.

        step          100     200     250 (epoch 1)     300
        evaluation                     x
        every=100step  save    save                      save
        metric                         save, if it is among the best

    At most one checkpoint is written after a step. A metric counts only right after the evaluation that gave it.

    Args:
        every: How often to save, best or not; `None` never. Times are looked at when training logs.
        metric: The metric of validation that the best checkpoints are chosen by, such as `"validation/loss"`.
        mode: Whether a small (`min`) or a large (`max`) value is good.
        keep_best: How many of the best to keep.
        keep_last: How many of the latest to keep, those saved as the best counted; `None` keeps all.
        save_at_end: Whether the end of training is saved; a run that a signal ends is always saved.
        save_on_exception: Whether the last complete step is saved when an exception ends a run of one process.
        background: Whether training goes on while a checkpoint is written: it waits for a copy of the state in host
            memory only. An error of the writer is noticed after the next step. (Elsewhere this is called `async`,
            which Python does not allow as a name.)
        sharded: Whether each rank writes what it holds, where the strategy shards the state (`fusion` with
            `shard_optimizer`, `pipeline`): no rank gathers all of it. Every machine must see the run's folder. In the
            background each rank copies what it holds, and after each step until that is written ranks ask each other.
        retries: How many saves in a row may fail, of a full disk for example, while training goes on; the next ends the
            run, and so does the save at the end. 0: the first ends it.
        retry_after: How much is trained before a save is tried again.

    """

    def __init__(
        self,
        *,
        every: str | Duration | None = "1epoch",
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_best: int = 1,
        keep_last: int | None = 1,
        save_at_end: bool = True,
        save_on_exception: bool = True,
        background: bool = False,
        sharded: bool = False,
        retries: int = 10,
        retry_after: str | Duration = "1min",
    ) -> None:
        if mode not in ("min", "max"):
            raise UserError(f"checkpoint.mode={mode!r} is unknown.{nearest(mode, ('min', 'max'))} Choose min or max.")
        for name, count in (("keep_best", keep_best), ("keep_last", keep_last)):
            if count is not None and count < 1:
                raise UserError(f"checkpoint.{name} must be at least 1, got {count}.")
        self.every = None if every is None else Duration.parse(every, where="checkpoint.every")
        self.monitor = None if metric is None else Monitor(metric, mode)
        self.keep_best = keep_best
        self.keep_last = keep_last
        self.save_at_end = save_at_end
        self.save_on_exception = save_on_exception
        self.background = background
        self.sharded = sharded
        self._retries = SaveRetries(retries, Duration.parse(retry_after, where="checkpoint.retry_after"))
        self._by_clock = self.every is not None and self.every.unit in ("second", "minute", "hour")
        self._interval = Interval(self.every)
        self._reason: str | None = None
        self._saved_step: int | None = None
        self._is_prepared = False

    def on_fit_start(self, run: Run) -> None:
        if self.monitor is not None and not run.data.has("validation"):
            raise UserError(
                f"checkpoint.metric={self.monitor.metric!r} is a metric of validation, but the data has none; give "
                "Data(validation=...), or set checkpoint.metric=null."
            )
        if run.checkpoints is not None:
            run.checkpoints = CheckpointStore(run.checkpoints.folder, monitor=self.monitor)
        self._interval.start(run.state)
        self._reason = None
        self._is_prepared = False
        self._retries.start()
        self._saved_step = run.strategy.comm.broadcast_object(_step_saved_last(run)) if run.resumed_from else None

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        if self._by_clock and self._interval.due(run.state):
            self._reason = "interval"

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if self.monitor is None or stage != "validation" or run.checkpoints is None:
            return
        if self.monitor.metric not in metrics:
            raise UserError(
                f"checkpoint.metric={self.monitor.metric!r} is no metric of validation."
                f"{nearest(self.monitor.metric, metrics)} There are: {', '.join(sorted(metrics)) or 'none'}."
            )
        value = metrics[self.monitor.metric]
        self._settle(run)  # what is being written may be one of the best
        if run.strategy.comm.broadcast_object(run.is_main and self._is_among_best(run.checkpoints, value)):
            self._reason = BEST

    def on_step_end(self, run: Run) -> None:
        try:  # waits for no disk
            if run.check_saving():
                self._retries.succeeded()
        except CheckpointError as error:
            if not self.background:  # another callback's save
                raise
            self._retries.failed_in_background(error, run)
        if self.background and not self._is_prepared:  # the optimizer has its state by now
            run.prepare_saving(sharded=self.sharded)
            self._is_prepared = True
        # Saved here and not where it was decided, so that what other callbacks make of an evaluation is saved too.
        if not self._by_clock and self._interval.due(run.state):
            self._reason = self._reason or "interval"
        if self._retries.step is not None:
            self._reason = None if run.state.step < self._retries.step else self._reason or "retry"
        if self._reason is not None:
            self._save(run, self._reason)

    def on_fit_end(self, run: Run) -> None:
        # What was written in the background may be of this very step, and only the main rank knows that it failed.
        if self.background and run.strategy.comm.broadcast_object(self._settle(run)):
            self._saved_step = None
        # Not what this rank received: a signal that comes now is for none or for all of those that save.
        if run.stopped_by is not None:
            self._save(run, run.stopped_by.name, is_last=True)
        elif self.save_at_end:
            self._save(run, "end", is_last=True)
        run.finish_saving()

    def on_exception(self, run: Run, error: BaseException) -> None:
        if not self.save_on_exception or run.checkpoints is None or not _is_worth_saving(error):
            return
        if run.state.step == 0 or _has_other_ranks(run.strategy) or _was_updating(error, run.strategy):
            return
        try:
            self._save(run, "exception", is_last=True)
            run.finish_saving()
        except Exception as failure:
            # The run ends with the first error, which says more than that saving failed on top of it.
            logger.error("step %d could not be saved after the exception: %s", run.state.step, failure)

    def _save(self, run: Run, reason: str, *, is_last: bool = False) -> None:
        """Save this step unless that has been done, and remove the checkpoints that are not kept; collective.

        Raises CheckpointError if that fails and there is no later step to try it after, or it has failed too often.
        """
        self._reason = None
        if self._saved_step == run.state.step:
            return
        store = run.checkpoints

        def say_and_remove_others(entry: CheckpointEntry) -> None:
            assert store is not None
            logger.info("saved %s (%s)", entry.path, reason)
            self._remove_others(store)
            self._retries.succeeded()

        if self.background:
            self._settle(run)
        try:
            run.save(reason=reason, background=self.background, sharded=self.sharded, then=say_and_remove_others)
        except CheckpointError as error:
            if is_last:
                raise
            self._retries.failed(error, run)
            return
        if not self.background:
            self._retries.succeeded()
        self._saved_step = run.state.step

    def _settle(self, run: Run) -> bool:
        """Return whether the save in the background failed, once it is done; raises its error if too many have."""
        try:
            if run.finish_saving():
                self._retries.succeeded()
        except CheckpointError as error:
            self._retries.failed_in_background(error, run)
            return True
        return False

    def _remove_others(self, store: CheckpointStore) -> None:
        if self.keep_last is None:
            return
        entries = store.entries()
        kept = [*entries[-self.keep_last :], *self._best(store)]
        if len({entry.name for entry in kept}) < len(entries):
            store.prune(kept)

    def _is_among_best(self, store: CheckpointStore, value: float) -> bool:
        assert self.monitor is not None
        best = self._best(store)
        if math.isnan(value):
            return False
        if len(best) < self.keep_best:
            return True
        worst = best[-1].metrics[self.monitor.metric]
        return value < worst if self.monitor.mode == "min" else value > worst

    def _best(self, store: CheckpointStore) -> list[CheckpointEntry]:
        """Return the best checkpoints, best first: of those alone whose metric was measured when they were saved."""
        if self.monitor is None:
            return []
        if not any(self.monitor.metric in entry.metrics for entry in store.entries()):
            return []
        return [entry for entry in store.ranked(*self.monitor) if entry.reason == BEST][: self.keep_best]


def _step_saved_last(run: Run) -> int | None:
    entry = run.checkpoints.last() if run.is_main and run.checkpoints is not None else None
    return None if entry is None else entry.step


def _is_worth_saving(error: BaseException) -> bool:
    """Return whether the weights are sound, and whoever ended the run has time for it.

    A KeyboardInterrupt is the second Ctrl-C: it may have come in the middle of anything, and asks to leave at once.
    """
    return isinstance(error, Exception) and not isinstance(error, (NonFiniteLoss, CheckpointError))


def _has_other_ranks(strategy: Strategy) -> bool:
    """Return whether saving would wait for ranks that the exception may not have reached."""
    return type(strategy).all_gather_object is not Strategy.all_gather_object


def _was_updating(error: BaseException, strategy: Strategy) -> bool:
    """Return whether the error came from inside a step's update, where some weights are new and others old."""
    update = {
        type(strategy).optimizer_step.__code__,
        Optimization.after_step.__code__,
        Optimization.after_epoch.__code__,
        TrainState.advance.__code__,
    }
    return not update.isdisjoint(_codes(error.__traceback__))


def _codes(trace: TracebackType | None) -> set[CodeType]:
    codes = set()
    while trace is not None:
        codes.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    return codes
