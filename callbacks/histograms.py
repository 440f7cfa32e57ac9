"""Histograms of weights and gradients."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial

from trainkit.callback import Callback
from trainkit.duration import Duration, Interval
from trainkit.errors import UserError
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.strategy import check_whole_parameters, has_full_gradients, local_state


class Histograms(Callback):
    """Writes histograms of parameters and their gradients to the loggers that take them (TensorBoard, W&B).

    The gradients are those of the next step, before clipping: they belong to the weights that were written. They are
    omitted under a strategy whose gradients are complete on no rank. Writing waits for the device.

    Args:
        every: Interval between histograms.
        pattern: Pattern of parameter names; `*` matches all.

    """

    def __init__(self, *, every: str | Duration = "1epoch", pattern: str = "*") -> None:
        check_arguments(Histograms.__init__, locals(), of="histograms")
        self.every = Duration.parse(every, where="histograms.every")
        self.pattern = pattern
        self._interval = Interval(self.every)
        self._due_phases: set[str] = set()  # whose next gradients are written

    def on_fit_start(self, run: Run) -> None:
        check_whole_parameters(run.strategy, "histograms")
        self._interval.start(run.state)
        names = {id(parameter): name for name, parameter in run.task.named_parameters()}
        if not any(fnmatchcase(name, self.pattern) for name in names.values()):
            raise UserError(
                f"histograms.pattern={self.pattern!r} matches no parameter. There are: "
                f"{', '.join(list(names.values())[:20])}."
            )
        for phase_optimizer in run.phase_optimizers if has_full_gradients(run.strategy) else []:
            phase_optimizer.pre_clip_hooks.append(partial(self._log_gradients, run, phase_optimizer, names))

    def on_step_end(self, run: Run) -> None:
        if self._interval.due(run.state) and run.loggers:
            for name, tensor in local_state(run.strategy, run.task).items():
                if fnmatchcase(name, self.pattern) and tensor.is_floating_point():
                    run.log_histogram(f"weights/{name}", tensor)
            self._due_phases = {phase_optimizer.phase for phase_optimizer in run.phase_optimizers}

    def _log_gradients(self, run: Run, phase_optimizer: PhaseOptimizer, names: dict[int, str]) -> None:
        if phase_optimizer.phase not in self._due_phases:
            return
        self._due_phases.remove(phase_optimizer.phase)
        for parameter in phase_optimizer.parameters:
            name = names.get(id(parameter), "")
            if parameter.grad is not None and fnmatchcase(name, self.pattern):
                run.log_histogram(f"gradients/{name}", parameter.grad)
