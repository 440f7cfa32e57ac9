"""Run: what callbacks, loops and strategies see of a run on this rank, and its Checkpointer."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from trainkit.checkpoint.resized_buffers import RESIZED, Shapes, resize_buffers, resized_names, without_custom_loading
from trainkit.data.batch import BatchPlan
from trainkit.data.data import Data
from trainkit.data.loader import BatchLoader
from trainkit.errors import CheckpointError, UserError
from trainkit.logger import Logger
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.optimizer_settings import ResumeOptimizer, difference_text
from trainkit.optim.precision import Precision
from trainkit.rng import rng_state, seed_everything, set_rng_state
from trainkit.signals import StopSignals
from trainkit.state import TrainState
from trainkit.strategy import PlacesRanks, Strategy, SupportsShardedState
from trainkit.task import TaskModule

if TYPE_CHECKING:
    from trainkit.checkpoint.async_writer import AsyncWriter
    from trainkit.checkpoint.serialization import Labels
    from trainkit.checkpoint.sharded_save import ShardedWriter
    from trainkit.checkpoint.sharded_state import ShardedState
    from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore, OnSaved
    from trainkit.loops.step_timer import StepTimer
    from trainkit.profiling import PeakMemoryTracker

logger = logging.getLogger(__name__)
# Packages whose callbacks request a stop before the first step or in `on_evaluation_end` only: their other hooks need
# no agreement of ranks.
_NEVER_STOP = ("trainkit.callbacks.", "trainkit.integrations.")


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
    state: TrainState = field(default_factory=TrainState)
    loader: BatchLoader | None = None
    plan: BatchPlan | None = None
    reference_batch_size: ReferenceBatchSize | None = None
    """The global batch that the learning rate was chosen for, if it is known."""
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
        self._measured_at: dict[str, int] = {}  # metric -> the step at which it was logged
        self._hooks: dict[str, list[Callable[..., None]]] = {}
        for callback in self.callbacks:
            # Resolved once: a hook that no callback overrides then costs one dictionary look-up in each step.
            for name, hook in callback.overridden_hooks().items():
                self._hooks.setdefault(name, []).append(hook)
        # True at first: a hook may have requested a stop before the ranks agree for the first time.
        self.may_be_stopped = True
        """True if a hook was called that may have requested a stop, since ranks agreed on it last."""
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

    def emit(self, hook: str, *arguments: Any) -> None:
        """Call the callbacks' methods for a hook."""
        for method in self._hooks.get(hook, ()):
            method(self, *arguments)

    def follow_stopping_hooks(self) -> None:
        """Set `may_be_stopped` after each hook that may request a stop on any rank; collective."""
        stopping = {name for name, hooks in self._hooks.items() if _may_stop(name, hooks)}
        # Callbacks may differ by rank. Without the union, a rank whose hooks never stop would skip the collective of
        # `should_stop_now`, and the others would wait for it forever.
        for name in set().union(*self.strategy.comm.all_gather_object(stopping)):
            self._hooks.setdefault(name, []).append(_note_stop)

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
        for method in self._hooks.get("on_exception", ()):
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
        metrics, measured_at = self.state.metrics, self._measured_at
        return {name: metrics[name] for name, step in measured_at.items() if step == self.state.step}


class Checkpointer:
    """Saves and restores one run; its methods are collective unless they say otherwise."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._writer: AsyncWriter | None = None
        self._sharded_writer: ShardedWriter | None = None
        self.resume_optimizer: ResumeOptimizer = "configured"
        """The settings of optimizers that count if those that were saved differ."""
        self.trainable_only = False
        """True if parameters that do not train are not saved, only their hash."""
        self.first_buffers: Shapes = {}
        """The shapes of the buffers before the run was restored; those that training changes are listed."""
        # The hash reads all frozen parameters, so it is computed again only if other parameters are frozen.
        self._frozen: tuple[frozenset[str], dict[str, Any]] = frozenset(), {}  # names, and what is saved of them

    @cached_property
    def store(self) -> CheckpointStore | None:
        """The checkpoints of the run; `None` for a run without a folder. May be set to a store that ranks them."""
        from trainkit.checkpoint.store import CHECKPOINTS, CheckpointStore

        return None if self._run.run_dir is None else CheckpointStore(self._run.run_dir / CHECKPOINTS)

    # ---- Saving

    def save(
        self, *, reason: str, background: bool = False, sharded: bool = False, then: OnSaved | None = None
    ) -> CheckpointEntry | None:
        """Write a checkpoint of the present state; collective.

        Args:
            reason: Listed with the checkpoint.
            background: Copy the state and write it in a thread; `poll` and `wait` raise its errors.
            sharded: Each rank writes its shard, if the strategy shards the state.
            then: Called on the main rank with the entry, once it is listed.

        Returns:
            The entry on the main rank; `None` in the background, without a folder, or if a loss was not finite, so that
            the weights are not worth saving.

        """
        run = self._run
        # Collective: the policy for losses and the comparison of replicas may raise here, before anything is written.
        if self.store is None or not run.weights_are_finite():
            return None
        run.check_folder()
        self._warn_of_unsaved_state()
        # Until a sharded save is listed the main process holds the lock of the folder, and only polls of all ranks move
        # the save on: a second one would wait for that lock until it times out.
        self._wait_for_shards()
        with run.optimizers_in_evaluation():  # a resume brings back the weights to train, from the optimizer's state
            return self._save(reason=reason, background=background, sharded=sharded, then=then)

    def _save(self, *, reason: str, background: bool, sharded: bool, then: OnSaved | None) -> CheckpointEntry | None:
        run, state = self._run, self._run.state
        assert self.store is not None
        shards = self._shards() if sharded else None
        # On every rank, although the main one alone writes it: gathering the state is collective.
        payload = self._payload(shards)
        name, metrics = f"step_{state.step:08d}", run.metrics_of_this_step()
        labels: Labels = {"name": name, "step": state.step, "epoch": state.epoch, "metrics": metrics, "reason": reason}
        if shards is None:
            return self._save_on_main(self.store, payload, background=background, then=then, labels=labels)
        if not background:
            from trainkit.checkpoint.sharded_save import save_sharded

            return save_sharded(self.store, payload, shards.shards, comm=run.strategy.comm, then=then, **labels)
        # For an unsharded save too: its thread holds the folder's lock, for which the main process would wait.
        self.wait()
        self._shard_writer(self.store).save(payload, shards.shards, then=then, **labels)
        return None

    def _warn_of_unsaved_state(self) -> None:
        """Warn once of state that steps leave for the next one where no checkpoint has it."""
        names, self._run.carried_state = self._run.carried_state, ()
        if names and self._run.is_main:
            logger.warning(
                "steps of %s leave state for the next one in %s, which checkpoints do not have: a resumed run begins "
                "without it. Keep tensors in buffers (self.register_buffer), and return the rest from get_extra_state.",
                type(self._run.task).__name__,
                ", ".join(names),
            )

    def prepare(self, *, sharded: bool = False) -> None:
        """Allocate memory for background saves, so that the first one stalls training no longer than others."""
        if self.store is None:
            return
        shards = self._shards() if sharded else None
        if shards is not None:
            self._shard_writer(self.store).prepare(shards.shards)
            return
        payload = self._task_and_optimizers()  # collective, so not on the main rank alone
        if self._run.strategy.comm.is_main:
            self._async_writer(self.store).prepare(payload)

    def poll(self) -> bool:
        """Raise the error of a background save that failed, without waiting for the disk.

        Returns True if a sharded save has just become complete. Collective while ranks save shards.
        """
        if self._writer is not None:
            self._writer.check()
        return self._sharded_writer is not None and self._sharded_writer.check()

    def wait(self) -> bool:
        """Wait for a background save, and raise its error if it failed.

        Returns True if ranks were saving shards. Collective while they do.
        """
        if self._writer is not None:
            self._writer.wait()
        return self._wait_for_shards()

    def close(self) -> None:
        """Wait for background saves and end their threads; may be called twice, and is not collective."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            # Also if the other writer raises: the lock of an unfinished save must be released and its shards removed.
            if self._sharded_writer is not None:
                self._sharded_writer.close()

    # ---- Restoring

    def restore(self, payload: dict[str, Any], *, where: str, is_new: bool = False) -> None:
        """Restore the run, which `is_new` unless it is rolled back, from a checkpoint of any strategy; collective.

        Random generators continue exactly on the layout that was saved, and from a new seed on another. Raises
        UserError if the checkpoint is another task's.
        """
        from trainkit.checkpoint.sharded_state import in_memory

        run, strategy = self._run, self._run.strategy
        assert run.loader is not None
        for phase_optimizer in run.phase_optimizers:
            phase_optimizer.set_mode(training=False)  # as when the checkpoint was saved
        self.load_weights(payload, where=where)
        saved = _saved_by_phase(payload["optimizer"], payload["schedules"], run.phase_optimizers, where=where)
        for phase_optimizer, (optimizer, schedules) in zip(run.phase_optimizers, saved, strict=True):
            # All phases are checked before any is loaded, so that an error leaves no optimizer half restored.
            phase_optimizer.check_saved(optimizer, schedules, where=where)
        # A rollback restores what this run has saved, and its state is no longer that of a new run.
        problem = next(self._unlike(payload, saved), None) if is_new else None
        if problem is not None:
            raise CheckpointError(f"{where} holds a state that cannot be restored: {problem}.")
        restored = zip(run.phase_optimizers, saved, payload["spikes"], strict=True)
        for phase_optimizer, (optimizer, schedules), spikes in restored:
            state = self._with_settings(phase_optimizer, optimizer, schedules, payload.get("settings", {}))
            strategy.load_optimizer_state_dict(run.task, phase_optimizer, state)
            # Checked again: the schedule that was saved may end before the run does.
            phase_optimizer.settings.check_length(run.max_steps, phase_optimizer.schedules)
            if phase_optimizer.spikes is not None:
                phase_optimizer.spikes.load_state_dict(spikes)
        strategy.load_strategy_state(payload.get("strategy", {}))
        run.precision.load_state_dict(payload["scaler"])
        run.state.load_state_dict(payload["state"])
        run.loader.load_state_dict(payload["loader"])
        saved_items, items = payload.get("num_items"), run.loader.num_items
        if run.is_main and saved_items not in (None, items):
            logger.warning(
                "the training data has %s samples, but had %s when %s was saved: the remaining steps of epoch %d may "
                "follow another order, in which some samples come twice or not at all.",
                "an unknown number of" if items is None else items,
                saved_items,
                where,
                run.state.epoch,
            )
        if run.means is not None:
            # The next log has the samples of all ranks since the last one, as without the resume.
            run.means.load_state_dict(payload.get("means", {}), strategy.comm)
        for name, callback in _named(run.callbacks):
            if name in payload["callbacks"]:  # a callback that was added since starts fresh
                state = payload["callbacks"][name]
                callback.load_state_dict(state if callback.loads_from_disk else in_memory(state))
        run.resumed_from, run.restored_step = where, run.state.step
        if payload.get("batch_size") is not None:
            run.reference_batch_size = ReferenceBatchSize(payload["batch_size"], "the resumed run")

    def _unlike(self, payload: dict[str, Any], saved_by_phase: list[tuple[Any, Any]]) -> Iterator[str]:
        """Yield what in a state of torch or of trainkit is unlike that of this run, which is new."""
        from trainkit.checkpoint.likeness import unlike

        run, phases = self._run, self._run.phase_optimizers
        expected = {
            "state": run.state.state_dict(),
            "rng": [rng_state(devices=False)] * len(payload["rng"]),  # another machine may have other GPUs
            "means": {name: [math.inf, math.inf] for name in payload.get("means", {})},  # a metric may be NaN
            "scaler": run.precision.state_dict() if run.precision.scaler is not None and payload["scaler"] else {},
            "spikes": [
                {"seen": [0.0, 0.0]} if isinstance(saved, dict) and saved else {} for saved in payload["spikes"]
            ],
            "callbacks": {
                # The callbacks may have been used in an earlier run, and a best value may be infinite.
                name: {
                    key: math.inf if isinstance(expected, float) else expected
                    for key, expected in callback.state_dict().items()
                }
                for name, callback in _named(run.callbacks)
                if type(callback).__module__.startswith("trainkit.callbacks.") and name in payload["callbacks"]
            },
            # None fits any plain value.
            "num_items": None,
            "num_moments": None,
        }
        yield from unlike(expected, payload, "payload")
        for phase_optimizer, (optimizer, schedules) in zip(phases, saved_by_phase, strict=True):
            settings = payload.get("settings", {})
            settings = settings.get(phase_optimizer.phase, {}) if phase_optimizer.phase else settings
            yield from unlike(dict.fromkeys(settings), settings, "settings")
            yield from phase_optimizer.settings.unlike(optimizer, schedules, saved=settings)
        # Torch loads a state without the moments of a parameter, and starts them again from zero.
        if payload.get("num_moments") not in (None, _num_values(payload["optimizer"], phases)):
            yield "values are missing in the state of the optimizer"

    def _with_settings(
        self, phase_optimizer: PhaseOptimizer, optimizer: dict[str, Any], schedules: list[Any], saved: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the optimizer's state with the settings that count; the schedules are restored. Warns of others."""
        settings = phase_optimizer.settings
        saved = saved.get(phase_optimizer.phase, {}) if phase_optimizer.phase else saved
        differing = settings.differences(saved, schedules)
        if differing and self._run.is_main:
            logger.warning("%s", difference_text(differing, self.resume_optimizer))
        if differing and self.resume_optimizer == "configured":
            return settings.advanced(optimizer, schedules, saved=saved, differing=differing)
        settings.check_schedules(saved)
        phase_optimizer.load_schedule_state(schedules)
        return optimizer

    def load_weights(self, payload: dict[str, Any], *, where: str, to_evaluate: bool = False) -> None:
        """Load a checkpoint's parameters and buffers into the task; raises UserError if they are another task's.

        `to_evaluate` loads the weights that the run was validated with, if they differ (an average).
        """
        from trainkit.checkpoint.frozen_weights import FROZEN, check_frozen, completed
        from trainkit.checkpoint.serialization import check_state_dict, same_errors, saved_weights

        task, strategy = self._run.task, self._run.strategy
        # keep_vars: without it torch detaches each parameter, which a guarded shard of fsdp refuses.
        saved, task_state = saved_weights(payload, where, to_evaluate=to_evaluate), task.state_dict(keep_vars=True)
        if payload.get(FROZEN):
            saved = completed(saved, payload[FROZEN], task_state)
        # A rollback may go back to a step before they were resized.
        unchanged = [
            name for name, shape in self.first_buffers.items() if shape == getattr(saved.get(name), "shape", None)
        ]
        resize_buffers(task, saved, [*payload.get(RESIZED, ()), *unchanged], strategy.device)
        task_state = task.state_dict(keep_vars=True)
        check_state_dict(without_custom_loading(task, task_state), without_custom_loading(task, saved), where)
        if payload.get(FROZEN):
            with same_errors(strategy.comm):
                # All ranks gather the frozen parameters, and one hashes them: its error must end them all.
                state = strategy.state_dict(task)
                if strategy.comm.is_main:
                    check_frozen(payload[FROZEN], state, where)
        try:
            strategy.load_state_dict(task, saved)
        # Errors of the device and of collectives are passed on: the checkpoint is to blame for what does not fit only.
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):  # torch's, of keys and shapes
                raise
            raise CheckpointError(f"{where} does not fit the task under {type(strategy).__name__}: {error}") from error

    def restore_rng(self, payload: dict[str, Any]) -> None:
        """Restore the random generators if the layout of ranks and micro-batches is that of the checkpoint.

        On another layout they get a new seed. Call it last: preparations may draw or change the layout.
        """
        run, strategy = self._run, self._run.strategy
        states = payload["rng"]
        if len(states) == strategy.comm.num_processes and payload["layout"] == self._layout():
            set_rng_state(states[strategy.comm.process])
        else:
            # More than any number of ranks, so that no two pairs of step and rank get the same seed.
            seed_everything(run.seed + 1_000_003 * run.state.step + strategy.comm.rank)

    # ---- What is saved

    def _payload(self, shards: ShardedState | None) -> dict[str, Any]:
        run, strategy = self._run, self._run.strategy
        assert run.loader is not None
        task_and_optimizers = self._task_and_optimizers(shards)
        optimizers = task_and_optimizers["optimizer"]
        payload = {
            **task_and_optimizers,
            "settings": _by_phase(
                [optimizer.settings.record() for optimizer in run.phase_optimizers], run.phase_optimizers
            ),
            "num_moments": None if shards is not None else _num_values(optimizers, run.phase_optimizers),
            "schedules": _by_phase(
                [optimizer.schedule_state() for optimizer in run.phase_optimizers], run.phase_optimizers
            ),
            "spikes": [
                {} if optimizer.spikes is None else optimizer.spikes.state_dict() for optimizer in run.phase_optimizers
            ],
            "strategy": strategy.strategy_state(),
            "scaler": {} if run.precision.scaler is None else run.precision.state_dict(),
            "state": run.state.state_dict(),
            "loader": run.loader.state_dict(run.state.position),
            "rng": strategy.comm.all_gather_object(rng_state()),  # of every rank, for a resume on the same layout
            "layout": self._layout(),
            "batch_size": None if run.plan is None else run.plan.batch_size,
            "num_items": run.loader.num_items,
            "means": {} if run.means is None else run.means.state_dict(strategy.comm),
            "callbacks": {name: callback.state_dict() for name, callback in _named(run.callbacks)},
            "config": run.config,
            "task_class": f"{type(run.task).__module__}.{type(run.task).__qualname__}",
        }
        # The state is complete on the main rank only.
        if run.is_main and self.first_buffers:
            payload[RESIZED] = resized_names(payload["task"], self.first_buffers, run.task)
        # Last, so that callbacks see all of the payload and may add to it.
        run.emit("on_save", payload)
        return payload

    def check_savable(self) -> None:
        """Raise UserError for a state that no checkpoint can hold; tensors are neither gathered nor copied.

        Called before the first step: optimizers have no state yet, and `on_save` is not called.
        """
        from trainkit.checkpoint.serialization import PayloadVisitor

        run = self._run
        if self.store is None:
            return
        assert run.loader is not None
        # `state_dict` would gather and copy tensors. Of the values of the task only these, which its code makes, may be
        # of a kind that cannot be saved.
        extra = {
            f"{name}._extra_state" if name else "_extra_state": module.get_extra_state()
            for name, module in run.task.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        phases = run.phase_optimizers
        groups = [
            {
                "param_groups": [
                    {k: v for k, v in group.items() if k != "params"} for group in optimizer.optimizer.param_groups
                ]
            }
            for optimizer in phases
        ]
        states = {
            "task": extra,
            "optimizer": _by_phase(groups, phases),
            "schedules": _by_phase([optimizer.schedule_state() for optimizer in phases], phases),
            "loader": run.loader.first_state(),
            "callbacks": {name: callback.state_dict() for name, callback in _named(run.callbacks)},
        }
        PayloadVisitor(lambda tensor, path: tensor).convert(states)  # raises for the first value that is not plain

    def _task_and_optimizers(self, shards: ShardedState | None = None) -> dict[str, Any]:
        """Return the task's and its optimizers' state, complete on the main rank or with placeholders; collective."""
        run = self._run
        if shards is not None:
            return {"task": shards.task, "optimizer": _by_phase(shards.optimizers, run.phase_optimizers)}
        optimizers = [run.strategy.optimizer_state_dict(run.task, optimizer) for optimizer in run.phase_optimizers]
        state = {"task": run.strategy.state_dict(run.task), "optimizer": _by_phase(optimizers, run.phase_optimizers)}
        if self.trainable_only and run.is_main:
            from trainkit.checkpoint.frozen_weights import FROZEN, frozen_names, record_of, without

            names = frozen_names(run.task)
            if names != self._frozen[0]:
                self._frozen = names, record_of(state["task"], names)
            state |= {"task": without(state["task"], names), FROZEN: self._frozen[1]}
        return state

    def _shards(self) -> ShardedState | None:
        strategy, run = self._run.strategy, self._run
        return strategy.shards(run.task, run.phase_optimizers) if isinstance(strategy, SupportsShardedState) else None

    def _layout(self) -> str:
        strategy = self._run.strategy
        # A rank that moved computes other samples, for which its random numbers were not drawn.
        places = f" {strategy.places()}" if isinstance(strategy, PlacesRanks) else ""
        return f"{type(strategy).__name__} {self._run.plan!r}{places}"

    def _save_on_main(
        self, store: CheckpointStore, payload: dict[str, Any], *, background: bool, then: OnSaved | None, labels: Labels
    ) -> CheckpointEntry | None:
        """Write the payload on the main rank, and raise its UserError on every rank; collective."""
        comm = self._run.strategy.comm
        entry: CheckpointEntry | None = None
        failure: UserError | None = None
        if comm.is_main:
            try:
                # A save in the background may have failed: its error must not be lost under this one's.
                if self._writer is not None:
                    self._writer.wait()
                if background:
                    self._async_writer(store).save(payload, then=then, **labels)
                else:
                    entry = store.save(payload, **labels)
                    if then is not None:
                        then(entry)
            except UserError as error:
                failure = error
        # The other ranks wait here for the main one. Without its error they would train on, and wait forever in their
        # next collective.
        failure = comm.broadcast_object(failure)
        if failure is not None:
            raise failure
        return entry

    def _async_writer(self, store: CheckpointStore) -> AsyncWriter:
        if self._writer is None:
            from trainkit.checkpoint.async_writer import AsyncWriter

            self._writer = AsyncWriter(store)
        return self._writer

    def _shard_writer(self, store: CheckpointStore) -> ShardedWriter:
        if self._sharded_writer is None:
            from trainkit.checkpoint.sharded_save import ShardedWriter

            self._sharded_writer = ShardedWriter(store, self._run.strategy.comm)
        return self._sharded_writer

    def _wait_for_shards(self) -> bool:
        return self._sharded_writer is not None and self._sharded_writer.finish()


def _note_stop(run: Run, *arguments: Any) -> None:
    run.may_be_stopped = True


def _may_stop(name: str, hooks: Sequence[Callable[..., None]]) -> bool:
    """Return True if one of the hooks called `name` may request a stop: a user's, or ours after an evaluation."""
    # Ranks then agree by a collective, which runs with our callbacks only need not pay in every step.
    is_ours = all(str(getattr(hook, "__module__", "")).startswith(_NEVER_STOP) for hook in hooks)
    return name == "on_evaluation_end" or not is_ours


def _named(callbacks: Sequence[RunCallback]) -> list[tuple[str, RunCallback]]:
    """Return the callbacks with their class names, numbered from the second of a class on."""
    seen: Counter[str] = Counter()
    named = []
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        named.append((kind if seen[kind] == 1 else f"{kind}_{seen[kind]}", callback))
    return named


def _by_phase(states: Sequence[Any], phase_optimizers: Sequence[PhaseOptimizer]) -> Any:
    """Return the state of the one optimizer of a task without phases, else the states by the names of the phases."""
    if phase_optimizers[0].phase == "":
        return states[0]
    return {optimizer.phase: state for optimizer, state in zip(phase_optimizers, states, strict=True)}


def _num_values(optimizers: Any, phase_optimizers: Sequence[PhaseOptimizer]) -> int:
    """Return the number of values of parameters, such as moments, in the saved state of optimizers."""
    states = [optimizers[optimizer.phase] if optimizer.phase else optimizers for optimizer in phase_optimizers]
    return sum(len(values) for state in states for values in state["state"].values())


def _saved_by_phase(
    optimizers: Any, schedules: Any, phase_optimizers: Sequence[PhaseOptimizer], *, where: str
) -> list[tuple[Any, Any]]:
    """Return each optimizer's saved state and schedules; raises UserError if they are of other phases."""
    names = [optimizer.phase for optimizer in phase_optimizers]
    # The state of a task without phases is that of its optimizer, with the keys of torch.
    saved = [""] if "param_groups" in optimizers else list(optimizers)
    if sorted(saved) != sorted(names):
        raise UserError(f"{where} was saved {_described(saved)}, and this task is trained {_described(names)}.")
    return [(optimizers, schedules)] if saved == [""] else [(optimizers[name], schedules[name]) for name in names]


def _described(phases: list[str]) -> str:
    return "without phases" if phases == [""] else f"with the phases {', '.join(phases)}"
