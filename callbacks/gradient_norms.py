"""Gradient norms of the sub-modules."""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import Annotated

import torch
from annotated_types import Ge, Unit
from torch import Tensor

from trainkit.callback import Callback
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.strategy import check_whole_parameters, has_full_gradients

logger = logging.getLogger(__name__)


class GradientNorms(Callback):
    """Adds `grad_norm/<module>`, the 2-norm of the module's gradients before clipping, and their total.

    Norms are measured at the last multiple of `every` steps before a log point, and stay on the device until then.
    Nothing is added under a strategy whose gradients are complete on no rank, such as with a sharded optimizer.

    Args:
        every: Steps between measurements; a measurement costs one pass over the gradients.
        depth: Depth of the modules: 1 for the task's direct sub-modules.

    """

    def __init__(self, *, every: Annotated[int, Ge(1), Unit("steps")] = 50, depth: Annotated[int, Ge(1)] = 1) -> None:
        check_arguments(GradientNorms.__init__, locals(), of="gradient_norms")
        self.every = every
        self.depth = depth
        self._measured: dict[str, tuple[list[str], Tensor]] = {}  # phase -> parameters with a gradient, their norms

    def on_fit_start(self, run: Run) -> None:
        self._measured = {}
        check_whole_parameters(run.strategy, "gradient_norms")
        if run.state.step == 0 and not has_full_gradients(run.strategy):
            logger.warning("gradient_norms adds nothing: under this strategy gradients are complete on no rank.")
        names = {id(parameter): name for name, parameter in run.task.named_parameters()}
        for phase_optimizer in run.phase_optimizers:
            phase_optimizer.pre_clip_hooks.append(partial(self._measure, run, phase_optimizer, names))

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        measured: dict[str, float] = {}
        for names, values in self._measured.values():
            measured.update(zip(names, values.tolist(), strict=True))
        norms: dict[str, float] = {}
        # Collective: on_log runs on every rank after the same step.
        for of_rank in run.strategy.comm.all_gather_object(measured):  # stages of a pipeline measure different ones
            norms.update(of_rank)
        squares: dict[str, float] = defaultdict(float)
        for name, norm in norms.items():
            squares[".".join(name.split(".")[:-1][: self.depth]) or "(its own)"] += norm * norm
        for module, square in squares.items():
            metrics[f"grad_norm/{module}"] = square**0.5
        if squares:
            metrics["grad_norm/total"] = sum(squares.values()) ** 0.5

    def close(self) -> None:
        self._measured = {}

    def _measure(self, run: Run, phase_optimizer: PhaseOptimizer, names: dict[int, str]) -> None:
        if (run.state.step + 1) % self.every:
            return
        used = [
            (names.get(id(parameter), "added"), parameter.grad)
            for parameter in phase_optimizer.parameters
            if parameter.grad is not None
        ]
        if used:
            # Private: one kernel for all norms; torch has no public function for the norm of each tensor of a list.
            norms = torch._foreach_norm([gradient for _, gradient in used])
            self._measured[phase_optimizer.phase] = ([name for name, _ in used], torch.stack(norms))
