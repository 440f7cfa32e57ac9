"""Run: what callbacks, loops and strategies see of a run on this rank."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from signal import Signals
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from trainkit.data.batch import BatchPlan
from trainkit.data.data import Data
from trainkit.data.loader import BatchLoader
from trainkit.distributed.failure_store import RanksWanted
from trainkit.logger import Logger
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.precision import Precision
from trainkit.signals import StopSignals
from trainkit.state import TrainState
from trainkit.strategy import Strategy
from trainkit.task import TaskModule

if TYPE_CHECKING:
    from trainkit.checkpoint.resized_buffers import Shapes
    from trainkit.checkpoint.sharded_state import ShardedState
    from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore, Keep, OnSaved
    from trainkit.profiling import PeakMemoryTracker
    from trainkit.step_timer import StepTimer

logger = logging.getLogger(__name__)
# Hooks whose time is that of an evaluation, which is no part of a step, or counts already in the hook that saves.
_OUTSIDE_OF_STEPS = ("on_evaluation_start", "on_dataset_end", "on_evaluation_end", "on_save")
# Packages whose callbacks request a stop before the first step or in `on_evaluation_end` only: their other hooks need
# no agreement of ranks.
_NEVER_STOP = ("trainkit.callbacks.", "trainkit.integrations.")


PendingHook = tuple[str, tuple[Any, ...], int]
"""The name of a hook, its arguments, and the number of the callback to begin with."""


class UnsavedState(NamedTuple):
    """What callbacks may change in a task and checkpoints do not have."""

    frozen: frozenset[str]
    """Names of parameters."""
    evaluating: frozenset[str]
    """Names of modules."""
    attributes: list[str]
    """Names of attributes that are not as they were at the start."""


class RunCallback(Protocol):
    """A callback, as far as a run is concerned."""

    @property
    def loads_from_disk(self) -> bool:
        """True if `load_state_dict` takes tensors that are on the disk."""

    @property
    def monitored(self) -> str | None:
        """The validation metric that the callback needs."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved state."""

    def overridden_hooks(self) -> Mapping[str, Callable[..., None]]:
        """Return the methods to call, by the name of the hook."""

    def close(self) -> None:
        """Release what was acquired."""


class RunCheckpoints(Protocol):
    """The checkpoints of a run; its methods are collective unless they say otherwise."""

    store: CheckpointStore | None
    """`None` for a run without a folder. May be set to a store that ranks checkpoints."""
    trainable_only: bool
    """True if parameters that do not train are not saved, only their hash."""
    first_buffers: Shapes
    """The shapes of the buffers before the run was restored; those that training changes are listed."""

    def save(
        self,
        *,
        reason: str,
        background: bool = False,
        sharded: bool = False,
        keep: Keep | None = None,
        then: OnSaved | None = None,
    ) -> CheckpointEntry | None:
        """Write a checkpoint of the present state; collective.

        Args:
            reason: Listed with the checkpoint.
            background: Copy the state and write it in a thread; `poll` and `wait` raise its errors.
            sharded: Each rank writes its shard, if the strategy shards the state.
            keep: Chooses, on the main rank, the checkpoints that stay; the others are removed when this one is listed.
            then: Called on the main rank with the entry, once it is listed.

        Returns:
            The entry on the main rank; `None` in the background, without a folder, or if a loss was not finite, so that
            the weights are not worth saving.

        """

    def prepare(self, *, sharded: bool = False) -> None:
        """Allocate memory for background saves, so that the first one stalls training no longer than others."""

    def poll(self) -> bool:
        """Raise the error of a background save that failed, without waiting for the disk.

        Returns True if a save has just become complete: on the main rank, or on all that saved shards. Collective while
        they save them.
        """

    def wait(self) -> bool:
        """Wait for a background save, and raise its error if it failed.

        Returns True as `poll` does. Collective while ranks save shards.
        """

    def check_savable(self) -> None:
        """Raise UserError for a state that no checkpoint can hold; tensors are neither gathered nor copied.

        Called before the first step: optimizers have no state yet, and `on_save` is not called.
        """

    def shards(self) -> ShardedState | None:
        """Return this rank's shards, and a state with placeholders for them; `None` if none is sharded. Collective."""

    def payload(self, shards: ShardedState | None = None) -> dict[str, Any]:
        """Return what a checkpoint of the present state holds, complete on the main rank; collective.

        With `shards` it has the placeholders of these.
        """

    def restore(self, payload: dict[str, Any], *, where: str, is_new: bool = False) -> None:
        """Restore the run, which `is_new` unless it is rolled back, from a checkpoint of any strategy; collective.

        Random generators continue exactly on the layout that was saved, and from a new seed on another. Raises
        UserError if the checkpoint is another task's.
        """

    def load_weights(self, payload: dict[str, Any], *, where: str, to_evaluate: bool = False) -> None:
        """Load a checkpoint's parameters and buffers into the task; raises UserError if they are another task's.

        `to_evaluate` loads the weights that the run was validated with, if they differ (an average).
        """

    def restore_rng(self, payload: dict[str, Any]) -> None:
        """Restore the random generators if the layout of ranks and micro-batches is that of the checkpoint.

        On another layout they get a new seed. Call it last: preparations may draw or change the layout.
        """

    def close(self) -> None:
        """Wait for background saves and end their threads; may be called twice, and is not collective."""


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
    remote: str | None = None
    """The URL that the run folder is copied to."""
    config: str = ""
    """All settings of the run as YAML."""
    max_steps: int | None = None
    """Optimizer steps of the whole run, if `max_duration` determines them."""
    checkpointer: RunCheckpoints = field(init=False)
    """Set when the run begins, on every rank."""
    state: TrainState = field(default_factory=TrainState)
    loader: BatchLoader | None = None
    plan: BatchPlan | None = None
    reference_batch_size: ReferenceBatchSize | None = None
    """The global batch that the learning rate was chosen for, if it is known."""
    overrides: Sequence[str] = ()
    """The settings that were typed on a command line."""
    phase_optimizers: Sequence[PhaseOptimizer] = ()
    """One, or one for each phase of the task; none outside of training."""
    means: WeightedMeans | None = None
    """The means of the outputs of training steps since the last log."""
    validates: bool = False
    """True if training is interrupted by validations."""
    evaluation: EvaluationProgress | None = None
    has_display: bool = False
    """True while a live display of this process shows the progress; routine messages would interrupt it."""
    step_timer: StepTimer | None = None
    """Times the parts of steps, if a callback asked for it in `on_fit_start`."""
    stop_reason: str | None = None
    stopped_by: Signals | None = None
    """The signal that ended the run, the same on every rank."""
    resumed_from: str | None = None
    restored_step: int | None = None
    """Step of the checkpoint that was restored last, by a resume or a rollback."""
    carried_state: Sequence[str] = ()
    """The attributes and buffers in which steps leave state for the next one, and which no checkpoint has."""
    undo_step: Callable[[], UnsavedState | None] | None = None
    """Takes a broken step back. It returns `None`, and is `None`, where this rank's state cannot be handed over."""
    unsaved: UnsavedState | None = None
    """What came with the state that a survivor has handed over."""
    pending_hooks: Sequence[PendingHook] = ()
    """The hooks that are still to be called for the last step."""
    interrupted_hook: PendingHook | None = None
    """The hook that the error of this rank has ended."""
    handed_over: bool = False
    """True until the first step after the state of a surviving rank was restored."""
    weights_are_finite: Callable[[], bool] = lambda: True
    """Returns True if the weights may be saved; collective."""
    folder_lock: ExitStack | None = None
    """The lock on the folder, on the main rank."""
    remake_folder: Callable[[], None] | None = None
    """Makes the folder again if it was removed; `None` on ranks that do not write to it."""

    def __post_init__(self) -> None:
        if self.loggers:
            from trainkit.loggers.guarded import SafeLogger

            # A full disk or a lost server must not end the training: SafeLogger turns errors of a logger into warnings.
            self.loggers = [SafeLogger(destination) for destination in self.loggers]
        self.loaders: list[BatchLoader] = []  # of evaluations
        self.measured_at: dict[str, int] = {}
        """The step at which each metric was logged."""
        self._hooks: dict[str, list[tuple[str, Callable[..., None]]]] = {}  # hook -> callbacks' classes and methods
        self.callback_seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds that the hooks of each class of callbacks took beside the steps, since they were cleared."""
        for callback in self.callbacks:
            # Resolved once: a hook that no callback overrides then costs one dictionary look-up in each step.
            for name, hook in callback.overridden_hooks().items():
                counted = "" if name in _OUTSIDE_OF_STEPS else type(callback).__name__
                self._hooks.setdefault(name, []).append((counted, hook))
        # True at first: a hook may have requested a stop before the ranks agree for the first time.
        self.may_be_stopped = True
        """True if a hook was called that may have requested a stop, since ranks agreed on it last."""

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

    def emit(self, hook: str, *arguments: Any, start: int = 0) -> None:
        """Call the callbacks' methods for a hook, from the callback `start` on."""
        number = start
        try:
            for callback, method in self._hooks.get(hook, ())[start:]:
                began = perf_counter()
                method(self, *arguments)
                self.callback_seconds[callback] += perf_counter() - began
                number += 1
        except BaseException:
            # The outermost one counts, which raises last: it calls those inside of it again.
            self.interrupted_hook = (hook, arguments, number)
            raise

    def follow_stopping_hooks(self) -> None:
        """Set `may_be_stopped` after each hook that may request a stop on any rank; collective."""
        stopping = {name for name, hooks in self._hooks.items() if _may_stop(name, [hook for _, hook in hooks])}
        # Callbacks may differ by rank. Without the union, a rank whose hooks never stop would skip the collective of
        # `should_stop_now`, and the others would wait for it forever.
        for name in set().union(*self.strategy.comm.all_gather_object(stopping)):
            self._hooks.setdefault(name, []).append(("", _note_stop))

    def whole_task(self) -> AbstractContextManager[TaskModule]:
        """Return a context in which `run.task` has all values of its parameters and buffers, on every rank; collective.

        Strategies that leave a rank a part of the task gather it. What rank 0's block changes in place is written back
        on every rank: `with run.whole_task() as task, torch.no_grad(): task.head.weight.clamp_(-1, 1)`.
        """
        return self.strategy.whole_task(self.task)

    @contextmanager
    def optimizers_in_evaluation(self) -> Iterator[None]:
        """Give the task the weights to evaluate with, inside the context, if an optimizer trains others."""
        modes = [(optimizer, optimizer.is_training) for optimizer in self.phase_optimizers]
        for phase_optimizer, _ in modes:
            phase_optimizer.set_mode(training=False)
        try:
            yield
        finally:
            for phase_optimizer, is_training in modes:
                phase_optimizer.set_mode(training=is_training)

    def request_stop(self, reason: str) -> None:
        """Stop training after this step, on all ranks; `reason` is written to the summary."""
        # The first reason counts: later ones are often its consequences.
        if self.stop_reason is None:
            self.stop_reason = reason

    def sync_stop_signal(self) -> bool:
        """Set `stopped_by` to the first rank's signal; return True if any rank received one. Collective."""
        # A signal may reach only some of the ranks. All take the first one's, so that they end with the same exit code.
        received = self.strategy.comm.all_gather_object(self.signals.received)
        self.stopped_by = next((number for number in received if number is not None), None)
        handover = self.strategy.handover
        if handover is not None and self.stopped_by is not None and self.stopped_by == handover.regrow:
            raise RanksWanted("all ranks are started again")
        return self.stopped_by is not None

    def check_folder(self) -> None:
        """Make the folder again if it was removed; called before files are written."""
        if self.remake_folder is None or self.run_dir is None:
            return
        if not os.path.exists(f"{self.run_dir}/config.yaml"):  # in a third of the time of Path
            self.remake_folder()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write metrics under their full names (`validation/loss`); they must be the same on every rank."""
        # Before the write: an open file of a logger outlives its removed folder, and swallows what is written to it.
        self.check_folder()
        self.state.metrics.update(metrics)
        # `metrics` keeps the latest value of each; a checkpoint is listed only with those of its step.
        self.measured_at.update(dict.fromkeys(metrics, self.state.step))
        for destination in self.loggers:
            destination.write(metrics, step=self.state.step)

    def logged_at(self, name: str) -> int:
        """Return the step at which a metric was logged last; 0 if it was not, or only after a step rolled back to."""
        step = self.measured_at.get(name, 0)
        return step if step <= self.state.step else 0

    def log_last_losses(self) -> None:
        """Write the losses of this rank that no log point has seen, so that the curve of a failed run has its end.

        Waits for the device, and is not collective. Tasks with phases have no common loss, and write none.
        """
        if self.means is None or not self.phase_optimizers or self.phase_optimizers[0].phase:
            return
        last = self.logged_at("train/loss")
        for step, loss in self.means.losses_by_step().items():
            if step > last:
                for destination in self.loggers:
                    destination.write({"train/loss": loss}, step=step)

    def log_text(self, name: str, text: str) -> None:
        """Write a text to the loggers that support it; does nothing on ranks without loggers."""
        for destination in self.loggers:
            destination.write_text(name, text, step=self.state.step)

    def log_image(self, name: str, image: Tensor) -> None:
        """Write an image: (height, width) or (channels, height, width), from 0 to 1 or in uint8."""
        if self.loggers:
            from trainkit.loggers.media import to_uint8_image

            # Converted once for all loggers, since it copies the image from the device.
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
        for _, method in self._hooks.get("on_exception", ()):
            try:
                method(self, error)
            # Only logged: the exception that ends the run is the one that the user must see.
            except Exception:
                logger.exception("on_exception failed after %s", self.stop_reason)

    def close(self) -> None:
        """Close the checkpointer, loaders, callbacks and loggers, each even if another fails; not collective."""
        errors: list[Exception] = []
        loaders = self.loaders if self.loader is None else [*self.loaders, self.loader]
        # The checkpointer first: a background save must end before what it may still use is closed.
        closing: list[Any] = [self.checkpointer, *loaders, *self.callbacks, *self.loggers]
        for item in closing:
            try:
                item.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def metrics_of_this_step(self) -> dict[str, float]:
        """Return the metrics that were logged at the present step."""
        metrics, measured_at = self.state.metrics, self.measured_at
        return {name: metrics[name] for name, step in measured_at.items() if step == self.state.step}


def _note_stop(run: Run, *arguments: Any) -> None:
    run.may_be_stopped = True


def _may_stop(name: str, hooks: Sequence[Callable[..., None]]) -> bool:
    """Return True if one of the hooks called `name` may request a stop: a user's, or ours after an evaluation."""
    # Ranks then agree by a collective, which runs with our callbacks only need not pay in every step.
    is_ours = all(str(getattr(hook, "__module__", "")).startswith(_NEVER_STOP) for hook in hooks)
    return name == "on_evaluation_end" or not is_ours
