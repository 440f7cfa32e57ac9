"""One run, alive on one rank: everything that loops, callbacks and strategies share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from torch import Tensor

from trainkit.callback import MOMENTS, Callback
from trainkit.checkpoints.background_shards import ShardedWriter
from trainkit.checkpoints.matching import check_shapes, check_state_dict_keys
from trainkit.checkpoints.sharded_saving import save_together
from trainkit.checkpoints.shards import Shards
from trainkit.checkpoints.store import CheckpointEntry, CheckpointStore
from trainkit.checkpoints.writer import AsyncWriter
from trainkit.data import Data
from trainkit.errors import UserError
from trainkit.feed import Feed
from trainkit.histogram import histogram_of
from trainkit.linear_scaling import UsualBatch
from trainkit.logger import Logger
from trainkit.loggers.guarded import GuardedLogger
from trainkit.metrics import WeightedMeans
from trainkit.optimization import Optimization
from trainkit.peak_memory import PeakMemory
from trainkit.phases import by_phase, saved_by_phase
from trainkit.picture import as_picture
from trainkit.precision import Precision
from trainkit.rng import rng_state, seed_everything, set_rng_state
from trainkit.signals import StopSignals
from trainkit.state import TrainState
from trainkit.step_watch import StepWatch
from trainkit.strategy import Strategy, SupportsShardedState
from trainkit.task import TaskModule
from trainkit.window import BatchPlan

logger = logging.getLogger(__name__)


@dataclass
class EvaluationProgress:
    """How far an evaluation has come on this rank."""

    stage: str
    num_batches: int | None
    batch: int = 0


@dataclass
class Run:
    """What callbacks are called with. Read anything; change it through the methods."""

    task: TaskModule
    data: Data
    strategy: Strategy
    precision: Precision
    callbacks: Sequence[Callback]
    loggers: Sequence[Logger]
    signals: StopSignals
    seed: int
    run_dir: Path | None
    """The run's folder; `None` for a run that writes nothing."""
    config: str = ""
    """The run's settings as YAML."""
    max_steps: int | None = None
    """Optimizer steps that the run will take, where its duration tells."""
    state: TrainState = field(default_factory=TrainState)
    feed: Feed | None = None
    plan: BatchPlan | None = None
    usual_batch: UsualBatch | None = None
    """The global batch that the learning rate was chosen for, where that is known."""
    optimizations: Sequence[Optimization] = ()
    """One, or one for each phase of the task; none outside of training."""
    means: WeightedMeans | None = None
    """Of what training steps returned since metrics were logged last."""
    evaluation: EvaluationProgress | None = None
    watch: StepWatch | None = None
    """Measures the parts of steps, where a callback has asked for it at the start."""
    stop_reason: str | None = None
    stopped_by: Signals | None = None
    """The signal that ended the run, known to all ranks whichever of them received it."""
    resumed_from: str | None = None
    may_save: Callable[[], bool] = lambda: True
    """Says whether the weights are sound; collective."""

    def __post_init__(self) -> None:
        self.loggers = [GuardedLogger(destination) for destination in self.loggers]
        self.feeds: list[Feed] = []  # of evaluations
        self.peak_memory = PeakMemory(self.strategy.device)
        self._measured_at: dict[str, int] = {}  # metric -> the step at which it was logged
        self._hooks = {moment: _overridden(self.callbacks, moment) for moment in MOMENTS}
        self.checkpoints = None if self.run_dir is None else CheckpointStore(self.run_dir / "checkpoints")
        self._writer: AsyncWriter | None = None
        self._sharded_writer: ShardedWriter | None = None

    @property
    def optimization(self) -> Optimization | None:
        """The task's optimizer, or that of its first phase; `None` outside of training."""
        return self.optimizations[0] if self.optimizations else None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.strategy.comm.is_main

    def hooks(self, moment: str) -> list[Callable[..., None]]:
        """Return the callbacks' methods for a moment; only overridden ones."""
        return self._hooks[moment]

    def emit(self, moment: str, *arguments: Any) -> None:
        """Call the callbacks' methods for a moment."""
        for hook in self._hooks[moment]:
            hook(self, *arguments)

    def request_stop(self, reason: str) -> None:
        """Let training end after this step, on all ranks; `reason` is kept in the summary."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def agree_on_signal(self) -> bool:
        """Let all ranks know which signal the first of them received, and return whether one did; collective."""
        received = self.strategy.comm.all_gather_object(self.signals.received)
        self.stopped_by = next((number for number in received if number is not None), None)
        return self.stopped_by is not None

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write `metrics`, which are the same on every rank, by their full names (`validation/loss`)."""
        self.state.metrics.update(metrics)
        self._measured_at.update(dict.fromkeys(metrics, self.state.step))
        for destination in self.loggers:
            destination.write(metrics, step=self.state.step)

    def log_text(self, name: str, text: str) -> None:
        """Write a text to the loggers that take any; on ranks without loggers nothing happens."""
        for destination in self.loggers:
            destination.write_text(name, text, step=self.state.step)

    def log_image(self, name: str, image: Tensor) -> None:
        """Write an image: (height, width) or (channels, height, width), from 0 to 1 or in uint8."""
        if self.loggers:
            picture = as_picture(image)
            for destination in self.loggers:
                destination.write_image(name, picture, step=self.state.step)

    def log_histogram(self, name: str, values: Tensor) -> None:
        """Write how the elements of a tensor are distributed."""
        if self.loggers:
            histogram = histogram_of(values)
            for destination in self.loggers:
                destination.write_histogram(name, histogram, step=self.state.step)

    # ---- Checkpoints

    def save(
        self,
        *,
        reason: str,
        background: bool = False,
        sharded: bool = False,
        then: Callable[[CheckpointEntry], object] | None = None,
    ) -> CheckpointEntry | None:
        """Write a checkpoint of this moment; collective.

        With `background` the state is copied and a thread writes it; `check_saving` and `finish_saving` raise what
        goes wrong there. With `sharded` each rank writes what it holds, where the strategy shards the state. `then` is
        called on the main rank with the entry, once that is listed.

        Returns the entry on the main rank; `None` in the background, without a folder, or when a loss was not finite
        and the weights are not worth keeping.
        """
        if self.checkpoints is None or not self.may_save():
            return None
        self._finish_shards()
        shards = self._shards() if sharded else None
        payload = self._payload(shards)
        if shards is not None and background:
            self.finish_saving()
            self._sharded_writer = self._sharded_writer or ShardedWriter(self.checkpoints, self.strategy.comm)
            self._sharded_writer.save(payload, shards.pieces, then=then, **self._labels(reason))
            return None
        if shards is not None:
            labels = self._labels(reason)
            return save_together(
                self.checkpoints, payload, shards.pieces, together=self.strategy.comm, then=then, **labels
            )
        entry: CheckpointEntry | None = None
        failure: UserError | None = None
        if self.is_main:
            try:
                entry = self._write(payload, reason=reason, background=background, then=then)
            except UserError as error:
                failure = error
        failure = self.strategy.comm.broadcast_object(failure)
        if failure is not None:
            raise failure
        return entry

    def prepare_saving(self, *, sharded: bool = False) -> None:
        """Have memory for saves in the background, or the first would stall training longer than others; collective."""
        if self.checkpoints is None:
            return
        shards = self._shards() if sharded else None
        if shards is not None:
            self._sharded_writer = self._sharded_writer or ShardedWriter(self.checkpoints, self.strategy.comm)
            self._sharded_writer.prepare(shards.pieces)
            return
        payload = self._state()
        if self.is_main:
            self._writer = self._writer or AsyncWriter(self.checkpoints)
            self._writer.prepare(payload)

    def check_saving(self) -> bool:
        """Raise the error of a save in the background that failed; waits for no disk.

        While ranks save shards they ask each other in each step, which waits for them: collective. Returns whether
        such a save has just become complete.
        """
        if self._writer is not None:
            self._writer.check()
        return self._sharded_writer is not None and self._sharded_writer.check()

    def finish_saving(self) -> bool:
        """Wait for a save in the background, and raise its error if it failed; collective while ranks save shards.

        Returns whether ranks have saved shards.
        """
        if self._writer is not None:
            self._writer.wait()
        return self._finish_shards()

    def _finish_shards(self) -> bool:
        return self._sharded_writer is not None and self._sharded_writer.finish()

    def _write(
        self,
        payload: dict[str, Any],
        *,
        reason: str,
        background: bool,
        then: Callable[[CheckpointEntry], object] | None,
    ) -> CheckpointEntry | None:
        assert self.checkpoints is not None
        if self._writer is not None:
            self._writer.wait()
        if background:
            self._writer = self._writer or AsyncWriter(self.checkpoints)
            self._writer.save(payload, then=then, **self._labels(reason))
            return None
        entry = self.checkpoints.save(payload, **self._labels(reason))
        if then is not None:
            then(entry)
        return entry

    def restore(self, payload: dict[str, Any], *, where: str) -> None:
        """Go on where a checkpoint was written, on any strategy; collective."""
        assert self.feed is not None
        self.load_weights(payload, where=where)
        saved = saved_by_phase(payload["optimizer"], payload["schedules"], self.optimizations, where=where)
        for optimization, (optimizer, schedules) in zip(self.optimizations, saved, strict=True):
            optimization.check_saved(optimizer, schedules, where=where)
            self.strategy.load_optimizer_state_dict(self.task, optimization, optimizer)
            optimization.load_schedule_state(schedules)
        for optimization, spikes in zip(self.optimizations, payload.get("spikes", []), strict=False):
            if optimization.spikes is not None:
                optimization.spikes.load_state_dict(spikes)
        self.strategy.load_strategy_state(payload.get("strategy", {}))
        self.precision.load_state_dict(payload["scaler"])
        self.state.load_state_dict(payload["state"])
        self.feed.load_state_dict(payload["feed"])
        if self.means is not None:
            self.means.load_state_dict(payload.get("means", {}), self.strategy.comm)
        for name, callback in _named(self.callbacks):
            if name in payload["callbacks"]:
                callback.load_state_dict(payload["callbacks"][name])
        self.resumed_from = where
        if payload.get("batch_size") is not None:
            self.usual_batch = UsualBatch(payload["batch_size"], "the resumed run")

    def load_weights(self, payload: dict[str, Any], *, where: str, to_evaluate: bool = False) -> None:
        """Give the task a checkpoint's parameters and buffers; raises UserError if they are another task's.

        `to_evaluate` takes those that validations of the run were made with, where they were others (an average).
        """
        saved = payload.get("evaluation_weights", payload["task"]) if to_evaluate else payload["task"]
        own = self.strategy.state_dict(self.task)
        check_state_dict_keys(own, saved, where)
        check_shapes(own, saved, where)
        self.strategy.load_state_dict(self.task, saved)

    def restore_rng(self, payload: dict[str, Any]) -> None:
        """Let the random generators go on: exactly on the layout that was saved, from a new seed on another."""
        states = payload["rng"]
        if len(states) == self.strategy.comm.num_processes and payload["layout"] == self._layout():
            set_rng_state(states[self.strategy.comm.process])
        else:
            seed_everything(self.seed + 1_000_003 * self.state.step + self.strategy.comm.rank)

    def report(self, error: BaseException) -> None:
        """Tell the callbacks of an error, which stays the first whatever they raise; not collective."""
        self.stop_reason = f"{type(error).__name__}: {error}"
        for hook in self._hooks["on_exception"]:
            try:
                hook(self, error)
            except Exception:
                logger.exception("on_exception failed after %s", self.stop_reason)

    def close(self) -> None:
        """Close callbacks, loggers and feeds, each even if another fails, and wait for what is still being saved."""
        errors: list[Exception] = []
        writers = [writer for writer in (self._writer, self._sharded_writer) if writer is not None]
        closing: list[Callable[[], None]] = [writer.close for writer in writers]
        closing += [feed.close for feed in (*self.feeds, *([] if self.feed is None else [self.feed]))]
        for close in closing + [item.close for item in self.callbacks] + [item.close for item in self.loggers]:
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _labels(self, reason: str) -> dict[str, Any]:
        """Return what a checkpoint of this moment is listed as."""
        state, metrics = self.state, self._metrics_of_this_step()
        labels = {"step": state.step, "epoch": state.epoch, "metrics": metrics, "reason": reason}
        return {"name": f"step_{state.step:08d}", **labels}

    def _state(self, shards: Shards | None = None) -> dict[str, Any]:
        """Return the state of the task and its optimizers, complete on the main rank unless in shards; collective."""
        if shards is None:
            parts = [self.strategy.optimizer_state_dict(self.task, part) for part in self.optimizations]
            shards = Shards(self.strategy.state_dict(self.task), parts)
        return {"task": shards.task, "optimizer": by_phase(shards.optimizers, self.optimizations)}

    def _shards(self) -> Shards | None:
        strategy = self.strategy
        return strategy.shards(self.task, self.optimizations) if isinstance(strategy, SupportsShardedState) else None

    def _payload(self, shards: Shards | None = None) -> dict[str, Any]:
        assert self.feed is not None
        payload = {
            **self._state(shards),
            "schedules": by_phase([part.schedule_state() for part in self.optimizations], self.optimizations),
            "spikes": [{} if part.spikes is None else part.spikes.state_dict() for part in self.optimizations],
            "strategy": self.strategy.strategy_state(),
            "scaler": self.precision.state_dict(),
            "state": self.state.state_dict(),
            "feed": self.feed.state_dict(self.state.position),
            "rng": self.strategy.comm.all_gather_object(rng_state()),
            "layout": self._layout(),
            "batch_size": None if self.plan is None else self.plan.batch_size,
            "means": {} if self.means is None else self.means.state_dict(self.strategy.comm),
            "callbacks": {name: callback.state_dict() for name, callback in _named(self.callbacks)},
            "config": self.config,
            "task_class": f"{type(self.task).__module__}.{type(self.task).__qualname__}",
        }
        self.emit("on_save", payload)
        return payload

    def _metrics_of_this_step(self) -> dict[str, float]:
        """Return the metrics that were measured with the present weights: older ones say nothing about them."""
        metrics, measured_at = self.state.metrics, self._measured_at
        return {name: metrics[name] for name, step in measured_at.items() if step == self.state.step}

    def _layout(self) -> str:
        return f"{type(self.strategy).__name__} {self.plan}"


def _overridden(callbacks: Sequence[Callback], moment: str) -> list[Callable[..., None]]:
    return [
        getattr(callback, moment)
        for callback in callbacks
        if getattr(type(callback), moment) is not getattr(Callback, moment) or moment in vars(callback)
    ]


def _named(callbacks: Sequence[Callback]) -> list[tuple[str, Callback]]:
    """Return the callbacks with names that tell several of one class apart."""
    seen: dict[str, int] = {}
    named = []
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] = seen.get(kind, 0) + 1
        named.append((kind if seen[kind] == 1 else f"{kind}_{seen[kind]}", callback))
    return named
