"""The control flow of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trainkit.duration import Duration, Interval
from trainkit.errors import NonFiniteLoss, UserError
from trainkit.evaluation import EvalLoop
from trainkit.feed import Feed
from trainkit.metrics import WeightedMeans
from trainkit.phases import Phases
from trainkit.run import Run
from trainkit.window import Window

_SAMPLES_SHOWN = 20
Policy = Literal["raise", "skip", "stop"]


@dataclass(frozen=True)
class FitSchedule:
    """When training logs, evaluates and ends."""

    max_duration: Sequence[Duration]
    """Training ends with the first of them that is reached."""
    log_every: Duration
    evaluate_every: Duration | None


class FitLoop:
    """Drives training: one window of micro-batches is one optimizer step."""

    def __init__(self, run: Run, schedule: FitSchedule, *, validation: EvalLoop | None, on_nonfinite: Policy) -> None:
        assert run.feed is not None and run.optimization is not None
        phased = run.optimization.phase != ""
        self._phases = Phases(run.task, run.strategy, run.optimizations) if phased else None
        self._run = run
        self._feed: Feed = run.feed
        self._optimizations = run.optimizations
        self._max_duration = schedule.max_duration
        self._log_interval = Interval(schedule.log_every)
        self._evaluation_interval = Interval(schedule.evaluate_every if validation is not None else None)
        self._validation = validation
        self._on_nonfinite = on_nonfinite
        self._means = run.means = WeightedMeans(run.strategy.device)
        self._weights_are_sound = True
        self._stop_is_agreed = False  # since an evaluation was broken off on all ranks
        self._norm: torch.Tensor | None = None  # of the last step's gradients

    def run(self) -> None:
        """Train until a duration is reached or a stop is asked for; leaves why in `run.stop_reason`."""
        run, state, strategy, task = self._run, self._run.state, self._run.strategy, self._run.task
        optimization, phases = self._optimizations[0], self._phases
        means, on_step_end = self._means, run.hooks("on_step_end")
        self._start()
        while not self._finished():
            run.emit("on_epoch_start")
            first_step = state.step
            for window in self._windows():
                if phases is None:
                    outputs = strategy.forward_backward(task, window)
                    self._norm = strategy.optimizer_step(optimization)
                    optimization.after_step()
                else:
                    outputs = phases.train(window, num_steps=state.step)
                self._advance(window)
                means.add(outputs, step=state.step)
                if self._log_interval.due(state):
                    self._log()
                if self._evaluation_interval.due(state):
                    self._evaluate()
                for hook in on_step_end:
                    hook(run)
                if window.ends_epoch:
                    run.emit("on_epoch_end")
                if self._finished():
                    break
            if state.step == first_step:
                raise UserError(self._nothing_to_train_on())
        if self._check_finite():
            self._log()
        run.emit("on_fit_end")

    def _start(self) -> None:
        """Leave the task ready for its first step, and make up for an evaluation that a stop broke off."""
        run = self._run
        run.task.train()
        run.task.zero_grad(set_to_none=True)
        run.state.start_clock()
        run.may_save = self._check_finite
        for interval in (self._log_interval, self._evaluation_interval):
            interval.start(run.state)
        if any(duration.unit in ("second", "minute", "hour") for duration in self._max_duration):
            run.state.clock_is_watched = True
        run.emit("on_fit_start")
        if run.state.evaluation_due and self._validation is not None:
            self._evaluate()

    def _windows(self) -> Iterator[Window]:
        run, state = self._run, self._run.state
        return run.strategy.windows(self._feed.windows(state.epoch, state.position), self._feed.source)

    def _advance(self, window: Window) -> None:
        """Count the step, by a clock that all ranks agree on, and what follows from the end of an epoch."""
        state = self._run.state
        state.advance(items=window.num_items, samples=window.num_samples, ends_epoch=window.ends_epoch)
        if state.clock_is_watched:
            state.set_clock(self._run.strategy.broadcast_object(state.own_seconds))
        if window.ends_epoch:
            for optimization in self._optimizations:
                optimization.after_epoch()

    def _finished(self) -> bool:
        """Return whether this was the last step; the same on every rank."""
        run, state = self._run, self._run.state
        for duration in self._max_duration:
            if duration.reached(state):
                run.request_stop(f"reached max_duration={duration}")
                return True
        asked = run.signals.received is not None or run.stop_reason is not None
        if not self._stop_is_agreed and not run.strategy.agree_to_stop(asked):
            return False
        if run.agree_on_signal() and run.stopped_by is not None:
            run.stop_reason = run.stopped_by.name
        run.request_stop("another rank was asked to stop")
        return True

    def _nothing_to_train_on(self) -> str:
        state = self._run.state
        return (
            f"there is nothing to train on from position {state.position} of epoch {state.epoch}, which has "
            f"{'too few' if state.epoch_length is None else state.epoch_length} items now. Resume with the data and "
            "limits that the run began with, set a smaller batch_size, or drop_last=False."
        )

    def _log(self) -> None:
        """Write the means since the last time; the only place of training that waits for the device."""
        run = self._run
        first_bad = self._means.first_nonfinite_step()
        means = self._means.reduce(run.strategy)
        if not means:
            return
        if not self._means.loss_was_finite:
            self._handle_nonfinite(first_bad)
        metrics = {f"train/{name}": value for name, value in means.items()}
        metrics["train/epoch"] = run.state.epochs
        if self._norm is not None:
            metrics["train/gradient_norm"] = float(self._norm)
        if self._phases is not None:
            del metrics["train/loss"]  # of all phases together, which means nothing
            metrics.update(
                {f"train/{name}/gradient_norm": float(norm) for name, norm in self._phases.control.norms.items()}
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
        self._check_finite()
        metrics = self._validation.run()
        run.task.train()
        self._stop_is_agreed = metrics is None
        if metrics is not None:
            run.state.evaluation_due = False
            for optimization in self._optimizations:
                optimization.after_validation(metrics)
            run.emit("on_evaluation_end", "validation", metrics)

    def _check_finite(self) -> bool:
        """Apply the policy to losses that were not logged yet, and return whether the weights may be saved."""
        first_bad = self._means.first_nonfinite_step()
        if self._run.strategy.agree(first_bad is not None):
            self._handle_nonfinite(first_bad)
        return self._weights_are_sound

    def _handle_nonfinite(self, step: int | None) -> None:
        """Raise or stop as the policy says; a skipped step has changed nothing, and nothing is left to do."""
        if self._on_nonfinite == "raise":
            raise NonFiniteLoss(
                f"the loss became NaN or infinite {self._place_of_nonfinite(step)}. Lower the learning rate, set "
                "trainer.clip_norm=1.0, or look for the operation with trainer.detect_anomaly=true; "
                "trainer.on_nonfinite=skip leaves such steps out."
            )
        if self._on_nonfinite == "stop":
            self._weights_are_sound = False
            where = f"at step {step}" if step is not None else "on another rank"
            self._run.request_stop(f"the loss became NaN or infinite {where}")

    def _place_of_nonfinite(self, step: int | None) -> str:
        """Return in words where the first loss that is not finite came from; collective, the same on every rank."""
        run = self._run
        own = None if step is None else (step, run.strategy.rank, self._feed.samples_of(step, run.state))
        places = run.strategy.all_gather_object(own)
        found = [place for place in places if place is not None]
        if not found:  # it was logged already, and on no rank since
            return f"before step {run.state.step}"
        first, rank, samples = min(found)
        on_rank = f" on rank {rank}" if len(places) > 1 else ""
        shown = ", ".join(map(str, samples[:_SAMPLES_SHOWN])) + ", ..." * (len(samples) > _SAMPLES_SHOWN)
        return f"at step {first}{on_rank}" + (f" (samples {shown})" if samples else "")
