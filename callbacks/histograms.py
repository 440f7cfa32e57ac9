"""How weights are distributed, over time."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from trainkit.callback import Callback
from trainkit.duration import Duration, Interval
from trainkit.errors import UserError
from trainkit.strategy import local_state

if TYPE_CHECKING:
    from trainkit.loops.run import Run
    from trainkit.optim.optimizer import PhaseOptimizer


class Histograms(Callback):
    """Writes a histogram of each parameter to the loggers that take them (TensorBoard, W&B), and one of its gradient.

    Gradients are those of the step after, taken at the weights that were written and before they are clipped; there are
    none where a sharded optimizer leaves no rank with whole gradients. Writing waits for the device.

    Args:
        every: From one time to the next.
        pattern: Of parameters' names; `*` fits all.

    """

    def __init__(self, *, every: str | Duration = "1epoch", pattern: str = "*") -> None:
        self.every = Duration.parse(every, where="histograms.every")
        self.pattern = pattern
        self._interval = Interval(self.every)
        self._wanted: set[str] = set()  # phases whose next gradients are written

    def on_fit_start(self, run: Run) -> None:
        self._interval.start(run.state)
        names = {id(parameter): name for name, parameter in run.task.named_parameters()}
        if not any(fnmatchcase(name, self.pattern) for name in names.values()):
            raise UserError(
                f"histograms.pattern={self.pattern!r} fits no parameter; there are "
                f"{', '.join(list(names.values())[:20])}."
            )
        in_parts = any(getattr(run.strategy, name, False) for name in ("shard_optimizer", "optimizer_in_backward"))
        for phase_optimizer in [] if in_parts else run.phase_optimizers:
            phase_optimizer.pre_clip_hooks.append(partial(self._look, run, phase_optimizer, names))

    def on_step_end(self, run: Run) -> None:
        if self._interval.due(run.state) and run.loggers:
            for name, tensor in local_state(run.strategy, run.task).items():
                if fnmatchcase(name, self.pattern) and tensor.is_floating_point():
                    run.log_histogram(f"weights/{name}", tensor)
            self._wanted = {phase_optimizer.phase for phase_optimizer in run.phase_optimizers}

    def _look(self, run: Run, phase_optimizer: PhaseOptimizer, names: dict[int, str]) -> None:
        if phase_optimizer.phase not in self._wanted:
            return
        self._wanted.remove(phase_optimizer.phase)
        for parameter in phase_optimizer.parameters:
            name = names.get(id(parameter), "")
            if parameter.grad is not None and fnmatchcase(name, self.pattern):
                run.log_histogram(f"gradients/{name}", parameter.grad)
