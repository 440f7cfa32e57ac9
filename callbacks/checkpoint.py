"""Checkpoints at intervals, when a metric improves, at the end, and after an exception."""

from __future__ import annotations

import logging
import math
import socket
from traceback import walk_tb
from typing import Annotated, Any, Literal

from annotated_types import Ge

from trainkit.callback import Callback
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore, Monitor, ranked
from trainkit.duration import Duration, Interval
from trainkit.errors import (
    CheckpointError,
    DamagedCheckpoint,
    NonFiniteLoss,
    UserError,
    check_monitored,
)
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.state import TrainState
from trainkit.strategy import Strategy

logger = logging.getLogger(__name__)

_LARGE_IS_GOOD = ("accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "iou", "bleu", "psnr")
BEST = "best"
"""Reason of a checkpoint whose metric was among the best."""


class Checkpoint(Callback):
    """Keeps the latest and the best checkpoints, and removes the others once a newer one is verified.

        step          100     200     250 (epoch 1)     300
        evaluation                     x
        every=100step  save    save                      save
        metric                         save, if it is among the best

    At most one checkpoint is written after a step. A metric counts only at the step of its evaluation.

    Args:
        every: Save interval; `None` disables it. An interval of time is checked at log points.
        monitor: Validation metric that determines the best checkpoints, such as `"validation/loss"`.
        mode: `min` if a small value is good, `max` if a large one is.
        save_top_k: Number of best checkpoints to keep.
        save_last_k: Number of latest checkpoints to keep, including those saved as the best; `None` keeps all.
        save_at_end: Save at the end of training. A run that is ended by a signal is always saved.
        save_on_exception: Save the last complete step if an exception ends a run of one process.
        async_save: Write checkpoints in a background thread. Training waits only for a copy of the state in host
            memory. An error of the writer is raised after the next step.
        sharded: Each rank writes its own shard, if the strategy shards the state (`fusion` with `shard_optimizer`,
            `pipeline`); no rank gathers the full state. Every machine must see the run folder. With `async_save` each
            rank copies its shard, and ranks poll each other after each step until all shards are written.
        trainable_only: Save no frozen parameters, only their hash: the adapters of LoRA without the pretrained weights.
            A run that resumes builds the task with the same frozen weights, or is refused.
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
        save_top_k: Annotated[int, Ge(1)] = 1,
        save_last_k: Annotated[int, Ge(1)] | None = 1,
        save_at_end: bool = True,
        save_on_exception: bool = True,
        async_save: bool = False,
        sharded: bool = False,
        trainable_only: bool = False,
        max_retries: Annotated[int, Ge(0)] = 10,
        retry_every: str | Duration = "1min",
    ) -> None:
        check_arguments(Checkpoint.__init__, locals(), of="checkpoint")
        if sharded and trainable_only:
            raise UserError(
                "checkpoint.trainable_only=true works with whole checkpoints only; set checkpoint.sharded=false."
            )
        self.every = None if every is None else Duration.parse(every, where="checkpoint.every")
        self.monitor = None if monitor is None else Monitor(monitor, mode)
        self.monitored = monitor
        self.save_top_k = save_top_k
        self.save_last_k = save_last_k
        self.save_at_end = save_at_end
        self.save_on_exception = save_on_exception
        self.async_save = async_save
        self.sharded = sharded
        self.trainable_only = trainable_only
        self.max_retries = max_retries
        self.retry_every = Duration.parse(retry_every, where="checkpoint.retry_every")
        self._is_timed = self.every is not None and self.every.is_time
        self._interval = Interval(self.every)
        self._reason: str | None = None
        self._saving: str | None = None  # the reason of a save that is not complete
        self._due: dict[str, Any] = {}
        self._saved_step: int | None = None
        self._is_prepared = False
        self._is_checked = False
        self._failures = 0  # in a row
        self._retry_step: int | None = None  # after which a failed save is tried again

    def on_fit_start(self, run: Run) -> None:
        if self.monitor is not None and run.is_main:
            warn_of_mode("checkpoint", self.monitor.metric, self.monitor.mode)
        if self.monitor is not None and not run.data.has("validation"):
            raise UserError(
                f"checkpoint.monitor={self.monitor.metric!r} is a metric of validation, but the data has none; give "
                "Data(validation=...), or set checkpoint.monitor=null."
            )
        if sum(isinstance(callback, Checkpoint) for callback in run.callbacks) > 1:
            raise UserError(
                "callbacks contains Checkpoint twice, and each would remove what the other keeps; set every, monitor, "
                "save_top_k and save_last_k of one."
            )
        if self.trainable_only:
            _check_frozen_stay(run)
            run.checkpointer.trainable_only = True
        if self.sharded and run.remote is not None:
            # Collective: every rank has the same settings and comes here.
            hosts = set(run.strategy.comm.all_gather_object(socket.gethostname()))
            if len(hosts) > 1:
                raise UserError(
                    f"checkpoint.sharded=true with run_dir={run.remote} works on one machine, and the ranks are on "
                    f"{len(hosts)}; set checkpoint.sharded=false, or run_dir to a folder that every machine sees."
                )
        store = run.checkpointer.store
        if store is not None:
            store = run.checkpointer.store = CheckpointStore(store.folder, monitor=self.monitor)
        self._interval.start(run.state)
        self._reason = self._saving = self._saved_step = None
        if run.handed_over:  # the step whose hooks the loss of a rank has interrupted may be due
            self._reason = self._due["reason"]
            self._interval.next = self._due["next"]
        self._is_prepared = self._is_checked = False
        self._forget_failures()
        if run.resumed_from:
            last = store.last() if run.is_main and store is not None else None
            is_last = last is not None and last.step == run.state.step  # else later steps are made again
            # Only the main rank reads the manifest, and all ranks must agree on what is saved: saving is collective.
            self._saved_step = run.state.step if run.strategy.comm.broadcast_object(is_last) else None

    def state_dict(self) -> dict[str, Any]:
        """Return what the next `on_step_complete` decides by, for ranks that go on after the loss of one."""
        return {"reason": self._reason or self._saving, "next": self._interval.next}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._due = saved

    def on_epoch_start(self, run: Run) -> None:
        if not self._is_checked:  # after `on_fit_start` of all callbacks
            self._is_checked = True
            run.checkpointer.check_savable()

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        if self._is_timed and self._interval.due(run.state):
            self._reason = "interval"

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if self.monitor is None or stage not in ("validation", "sanity") or run.checkpointer.store is None:
            return
        check_monitored(f"checkpoint.monitor={self.monitor.metric!r}", self.monitor.metric, metrics)
        if stage == "sanity":
            return
        value = metrics[self.monitor.metric]
        self._wait_for_background_save(run)  # it may be one of the best
        # Only the main rank knows the checkpoints, and either all ranks save or none.
        if run.strategy.comm.broadcast_object(run.is_main and self._is_among_best(run.checkpointer.store, value)):
            self._reason = BEST

    def on_step_complete(self, run: Run) -> None:
        try:  # does not wait for the disk
            if run.checkpointer.poll():
                self._forget_failures()
        except CheckpointError as error:
            if not self.async_save:  # another callback's save
                raise
            self._count_failure(error, run, in_background=True)
        if self.async_save and not self._is_prepared:  # the optimizer has its state only after its first step
            run.checkpointer.prepare(sharded=self.sharded)
            self._is_prepared = True
        # Saved here, not in on_evaluation_end: the state of other callbacks after the evaluation and at the end of the
        # epoch belongs to the checkpoint.
        if not self._is_timed and self._interval.due(run.state):
            self._reason = self._reason or "interval"
        if self._retry_step is not None:
            self._reason = None if run.state.step < self._retry_step else self._reason or "retry"
        if self._reason is not None:
            self._save(run, self._reason)

    def on_fit_end(self, run: Run) -> None:
        # A background save may be of this step, and only the main rank knows that it failed.
        if self.async_save and run.strategy.comm.broadcast_object(self._wait_for_background_save(run)):
            self._saved_step = None
        store = run.checkpointer.store
        if run.strategy.comm.broadcast_object(run.is_main and store is not None and store.last() is None):
            self._saved_step = None  # the folder was removed after the save of this step
        # `stopped_by`, not the signal that this rank received: saving is collective, and all ranks must agree.
        if run.stopped_by is not None:
            self._save(run, run.stopped_by.name, is_last=True)
        elif self.save_at_end:
            self._save(run, "end", is_last=True)
        run.checkpointer.wait()

    def on_exception(self, run: Run, error: BaseException) -> None:
        if not self.save_on_exception or run.checkpointer.store is None or run.state.step == 0:
            return
        # The weights are not sound, or it is the second Ctrl-C, which may interrupt anything and asks to leave at once.
        if isinstance(error, (NonFiniteLoss, CheckpointError)) or not isinstance(error, Exception):
            return
        if run.strategy.comm.num_processes > 1:  # saving would wait for ranks that the exception may not have reached
            return
        if _was_updating(error, run.strategy):
            return
        try:
            if run.state.step != run.restored_step:
                self._save(run, "exception", is_last=True)
            run.checkpointer.wait()
        except Exception as failure:
            # The run ends with the original error.
            logger.error("step %d could not be saved after the exception: %s", run.state.step, failure)

    def _save(self, run: Run, reason: str, *, is_last: bool = False) -> None:
        """Save this step unless it is saved, and remove the checkpoints that are not kept; collective.

        Raises CheckpointError after too many failures, or if the last save fails.
        """
        # This is the next try: ranks that are not told of its success must not go on trying.
        self._reason = self._retry_step = None
        if self._saved_step == run.state.step:
            return
        self._saving = reason

        def on_saved(entry: CheckpointEntry) -> None:
            logger.log(logging.DEBUG if run.has_display else logging.INFO, "saved %s (%s)", entry.path, reason)

        if self.async_save:
            self._wait_for_background_save(run)
        try:
            run.checkpointer.save(
                reason=reason,
                background=self.async_save,
                sharded=self.sharded,
                keep=self._kept_entries,
                then=on_saved,
            )
        except CheckpointError as error:
            self._saving = None
            if is_last:
                raise
            self._count_failure(error, run)
            return
        self._saving = None
        if not self.async_save:
            self._forget_failures()
        self._saved_step = run.state.step

    def _wait_for_background_save(self, run: Run) -> bool:
        """Return True if the background save failed; raises its error after too many failures."""
        try:
            if run.checkpointer.wait():
                self._forget_failures()
        except CheckpointError as error:
            self._count_failure(error, run, in_background=True)
            return True
        return False

    def _forget_failures(self) -> None:
        self._failures, self._retry_step = 0, None

    def _count_failure(self, error: CheckpointError, run: Run, *, in_background: bool = False) -> None:
        """Count a failed save and warn; raises the error after too many in a row.

        Sets the step of the next try, which is collective, unless the save was in the background.
        """
        self._failures += 1
        if self._failures > self.max_retries or isinstance(error, DamagedCheckpoint):
            raise error
        when = "when the next is due"
        if not in_background:
            step, elapsed = run.state.step, self.retry_every.elapsed(run.state)
            # At the pace so far.
            steps = max(1, math.ceil(self.retry_every.value * max(step, 1) / elapsed)) if elapsed > 0 else 1
            # The clocks of ranks differ, and the next try is collective.
            self._retry_step = step + run.strategy.comm.broadcast_object(steps)
            is_past_end = run.max_steps is not None and self._retry_step > run.max_steps and self.save_at_end
            when = "at the end of training" if is_past_end else f"after step {self._retry_step}"
        if run.is_main:
            logger.warning(
                "%s Training continues, and saving is tried again %s; %d more failures in a row end the run "
                "(callbacks.checkpoint.max_retries=%d).",
                error,
                when,
                self.max_retries - self._failures + 1,
                self.max_retries,
            )

    def _kept_entries(self, entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
        return entries if self.save_last_k is None else [*entries[-self.save_last_k :], *self._best(entries)]

    def _is_among_best(self, store: CheckpointStore, value: float) -> bool:
        assert self.monitor is not None
        if math.isnan(value):
            return False
        best = self._best(store.entries())
        if len(best) < self.save_top_k:
            return True
        worst = best[-1].metrics[self.monitor.metric]
        return value < worst if self.monitor.mode == "min" else value > worst

    def _best(self, entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
        """Return the best checkpoints, best first, among those that were saved right after an evaluation."""
        if self.monitor is None:
            return []
        return [entry for entry in ranked(entries, self.monitor) if entry.reason == BEST][: self.save_top_k]


def _check_frozen_stay(run: Run) -> None:
    """Raise UserError for a run whose frozen parameters change, or are saved by others."""
    from .ema import WeightAveraging

    what = next((type(callback).__name__ for callback in run.callbacks if isinstance(callback, WeightAveraging)), "")
    what = "phases, of which each freezes the others" if run.phase_optimizers[0].phase else what
    if what:
        raise UserError(
            f"checkpoint.trainable_only=true does not work with {what}; set callbacks.checkpoint.trainable_only=false."
        )


def _was_updating(error: BaseException, strategy: Strategy) -> bool:
    """Return True if the error interrupted a step's update: some weights are new and others old."""
    # By code object: a frame knows its code, and not the function.
    update = {f.__code__ for f in (type(strategy).optimizer_step, PhaseOptimizer.step_schedules, TrainState.advance)}
    return any(frame.f_code in update for frame, _ in walk_tb(error.__traceback__))


def warn_of_mode(callback: str, metric: str, mode: str) -> None:
    """Warn if a metric is monitored whose usual direction, by its name, is the other one."""
    name = metric.rpartition("/")[2].lower()
    usual = "max" if name.endswith(_LARGE_IS_GOOD) else "min" if name.endswith("loss") else mode
    if mode != usual:
        good, other = ("small", "large") if mode == "min" else ("large", "small")
        what = f"{callback}.mode={mode}: a {good} {metric} counts as good"
        logger.warning("%s; if a %s one is, set mode=%s.", what, other, usual)
