"""Checkpoints: at intervals, when a metric improves, at the end, and after an exception."""

from __future__ import annotations

import logging
import math
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Literal

from trainkit.callback import Callback
from trainkit.checkpoint.store import CheckpointEntry, CheckpointError, CheckpointStore, DamagedCheckpoint, Monitor
from trainkit.duration import Duration, Interval
from trainkit.errors import NonFiniteLoss, UserError, nearest
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.state import TrainState
from trainkit.strategy import Strategy

if TYPE_CHECKING:
    from trainkit.loops.run import Run

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
        every: Save interval; `None` disables it. An interval of time is checked at log points.
        monitor: The validation metric by which the best checkpoints are chosen, such as `"validation/loss"`.
        mode: `min` if a small value is good, `max` if a large one is.
        save_top_k: Number of best checkpoints to keep.
        save_last_k: Number of latest checkpoints to keep, including those saved as the best; `None` keeps all.
        save_at_end: Save at the end of training. A run that a signal ends is always saved.
        save_on_exception: Save the last complete step if an exception ends a run of one process.
        async_save: Write checkpoints in a background thread. Training waits only for a copy of the state in host
            memory. An error of the writer is noticed after the next step.
        sharded: Each rank writes its own shard, if the strategy shards the state (`fusion` with `shard_optimizer`,
            `pipeline`); no rank gathers all of it. Every machine must see the run folder. With `async_save` each rank
            copies its shard, and ranks ask each other after each step until all shards are written.
        max_retries: Number of saves in a row that may fail, for example because the disk is full, while training
            continues. The next failure ends the run, and so does a failure at the end. 0: the first failure ends it.
        retry_every: Duration of training before a failed save is tried again.

    """

    def __init__(
        self,
        *,
        every: str | Duration | None = "1epoch",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last_k: int | None = 1,
        save_at_end: bool = True,
        save_on_exception: bool = True,
        async_save: bool = False,
        sharded: bool = False,
        max_retries: int = 10,
        retry_every: str | Duration = "1min",
    ) -> None:
        if mode not in ("min", "max"):
            raise UserError(f"checkpoint.mode={mode!r} is unknown.{nearest(mode, ('min', 'max'))} Choose min or max.")
        for name, count in (("save_top_k", save_top_k), ("save_last_k", save_last_k)):
            if count is not None and count < 1:
                raise UserError(f"checkpoint.{name} must be at least 1, got {count}.")
        self.every = None if every is None else Duration.parse(every, where="checkpoint.every")
        self.monitor = None if monitor is None else Monitor(monitor, mode)
        self.save_top_k = save_top_k
        self.save_last_k = save_last_k
        self.save_at_end = save_at_end
        self.save_on_exception = save_on_exception
        self.async_save = async_save
        self.sharded = sharded
        self._retry = SaveRetry(max_retries, Duration.parse(retry_every, where="checkpoint.retry_every"))
        self._by_clock = self.every is not None and self.every.unit in ("second", "minute", "hour")
        self._interval = Interval(self.every)
        self._reason: str | None = None
        self._saved_step: int | None = None
        self._is_prepared = False

    def on_fit_start(self, run: Run) -> None:
        if self.monitor is not None and not run.data.has("validation"):
            raise UserError(
                f"checkpoint.monitor={self.monitor.metric!r} is a metric of validation, but the data has none; give "
                "Data(validation=...), or set checkpoint.monitor=null."
            )
        if run.checkpointer.store is not None:
            run.checkpointer.store = CheckpointStore(run.checkpointer.store.folder, monitor=self.monitor)
        self._interval.start(run.state)
        self._reason = None
        self._is_prepared = False
        self._retry.start()
        self._saved_step = run.strategy.comm.broadcast_object(_step_saved_last(run)) if run.resumed_from else None

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        if self._by_clock and self._interval.due(run.state):
            self._reason = "interval"

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if self.monitor is None or stage != "validation" or run.checkpointer.store is None:
            return
        if self.monitor.metric not in metrics:
            raise UserError(
                f"checkpoint.monitor={self.monitor.metric!r} is not a validation metric."
                f"{nearest(self.monitor.metric, metrics)} There are: {', '.join(sorted(metrics)) or 'none'}."
            )
        value = metrics[self.monitor.metric]
        self._settle(run)  # what is being written may be one of the best
        if run.strategy.comm.broadcast_object(run.is_main and self._is_among_best(run.checkpointer.store, value)):
            self._reason = BEST

    def on_step_end(self, run: Run) -> None:
        try:  # waits for no disk
            if run.checkpointer.poll():
                self._retry.succeeded()
        except CheckpointError as error:
            if not self.async_save:  # another callback's save
                raise
            self._retry.failed_in_background(error, run)
        if self.async_save and not self._is_prepared:  # the optimizer has its state by now
            run.checkpointer.prepare(sharded=self.sharded)
            self._is_prepared = True
        # Saved here and not where it was decided, so that what other callbacks make of an evaluation is saved too.
        if not self._by_clock and self._interval.due(run.state):
            self._reason = self._reason or "interval"
        if self._retry.step is not None:
            self._reason = None if run.state.step < self._retry.step else self._reason or "retry"
        if self._reason is not None:
            self._save(run, self._reason)

    def on_fit_end(self, run: Run) -> None:
        # What was written in the background may be of this very step, and only the main rank knows that it failed.
        if self.async_save and run.strategy.comm.broadcast_object(self._settle(run)):
            self._saved_step = None
        # Not what this rank received: a signal that comes now is for none or for all of those that save.
        if run.stopped_by is not None:
            self._save(run, run.stopped_by.name, is_last=True)
        elif self.save_at_end:
            self._save(run, "end", is_last=True)
        run.checkpointer.wait()

    def on_exception(self, run: Run, error: BaseException) -> None:
        if not self.save_on_exception or run.checkpointer.store is None or not _is_worth_saving(error):
            return
        if run.state.step == 0 or _has_other_ranks(run.strategy) or _was_updating(error, run.strategy):
            return
        try:
            self._save(run, "exception", is_last=True)
            run.checkpointer.wait()
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
        store = run.checkpointer.store

        def say_and_remove_others(entry: CheckpointEntry) -> None:
            assert store is not None
            logger.info("saved %s (%s)", entry.path, reason)
            self._remove_others(store)
            self._retry.succeeded()

        if self.async_save:
            self._settle(run)
        try:
            run.checkpointer.save(
                reason=reason, background=self.async_save, sharded=self.sharded, then=say_and_remove_others
            )
        except CheckpointError as error:
            if is_last:
                raise
            self._retry.failed(error, run)
            return
        if not self.async_save:
            self._retry.succeeded()
        self._saved_step = run.state.step

    def _settle(self, run: Run) -> bool:
        """Return whether the save in the background failed, once it is done; raises its error if too many have."""
        try:
            if run.checkpointer.wait():
                self._retry.succeeded()
        except CheckpointError as error:
            self._retry.failed_in_background(error, run)
            return True
        return False

    def _remove_others(self, store: CheckpointStore) -> None:
        if self.save_last_k is None:
            return
        entries = store.entries()
        kept = [*entries[-self.save_last_k :], *self._best(store)]
        if len({entry.name for entry in kept}) < len(entries):
            store.prune(kept)

    def _is_among_best(self, store: CheckpointStore, value: float) -> bool:
        assert self.monitor is not None
        best = self._best(store)
        if math.isnan(value):
            return False
        if len(best) < self.save_top_k:
            return True
        worst = best[-1].metrics[self.monitor.metric]
        return value < worst if self.monitor.mode == "min" else value > worst

    def _best(self, store: CheckpointStore) -> list[CheckpointEntry]:
        """Return the best checkpoints, best first: of those alone whose metric was measured when they were saved."""
        if self.monitor is None:
            return []
        if not any(self.monitor.metric in entry.metrics for entry in store.entries()):
            return []
        return [entry for entry in store.ranked(*self.monitor) if entry.reason == BEST][: self.save_top_k]


class SaveRetry:
    """Failed saves in a row, and the step at which to try again.

    step      100           110           120
    save      disk full     disk full     saved
    failures  1             2             0

    Args:
        limit: Number of saves in a row that may fail; the next failure ends the run.
        wait: Duration of training before the next try.

    """

    def __init__(self, limit: int, wait: Duration) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise UserError(f"checkpoint.max_retries must be a whole number, 0 or more, got {limit!r}.")
        self._limit, self._wait = limit, wait
        self._failures = 0
        self.step: int | None = None
        """Step after which to try again; `None` if no save has failed."""

    def start(self) -> None:
        """Forget the failures of an earlier run."""
        self._failures, self.step = 0, None

    def succeeded(self) -> None:
        """Count from the beginning; may be called by the thread that saves."""
        self._failures, self.step = 0, None

    def failed(self, error: CheckpointError, run: Run) -> None:
        """Warn and set the step of the next try; raises the error after too many failures. Collective."""
        self.count(error)
        self.step = run.state.step + run.strategy.comm.broadcast_object(_steps(self._wait, run))
        if run.is_main:
            self._warn(error, f"after step {self.step}")

    def failed_in_background(self, error: CheckpointError, run: Run) -> None:
        """Warn on the ranks that know of the failure; raises the error after too many. Not collective."""
        self.count(error)
        if run.is_main:
            self._warn(error, "when the next is due")

    def count(self, error: CheckpointError) -> None:
        """Count a failure; raises the error if it cannot be tried again."""
        self._failures += 1
        if self._failures > self._limit or isinstance(error, DamagedCheckpoint):
            raise error

    def _warn(self, error: CheckpointError, when: str) -> None:
        logger.warning(
            "%s Training continues, and saving is tried again %s; %d more failures in a row end the run "
            "(callbacks.checkpoint.max_retries=%d).",
            error,
            when,
            self._limit - self._failures + 1,
            self._limit,
        )


def _steps(wait: Duration, run: Run) -> int:
    """Return about how many steps a duration takes, at the pace so far."""
    state = run.state
    elapsed = wait.elapsed(state)
    return max(1, math.ceil(wait.value * max(state.step, 1) / elapsed)) if elapsed > 0 else 1


def _step_saved_last(run: Run) -> int | None:
    entry = run.checkpointer.store.last() if run.is_main and run.checkpointer.store is not None else None
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
        PhaseOptimizer.step_schedules.__code__,
        TrainState.advance.__code__,
    }
    return not update.isdisjoint(_codes(error.__traceback__))


def _codes(trace: TracebackType | None) -> set[CodeType]:
    codes = set()
    while trace is not None:
        codes.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    return codes
