"""The training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from trainkit.data.batch import StepBatch
from trainkit.data.loader import BatchLoader
from trainkit.duration import Duration, Interval
from trainkit.errors import UserError
from trainkit.loops.evaluation_loop import EvaluationLoop
from trainkit.loops.oom import AutoMicroBatch
from trainkit.loops.phases import PhasedStep, PhaseStep, SingleStep, StepWrapper, TrainStep
from trainkit.loops.rollback import NonFinitePolicy
from trainkit.loops.run import Run
from trainkit.loops.skipped_steps import SkipListedSteps, SkippedSteps
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.strategy import Strategy, SupportsPhases, uses_auto_micro_batch
from trainkit.task import TaskModule


@dataclass(frozen=True)
class FitIntervals:
    """When training logs, evaluates and ends."""

    max_duration: Sequence[Duration]
    """Training ends with the first of them that is reached."""
    log_every: Duration
    evaluate_every: Duration | None


class FitLoop:
    """Drives training: one step batch, of one or more micro-batches, is one optimizer step.

    A step is made in two calls, `begin_step` and `finish_step`, so that few frames lie between `fit` and a task's
    `training_step`.
    """

    def __init__(
        self, run: Run, intervals: FitIntervals, *, validation: EvaluationLoop | None, policy: NonFinitePolicy
    ) -> None:
        assert run.loader is not None
        self.auto_micro_batch = AutoMicroBatch(run) if uses_auto_micro_batch(run.strategy) else None
        self._run = run
        self._feed: BatchLoader = run.loader
        self._max_duration = intervals.max_duration
        self._log_interval = Interval(intervals.log_every)
        self._evaluation_interval = Interval(intervals.evaluate_every if validation is not None else None)
        self._validation = validation
        self._policy = policy
        self._means = policy.means
        self._stop_is_agreed = False  # all ranks know that they were asked to stop
        self._skipped: SkippedSteps | None = None  # where an optimizer may skip steps

    def run(self) -> None:
        """Train until a duration is reached or a stop is requested; leaves the reason in `run.stop_reason`."""
        run, state, means = self._run, self._run.state, self._means
        on_step_end = run.hooks("on_step_end")
        self.start()
        begin_step, finished = self.begin_step, False
        while not finished:
            with self._policy.rollback_on_request(then=self.start_intervals):
                for batch in self.step_batches():
                    outputs = begin_step(batch)
                    self.finish_step(batch)
                    means.add(outputs, step=state.step)
                    if self._log_interval.due(state):
                        self._log()
                    if self._evaluation_interval.due(state):
                        self._evaluate()
                    for hook in on_step_end:
                        hook(run)
                if self._policy.weights_are_finite():
                    self._log()
                finished = True
        run.emit("on_fit_end")

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield this rank's step batches, epoch after epoch, until training is finished; collective."""
        run, state = self._run, self._run.state
        while not self.finished():
            run.emit("on_epoch_start")
            first_step = state.step
            for batch in self.epoch_batches():
                yield batch
                if batch.ends_epoch:
                    run.emit("on_epoch_end")
                if self.finished():
                    break
            self.check_not_empty(first_step)

    def start(self) -> None:
        """Compose the step and leave the task ready for it; make an evaluation that a stop interrupted. Collective."""
        run = self._run
        run.task.train()
        run.task.zero_grad(set_to_none=True)
        self._policy.prepare()
        run.state.start_clock()
        run.weights_are_finite = self._policy.weights_are_finite
        if any(duration.unit in ("second", "minute", "hour") for duration in self._max_duration):
            run.state.sync_clock()
        self.start_intervals()
        run.emit("on_fit_start")
        if any(phase_optimizer.skip_nonfinite for phase_optimizer in run.phase_optimizers):
            self._skipped = SkippedSteps(run)
        self._step = make_train_step(run, self._policy, [self.auto_micro_batch, self._skipped, run.step_timer])
        self.begin_step = self._step.begin
        """Computes a step batch and returns the outputs of this rank's micro-batches; collective."""
        self._policy.start()
        if run.state.evaluation_due and self._validation is not None:
            self._evaluate()

    def start_intervals(self) -> None:
        """Count what is due from the present step on; a stop has been agreed on only where a signal asked for it."""
        self._stop_is_agreed = self._run.stopped_by is not None
        for interval in (self._log_interval, self._evaluation_interval):
            interval.start(self._run.state)

    def epoch_batches(self) -> Iterator[StepBatch]:
        """Return this rank's step batches of the present epoch, from the present position on."""
        run, state = self._run, self._run.state
        batches = run.strategy.step_batches(
            self._feed.timed_batches(state.epoch, state.position), pin_memory=self._feed.stage_data.pin_memory
        )
        return batches if run.step_timer is None else run.step_timer.timed_batches(batches)

    def finish_step(self, batch: StepBatch) -> None:
        """Make the updates that are left, and count the step; collective."""
        run, state = self._run, self._run.state
        self._step.finish()
        state.advance(items=batch.num_items, samples=batch.num_samples, ends_epoch=batch.ends_epoch)
        if state.clock_is_synced:  # the time that ranks have agreed on, which costs no collective
            state.set_clock(max(state.seconds, run.strategy.comm.synced_seconds(state.own_seconds)))
        if run.step_timer is not None:
            run.step_timer.end_step()
        if batch.ends_epoch:
            for phase_optimizer in run.phase_optimizers:
                phase_optimizer.step_schedules("epoch")

    def finished(self) -> bool:
        """Return whether this was the last step; the same on every rank."""
        run, state = self._run, self._run.state
        for duration in self._max_duration:
            if duration.reached(state):
                run.request_stop(f"reached max_duration={duration}")
                return True
        requested = run.signals.received is not None or run.stop_reason is not None
        if not self._stop_is_agreed and not self._agree_to_stop(requested):
            return False
        self._stop_is_agreed = True  # ranks that ask each other only now and then would otherwise continue first
        if run.sync_stop_signal() and run.stopped_by is not None:
            run.stop_reason = run.stopped_by.name
        run.request_stop("another rank was asked to stop")
        return True

    def warn_skipped_steps(self, bad: Sequence[int] = ()) -> None:
        """Warn of the steps that were skipped since the last call; waits for the device. Collective."""
        if self._skipped is not None:
            self._skipped.warn(bad, self._feed)

    def check_not_empty(self, first_step: int) -> None:
        """Raise UserError if an epoch that began at `first_step` had no step batch."""
        state = self._run.state
        if state.step == first_step:
            raise UserError(
                f"there is nothing to train on from position {state.position} of epoch {state.epoch}, which has "
                f"{'too few' if state.epoch_length is None else state.epoch_length} items now. Resume with the data "
                "and limits that the run began with, set a smaller batch_size, or drop_last=False."
            )

    def _agree_to_stop(self, requested: bool) -> bool:
        """Return whether all ranks stop now; the time is sent with the question, and costs no collective."""
        strategy, state = self._run.strategy, self._run.state
        if not state.clock_is_synced:
            return strategy.comm.should_stop(requested)
        return strategy.comm.should_stop(requested, seconds=state.own_seconds)

    def _log(self) -> None:
        """Write the means since the last time; the only place of training that waits for the device."""
        run = self._run
        bad = self._means.nonfinite_steps()
        means = self._means.reduce(run.strategy.comm)
        if not means:
            return
        if not self._means.loss_was_finite:
            self._policy.on_nonfinite_loss(bad[0] if bad else None)
        self.warn_skipped_steps(bad)
        metrics = {f"train/{name}": value for name, value in means.items()}
        metrics["train/epoch"] = run.state.epochs
        if run.phase_optimizers[0].phase:
            del metrics["train/loss"]  # of all phases together, which means nothing
        for phase, norm in self._step.grad_norms.items():
            metrics[_metric_name(phase, "grad_norm")] = float(norm)
        for phase_optimizer in run.phase_optimizers:
            if phase_optimizer.skipped_steps is not None:
                metrics[_metric_name(phase_optimizer.phase, "skipped_steps")] = float(phase_optimizer.skipped_steps)
        run.emit("on_log", metrics)
        run.log(metrics)

    def _evaluate(self) -> None:
        assert self._validation is not None
        run = self._run
        run.state.evaluation_due = True
        self._policy.check()
        metrics = self._validation.run()
        run.task.train()
        self._stop_is_agreed = self._stop_is_agreed or metrics is None
        if metrics is not None:
            run.state.evaluation_due = False
            for phase_optimizer in run.phase_optimizers:
                phase_optimizer.step_schedules("metric", metrics)
            run.emit("on_evaluation_end", "validation", metrics)


def make_train_step(run: Run, policy: NonFinitePolicy, wrappers: Sequence[StepWrapper | None]) -> TrainStep:
    """Compose the step once, so that what is off costs nothing."""
    phases = [make_phase_step(run.task, run.strategy, phase_optimizer) for phase_optimizer in run.phase_optimizers]
    for wrapper in wrappers:
        if wrapper is not None:
            phases = [wrapper.wrap(phase) for phase in phases]
    step: TrainStep = PhasedStep(run.task, run.state, phases) if phases[0].phase else SingleStep(phases[0])
    return SkipListedSteps(step, run.state, policy.skip_step) if policy.lists_steps else step


def make_phase_step(task: TaskModule, strategy: Strategy, phase_optimizer: PhaseOptimizer) -> PhaseStep:
    """Return the calls of one optimizer, without options around them."""

    def begin(step_name: str | None) -> None:
        assert isinstance(strategy, SupportsPhases)  # checked before training
        strategy.begin_phase(phase_optimizer, step_name=step_name or phase_optimizer.step_name)

    return PhaseStep(
        phase_optimizer.phase,
        phase_optimizer.every,
        begin,
        partial(strategy.forward_backward, task),
        partial(strategy.optimizer_step, phase_optimizer),
        partial(phase_optimizer.step_schedules, "step"),
    )


def _metric_name(phase: str, name: str) -> str:
    return f"train/{phase}/{name}" if phase else f"train/{name}"
