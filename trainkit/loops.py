"""The control flow of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trainkit.duration import Duration, Interval
from trainkit.errors import UserError
from trainkit.evaluation import EvalLoop
from trainkit.feed import Feed
from trainkit.left_out import LeftOutSteps
from trainkit.memory import MemoryFit
from trainkit.optimization import Optimization
from trainkit.phases import Phases
from trainkit.recovery import Recovery
from trainkit.run import Run
from trainkit.step_output import StepOutput
from trainkit.strategy import uses_auto_micro_batch
from trainkit.task import TaskModule
from trainkit.window import Window


@dataclass(frozen=True)
class FitSchedule:
    """When training logs, evaluates and ends."""

    max_duration: Sequence[Duration]
    """Training ends with the first of them that is reached."""
    log_every: Duration
    evaluate_every: Duration | None


class FitLoop:
    """Drives training: one window of micro-batches is one optimizer step."""

    def __init__(self, run: Run, schedule: FitSchedule, *, validation: EvalLoop | None, recovery: Recovery) -> None:
        assert run.feed is not None and run.optimization is not None
        phased = run.optimization.phase != ""
        self.phases = Phases(run, run.optimizations) if phased else None
        """Of a task that has several; `None` for others."""
        self.memory_fit = MemoryFit(run) if uses_auto_micro_batch(run.strategy) else None
        self.forward_backward: Callable[[TaskModule, Window], list[StepOutput]]
        self.forward_backward = (self.memory_fit or run.strategy).forward_backward
        """Leaves the gradients of a window; collective."""
        self._optimizer_step: Callable[[Optimization], torch.Tensor | None] = run.strategy.optimizer_step
        self._run = run
        self._feed: Feed = run.feed
        self._optimizations = run.optimizations
        self._max_duration = schedule.max_duration
        self._log_interval = Interval(schedule.log_every)
        self._evaluation_interval = Interval(schedule.evaluate_every if validation is not None else None)
        self._validation = validation
        self._recovery = recovery
        recovery.looking_back.make_step = self.step
        self._means = recovery.means
        self._stop_is_agreed = False  # all ranks know that they were asked to stop
        self._left_out: LeftOutSteps | None = None  # where steps may be
        self._norm: torch.Tensor | None = None  # of the last step's gradients

    def run(self) -> None:
        """Train until a duration is reached or a stop is asked for; leaves why in `run.stop_reason`."""
        run, state, means, phases = self._run, self._run.state, self._means, self.phases
        on_step_end = run.hooks("on_step_end")
        self.start()
        forward_backward = self.forward_backward
        for attempt in self._recovery.attempts(self.start_intervals):
            with attempt:
                while not self.finished():
                    run.emit("on_epoch_start")
                    first_step = state.step
                    for window in self.windows():
                        # As in `step`, which is written out here: a call less on the way to the user's step.
                        if state.step + 1 in state.left_out:
                            outputs = self._recovery.leave_out(window)
                        else:
                            outputs = forward_backward(run.task, window) if phases is None else phases.train(window)
                        self.finish_step(window)
                        means.add(outputs, step=state.step)
                        if self._log_interval.due(state):
                            self._log()
                        if self._evaluation_interval.due(state):
                            self._evaluate()
                        for hook in on_step_end:
                            hook(run)
                        if window.ends_epoch:
                            run.emit("on_epoch_end")
                        if self.finished():
                            break
                    self.check_progress(first_step)
                if self._recovery.may_save():
                    self._log()
        run.emit("on_fit_end")

    def start(self) -> None:
        """Leave the task ready for its first step, and make up for an evaluation that a stop broke off."""
        run = self._run
        run.task.train()
        run.task.zero_grad(set_to_none=True)
        self._recovery.prepare()
        run.state.start_clock()
        run.may_save = self._recovery.may_save
        if any(duration.unit in ("second", "minute", "hour") for duration in self._max_duration):
            run.state.watch_clock()
        self.start_intervals()
        run.emit("on_fit_start")
        if any(optimization.skip_nonfinite for optimization in self._optimizations):
            self._surround_steps(LeftOutSteps(run, self._recovery.looking_back.replay))
        if run.watch is not None:
            self.forward_backward = run.watch.forward_backward(self.forward_backward)
            self._optimizer_step = run.watch.optimizer_step(self._optimizer_step)
            if self.phases is not None:
                self.phases.control.measure(run.watch)
        self._recovery.start()
        if run.state.evaluation_due and self._validation is not None:
            self._evaluate()

    def _surround_steps(self, left_out: LeftOutSteps) -> None:
        """Let steps that are left out change no buffer either."""
        self._left_out = left_out
        if self.phases is not None:
            self.phases.control.left_out = left_out
        else:
            self.forward_backward = left_out.forward_backward(self.forward_backward)
            self._optimizer_step = left_out.optimizer_step(self._optimizer_step)

    def start_intervals(self) -> None:
        """Count what is due from the present step on; a stop has been agreed on only where a signal asked for it."""
        self._stop_is_agreed = self._run.stopped_by is not None
        for interval in (self._log_interval, self._evaluation_interval):
            interval.start(self._run.state)

    def windows(self) -> Iterator[Window]:
        """Return this rank's windows of the present epoch, from where training is."""
        run, state = self._run, self._run.state
        windows = run.strategy.step_batches(
            self._feed.timed_windows(state.epoch, state.position), pin_memory=self._feed.source.pin_memory
        )
        return windows if run.watch is None else run.watch.received(windows)

    def step(self, window: Window) -> list[StepOutput]:
        """Make one optimizer step and count it; return the outputs of this rank's micro-batches. Collective."""
        run, phases = self._run, self.phases
        if run.state.step + 1 in run.state.left_out:
            outputs = self._recovery.leave_out(window)
        else:
            outputs = self.forward_backward(run.task, window) if phases is None else phases.train(window)
        self.finish_step(window)
        return outputs

    def tell_left_out(self, bad: Sequence[int] = ()) -> None:
        """Warn of the steps that were left out since the last call; waits for the device. Collective."""
        if self._left_out is not None:
            self._left_out.tell(bad, self._feed)

    def finish_step(self, window: Window) -> None:
        """Update the parameters, unless the phases of the step have done so, and count the step; collective."""
        run, state = self._run, self._run.state
        if self.phases is None and state.step + 1 not in state.left_out:
            optimization = self._optimizations[0]
            self._norm = self._optimizer_step(optimization)
            optimization.after_step()
        state.advance(items=window.num_items, samples=window.num_samples, ends_epoch=window.ends_epoch)
        if state.clock_is_watched:  # what ranks have agreed on, which asks nobody
            state.set_clock(max(state.seconds, run.strategy.comm.synced_seconds(state.own_seconds)))
        if run.watch is not None:
            run.watch.end_step()
        if window.ends_epoch:
            for optimization in self._optimizations:
                optimization.after_epoch()

    def finished(self) -> bool:
        """Return whether this was the last step; the same on every rank."""
        run, state = self._run, self._run.state
        for duration in self._max_duration:
            if duration.reached(state):
                run.request_stop(f"reached max_duration={duration}")
                return True
        asked = run.signals.received is not None or run.stop_reason is not None
        if not self._stop_is_agreed and not self._agree_to_stop(asked):
            return False
        self._stop_is_agreed = True  # asked again, ranks that ask each other now and then would first go on
        if run.agree_on_signal() and run.stopped_by is not None:
            run.stop_reason = run.stopped_by.name
        run.request_stop("another rank was asked to stop")
        return True

    def _agree_to_stop(self, asked: bool) -> bool:
        """Return whether all ranks stop now; the time goes along with the question, and costs no collective."""
        strategy, state = self._run.strategy, self._run.state
        if not state.clock_is_watched:
            return strategy.comm.should_stop(asked)
        return strategy.comm.should_stop(asked, seconds=state.own_seconds)

    def check_progress(self, first_step: int) -> None:
        """Raise UserError if an epoch that began at `first_step` had no window."""
        state = self._run.state
        if state.step == first_step:
            raise UserError(
                f"there is nothing to train on from position {state.position} of epoch {state.epoch}, which has "
                f"{'too few' if state.epoch_length is None else state.epoch_length} items now. Resume with the data "
                "and limits that the run began with, set a smaller batch_size, or drop_last=False."
            )

    def _log(self) -> None:
        """Write the means since the last time; the only place of training that waits for the device."""
        run = self._run
        bad = self._means.nonfinite_steps()
        means = self._means.reduce(run.strategy.comm)
        if not means:
            return
        if not self._means.loss_was_finite:
            self._recovery.handle(bad[0] if bad else None)
        self.tell_left_out(bad)
        metrics = {f"train/{name}": value for name, value in means.items()}
        metrics["train/epoch"] = run.state.epochs
        if self._norm is not None:
            metrics["train/gradient_norm"] = float(self._norm)
        if self.phases is not None:
            del metrics["train/loss"]  # of all phases together, which means nothing
            metrics.update(
                {f"train/{name}/gradient_norm": float(norm) for name, norm in self.phases.control.norms.items()}
            )
        for optimization in self._optimizations:
            if optimization.skipped_steps is not None:
                under = f"{optimization.phase}/" if optimization.phase else ""
                metrics[f"train/{under}skipped_steps"] = float(optimization.skipped_steps)
        run.emit("on_log", metrics)
        run.log(metrics)

    def _evaluate(self) -> None:
        assert self._validation is not None
        run = self._run
        run.state.evaluation_due = True
        self._recovery.check()
        metrics = self._validation.run()
        run.task.train()
        self._stop_is_agreed = self._stop_is_agreed or metrics is None
        if metrics is not None:
            run.state.evaluation_due = False
            for optimization in self._optimizations:
                optimization.after_validation(metrics)
            run.emit("on_evaluation_end", "validation", metrics)
