"""FitLoop: the training loop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from trainkit.data.batch import StepBatch
from trainkit.data.loader import BatchLoader, MapBatchLoader
from trainkit.duration import Interval, log_interval
from trainkit.errors import UserError
from trainkit.loops.fit_config import FitConfig
from trainkit.loops.followed_state import FollowedState
from trainkit.loops.replica_check import ReplicaCheck
from trainkit.loops.rollback import NonFinitePolicy
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.phases import PhaseStep, TrainStep, phased_step
from trainkit.run import PendingHook, Run
from trainkit.strategy import Strategy, SupportsPhases
from trainkit.task import TaskModule, begin_training, count_registrations

if TYPE_CHECKING:
    from trainkit.loops.evaluation_loop import EvaluationLoop
    from trainkit.loops.oom import AutoMicroBatch
    from trainkit.loops.skipped_steps import SkippedSteps
    from trainkit.loops.undoable_step import UndoableStep

logger = logging.getLogger(__name__)

_AFTER_STEP: Sequence[PendingHook] = (("on_step_end", (), 0), ("on_step_complete", (), 0))
_AFTER_EPOCH: Sequence[PendingHook] = (_AFTER_STEP[0], ("on_epoch_end", (), 0), _AFTER_STEP[1])
_AT_EPOCH: Sequence[PendingHook] = (("on_epoch_start", (), 0),)
_IN_EPOCH: Sequence[PendingHook] = (("on_epoch_start", (), sys.maxsize),)  # for no callback
_AT_END: Sequence[PendingHook] = (("on_fit_end", (), 0),)
_ENDED: Sequence[PendingHook] = (("on_fit_end", (), sys.maxsize),)


class FitLoop:
    """Drives training: one step batch, of one or more micro-batches, is one optimizer step.

    A step is two calls, `begin_step` and `finish_step`, so that few frames lie between `fit` and `training_step`.
    """

    def __init__(self, run: Run, config: FitConfig, *, validation: EvaluationLoop | None) -> None:
        assert run.loader is not None
        self._run = run
        self._loader: BatchLoader = run.loader
        self._max_duration = config.max_duration
        # The first step too: that of a slow model would else show no loss for a long time.
        self._log_interval = Interval(
            config.log_every or log_interval(run.max_steps), at_first=config.log_every is None
        )
        self._evaluation_interval = Interval(config.evaluate_every if validation is not None else None)
        self._validation = validation
        self._policy = NonFinitePolicy(run, policy=config.on_nonfinite, max_rollbacks=config.max_rollbacks)
        self._replicas = ReplicaCheck(run)
        self._state = FollowedState(run)
        # Followed steps swap the classes of modules and compare buffers: too slow for every step.
        self._first_steps = 3  # that are still to be followed
        self._evaluated_step = -1
        self._has_warned = False  # of a loss that grows with its samples
        self._is_stopping = False  # every rank knows that a stop was requested
        self._skipped: SkippedSteps | None = None
        self._undoable: UndoableStep | None = None
        self._first_of: dict[str, int] = {}  # hook that a loss has interrupted -> the callback to begin with
        self._parameters: dict[int, nn.Parameter] = {}  # at the start
        self.auto_micro_batch: AutoMicroBatch | None = None
        if run.strategy.auto_micro_batch:
            from trainkit.loops.oom import AutoMicroBatch, GrowingMicroBatch

            self.auto_micro_batch = (GrowingMicroBatch if run.strategy.grows_micro_batch else AutoMicroBatch)(run)

    def run(self) -> None:
        """Train until a duration is reached or a stop is requested; `run.stop_reason` is the reason."""
        run, state, policy = self._run, self._run.state, self._policy
        self.start()
        while True:
            # A rollback leaves this block, and the loop below goes on from the restored position.
            with policy.rollback_on_request(then=self._start_intervals):
                for batch in self.step_batches():
                    outputs = self.begin_step(batch)
                    self.finish_step(batch)
                    policy.means.add(outputs, step=state.step)
                    if self._evaluation_interval.due(state):
                        state.evaluation_due = True  # also for a checkpoint that a callback saves now
                    run.emit("on_step_end")
                    run.pending_hooks = run.pending_hooks[1:]
                    if self._log_interval.due(state):
                        self._log()
                    if state.evaluation_due:
                        self._evaluate()
                # A loss of the last steps may be bad and not logged yet: that still has to raise, stop or roll back.
                if self._weights_are_sound():
                    self._log(at_end=True)
                break
        self.end()

    def end(self) -> None:
        """Leave the weights to evaluate with in the task, and call callbacks for the last time; collective."""
        run = self._run
        for phase_optimizer in run.phase_optimizers:
            phase_optimizer.set_mode(training=False)
        first, run.pending_hooks = self._first_of.get("on_fit_end", 0), _AT_END
        run.emit("on_fit_end", start=first)
        run.pending_hooks = _ENDED

    def start(self) -> None:
        """Compose the step and prepare the task for it; repeat an evaluation that was interrupted. Collective."""
        run = self._run
        begin_training(run.task)
        if run.unsaved is not None:
            from trainkit.loops.undoable_step import set_flags

            set_flags(run.task, run.unsaved)
        # Gradients that the caller left in the task would be added to those of the first step.
        run.task.zero_grad(set_to_none=True)
        run.follow_stopping_hooks()
        self._policy.prepare()
        # The ids stay unique, since the values hold the parameters.
        self._parameters = {id(parameter): parameter for parameter in run.task.parameters()}
        run.state.start_clock()
        run.weights_are_finite = self._weights_are_sound
        if any(duration.is_time for duration in self._max_duration):
            run.state.sync_clock()
        self._start_intervals()
        for phase_optimizer in run.phase_optimizers:
            phase_optimizer.set_mode(training=True)
            phase_optimizer.follow_groups()  # the strategy may have replaced parameters
        run.emit("on_fit_start")
        if any(phase_optimizer.skip_nonfinite for phase_optimizer in run.phase_optimizers):
            from trainkit.loops.skipped_steps import SkippedSteps

            self._skipped = SkippedSteps(run)
        # After `on_fit_start`, in which callbacks may ask for a step timer or change optimizers.
        self._step = self._make_step()
        self.begin_step = self._step.begin
        """Computes a step batch and returns the outputs of this rank's micro-batches; collective."""
        self._policy.start()
        with self._policy.rollback_on_request(then=self._start_intervals):
            self._complete_last_step()

    def _complete_last_step(self) -> None:
        """Repeat an evaluation that was interrupted, and call the hooks that the loss of a rank has prevented."""
        run = self._run
        while run.pending_hooks:
            hook, arguments, first = run.pending_hooks[0]
            if hook in ("on_epoch_start", "on_fit_end"):  # the last step is complete, and the loop calls them
                self._first_of, run.pending_hooks = {hook: first}, ()
                return
            if hook != "on_step_end":  # the evaluation is between it and the others
                self._evaluate_if_due()
            # The one at the end of an evaluation reads the weights that were evaluated.
            evaluated = hook == "on_evaluation_end"
            with run.optimizers_in_evaluation() if evaluated else nullcontext():
                run.emit(hook, *arguments, start=first)
            run.pending_hooks = run.pending_hooks[1:]
        self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        if self._run.state.evaluation_due and self._validation is not None:
            self._evaluate()

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield this rank's step batches until training is finished, and end the step of each; collective.

        Raises UserError if an epoch has no step batch.
        """
        # A parameter is new only if a module registered something: without the count, each step would walk all modules.
        with count_registrations() as registrations:
            registrations[0] = 1  # for those before it
            while not self._finished():
                yield from self._epoch_batches(registrations)

    def _epoch_batches(self, registrations: list[int]) -> Iterator[StepBatch]:
        run, state = self._run, self._run.state
        if not (run.handed_over and state.position):  # otherwise the ranks before a loss have called it
            run.pending_hooks = _AT_EPOCH
            run.emit("on_epoch_start", start=self._first_of.pop("on_epoch_start", 0))
            run.pending_hooks = _IN_EPOCH
        first_step = state.step
        batches = run.strategy.step_batches(
            self._loader.timed_batches(state.epoch, state.position), pin_memory=self._loader.stage_data.pin_memory
        )
        for batch in batches if run.step_timer is None else run.step_timer.timed_batches(batches):
            if registrations[0]:
                registrations[0] = 0
                self._check_parameters()
                run.strategy.add_untrained(run.task)
                if self._undoable is not None:
                    self._undoable.find_state()
            # Between steps: the change takes effect on all ranks at the same step, before its first backward.
            if run.strategy.is_outdated(run.phase_optimizers):
                self._check_parameters()
                run.strategy.retrain(run.task, run.phase_optimizers)
            yield batch
            if batch.ends_epoch:
                run.emit("on_epoch_end")
                run.pending_hooks = run.pending_hooks[1:]
            # After the epoch's end, so that a checkpoint has the schedules and callbacks of the completed epoch.
            run.emit("on_step_complete")
            run.pending_hooks = ()
            if self._finished():
                break
        # Otherwise the loop would begin this epoch again without end.
        if state.step == first_step:
            raise UserError(
                f"there is nothing to train on from position {state.position} of epoch {state.epoch}, which has "
                f"{'too few' if state.epoch_length is None else state.epoch_length} items now. Resume with the "
                "data and limits that the run began with, set a smaller batch_size, or drop_last=False."
            )

    def finish_step(self, batch: StepBatch) -> None:
        """Make the remaining updates, count the step, and step the schedules of a completed epoch; collective."""
        run, state = self._run, self._run.state
        self._step.finish()
        if self._first_steps:
            self._first_steps -= 1
            self.begin_step = self._state.next_begin(self._step.begin)
        state.advance(items=batch.num_items, samples=batch.num_samples, ends_epoch=batch.ends_epoch)
        if state.clock_is_synced:  # the last synced time, which costs no collective
            state.set_clock(max(state.seconds, run.strategy.comm.synced_seconds(state.own_seconds)))
        if run.step_timer is not None:
            run.step_timer.end_step()
        if batch.ends_epoch:
            for phase_optimizer in run.phase_optimizers:
                phase_optimizer.step_schedules("epoch")
        # For the ranks that go on after a loss.
        run.pending_hooks = _AFTER_EPOCH if batch.ends_epoch else _AFTER_STEP
        if self._undoable is not None:
            self._undoable.end()
        if run.handed_over and run.strategy.handover is not None:
            # Not before: another loss would have needed it again.
            run.strategy.handover.discard()
            run.handed_over = False

    def warn_skipped_steps(self, bad: Sequence[int] = ()) -> None:
        """Warn about the steps skipped since the last call; waits for the device. Collective."""
        if self._skipped is not None:
            self._skipped.warn(bad, self._loader)

    def _check_parameters(self) -> None:
        """Raise UserError for a trained parameter that neither the ranks nor an optimizer know."""
        run = self._run
        known_parameters = set(self._parameters)
        # One process has no ranks to tell: a parameter is trained if an optimizer got it with add_param_group.
        if run.strategy.comm.num_processes == 1:
            groups = [group for optimizer in run.phase_optimizers for group in optimizer.optimizer.param_groups]
            known_parameters.update(id(parameter) for group in groups for parameter in group["params"])
        for name, parameter in run.task.named_parameters():
            if parameter.requires_grad and id(parameter) not in known_parameters:
                raise UserError(
                    f"the parameter {name} was added or replaced while training, so no optimizer or other rank knows "
                    "it. Create all layers in __init__, and change values in place: with torch.no_grad(): "
                    "parameter.copy_(values)."
                )

    def _start_intervals(self) -> None:
        """Count intervals from the present step; after a rollback only a signal still requests a stop."""
        self._is_stopping = self._run.stopped_by is not None
        for interval in (self._log_interval, self._evaluation_interval):
            interval.start(self._run.state)

    def _finished(self) -> bool:
        """Return True if the last step was the run's last; the same on every rank. Collective."""
        run, state = self._run, self._run.state
        for duration in self._max_duration:
            if duration.reached(state):
                run.request_stop(f"reached max_duration={duration}")
                return True
        if run.may_be_stopped and not self._is_stopping:
            run.may_be_stopped = False
            # At once, so that training ends after the step of the request. The flag is set at the same steps on every
            # rank, so all of them call this collective.
            self._is_stopping = run.strategy.comm.should_stop_now(run.stop_reason is not None)
        if not self._is_stopping:
            # Signals come at any time, and so may requests of threads: an agreement in every step would be slow.
            requested = run.signals.received is not None or run.stop_reason is not None
            seconds = state.own_seconds if state.clock_is_synced else 0.0  # sent along, so it costs no collective
            if not run.strategy.comm.should_stop(requested, seconds=seconds):
                return False
        self._is_stopping = True  # should_stop asks only now and then; its next answer may be False
        self._sync_signal()
        run.request_stop("another rank was asked to stop")  # keeps this rank's reason if it has one
        return True

    def _sync_signal(self) -> None:
        """Let a signal be the reason of the stop, before any other: it decides the exit code. Collective."""
        run = self._run
        if run.sync_stop_signal() and run.stopped_by is not None:
            run.stop_reason = run.stopped_by.name

    def _make_step(self) -> TrainStep:
        """Compose the step once, so that options that are off cost nothing."""
        run = self._run
        phases = [make_phase_step(run.task, run.strategy, phase_optimizer) for phase_optimizer in run.phase_optimizers]
        # Innermost, so that both checks see the micro-batches into which micro_batch_size=auto splits the batch.
        phases = [self._state.wrap(self._replicas.wrap(phase)) for phase in phases]
        for option in (self.auto_micro_batch, self._skipped, run.step_timer):
            if option is not None:
                phases = [option.wrap(phase) for phase in phases]
        if run.strategy.handover is not None:
            run.strategy.handover.begin()
            # Ranks read other shards of an iterable dataset, and only they know how far.
            has_heirs = run.strategy.comm.num_processes > 1 or run.strategy.handover.regrow is not None
            if has_heirs and run.strategy.hands_over and isinstance(self._loader, MapBatchLoader):
                from trainkit.loops.undoable_step import UndoableStep

                self._undoable = UndoableStep(run)
                self._undoable.find_state()  # an evaluation that a loss has interrupted comes before the first step
                phases = [self._undoable.wrap(phase) for phase in phases]
        step = phased_step(run.task, run.state, phases) if phases[0].phase else single_step(phases[0])
        if not self._policy.lists_steps:
            return step
        from trainkit.loops.skipped_steps import skip_listed_steps

        return skip_listed_steps(step, run.state, self._policy.skip_step)

    def _log(self, *, at_end: bool = False) -> None:
        """Write the means since the last log; the only place of training that waits for the device."""
        run, means = self._run, self._policy.means
        bad = means.nonfinite_steps()
        with_buffers = self._evaluated_step != run.state.step  # an evaluation may count in buffers of this rank
        is_compared = at_end or self._replicas.is_due()
        checksum = self._replicas.sums(with_buffers=with_buffers) if is_compared else None
        reduced = means.reduce(run.strategy.comm, checksum=checksum)
        # The values of a new parameter may differ, but that is not what to mend.
        self._replicas.check_sums(means.checksum_sums, with_buffers=with_buffers, first_check=self._check_parameters)
        self._state.warn_of_differences()
        if not reduced:
            return
        if means.loss_grows_with_samples and run.task.loss_reduction == "mean" and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the loss of %s.training_step grows with the number of its samples. A sum over samples is divided by "
                "the number of ranks and micro-batches: return a mean, or set loss_reduction = 'sum' in the class.",
                type(run.task).__name__,
            )
        if not means.loss_was_finite:
            self._policy.on_nonfinite_loss(bad[0] if bad else None)
        self.warn_skipped_steps(bad)
        metrics = {f"train/{name}": value for name, value in reduced.items()}
        metrics["train/epoch"] = run.state.epochs
        if any(f"{phase_optimizer.phase}/loss" in reduced for phase_optimizer in run.phase_optimizers):
            del metrics["train/loss"]  # the mean over phases, which means nothing
        for phase, norm in self._step.grad_norms.items():
            metrics[_metric_name(phase, "grad_norm")] = float(norm)
        for phase_optimizer in run.phase_optimizers:
            for name, value in phase_optimizer.measured().items():
                metrics[_metric_name(phase_optimizer.phase, name)] = value
        # Before they are written, so that callbacks may add metrics.
        run.emit("on_log", metrics)
        run.log(metrics)

    def _weights_are_sound(self) -> bool:
        """Return True if the weights may be saved; raises UserError if those of replicas differ. Collective."""
        is_finite = self._policy.weights_are_finite()
        self._replicas.check()
        return is_finite

    def _evaluate(self) -> None:
        """Validate, and step the schedules that follow a metric; left due if a stop interrupts it. Collective."""
        assert self._validation is not None
        run = self._run
        # Set before the evaluation and cleared after it: a checkpoint of an interrupted one repeats it on a resume.
        run.state.evaluation_due = True
        # A loss that is not finite must raise or roll back before it costs an evaluation.
        self._policy.check()
        if self._undoable is not None:
            self._undoable.begin_evaluation()
        with run.optimizers_in_evaluation():
            metrics = self._validation.run()
            if self._undoable is not None:
                self._undoable.end()  # it is complete, and what it has changed counts
            self._evaluated_step = run.state.step
            if metrics is None:
                self._is_stopping = True
                self._sync_signal()  # after the last step no other comes to ask for it
                return
            run.state.evaluation_due = False
            for phase_optimizer in run.phase_optimizers:
                phase_optimizer.step_schedules("metric", metrics)
            run.emit("on_evaluation_end", "validation", metrics)
        if self._undoable is not None:
            self._undoable.end_evaluation()


def single_step(phase: PhaseStep) -> TrainStep:
    """Return the step of a task with one optimizer."""
    update, step_schedules = phase.update, phase.step_schedules
    grad_norms: dict[str, Tensor] = {}

    def finish() -> None:
        norm = update()
        step_schedules()
        if norm is not None:
            grad_norms[""] = norm  # kept on the device; read when training logs

    return TrainStep(phase.forward_backward, finish, grad_norms)


def make_phase_step(task: TaskModule, strategy: Strategy, phase_optimizer: PhaseOptimizer) -> PhaseStep:
    """Return the calls of one optimizer, without options around them."""
    phased = strategy if isinstance(strategy, SupportsPhases) else None

    def begin(step_name: str | None) -> None:
        assert phased is not None  # checked before training
        phased.begin_phase(phase_optimizer, step_name=step_name or phase_optimizer.step_name)

    step = PhaseStep(
        phase_optimizer.phase,
        phase_optimizer.every,
        begin,
        partial(strategy.forward_backward, task),
        partial(strategy.optimizer_step, phase_optimizer),
        partial(phase_optimizer.step_schedules, "step"),
    )
    if not phase_optimizer.needs_closure:
        if not task.manual:  # a LightningModule may step its optimizers itself, with closures
            phase_optimizer.check_step()
        return step
    from trainkit.loops.closure import Closure

    phase_optimizer.closure = closure = Closure(task, strategy, phase_optimizer)
    return replace(step, forward_backward=closure.forward_backward)


def _metric_name(phase: str, name: str) -> str:
    return f"train/{phase}/{name}" if phase else f"train/{name}"
