"""How large the gradients of each part of the task are."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.callback import Callback
from trainkit.errors import UserError
from trainkit.optim.optimizer import PhaseOptimizer

if TYPE_CHECKING:
    from trainkit.loops.run import Run

logger = logging.getLogger(__name__)


class GradientNorms(Callback):
    """Adds `gradient_norm/<module>`, the 2-norm of the module's gradients before clipping, and their total.

    They are taken at the last multiple of `every` steps before a log point, and stay on the device until then. Where a
    sharded optimizer leaves no rank with whole gradients, nothing is added.

    Args:
        every: Steps from one measurement to the next; a measurement costs one pass over the gradients.
        depth: Parts of parameters' names that make a module's: 1 for the task's direct sub-modules.

    """

    def __init__(self, *, every: int = 50, depth: int = 1) -> None:
        for name, value in (("every", every), ("depth", depth)):
            if isinstance(value, bool) or value < 1:
                raise UserError(f"gradient_norms.{name} must be at least 1, got {value}.")
        self.every = every
        self.depth = depth
        self._measured: dict[str, tuple[list[str], Tensor]] = {}  # phase -> parameters with a gradient, their norms

    def on_fit_start(self, run: Run) -> None:
        self._measured = {}
        if run.state.step == 0 and self._cannot_see(run):
            logger.warning("gradient_norms adds nothing: under this strategy no rank has whole gradients.")
        names = {id(parameter): name for name, parameter in run.task.named_parameters()}
        for phase_optimizer in run.phase_optimizers:
            phase_optimizer.pre_clip_hooks.append(partial(self._look, run, phase_optimizer, names))

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        measured = self._measured.values()
        mine = {name: value for names, norms in measured for name, value in zip(names, norms.tolist(), strict=True)}
        known: dict[str, float] = {}
        for part in run.strategy.comm.all_gather_object(mine):  # a pipeline's stages have their own parts
            known.update(part)
        squares: dict[str, float] = {}
        for name, norm in known.items():
            module = ".".join(name.split(".")[:-1][: self.depth]) or "(its own)"
            squares[module] = squares.get(module, 0.0) + norm * norm
        for module, square in squares.items():
            metrics[f"gradient_norm/{module}"] = square**0.5
        if squares:
            metrics["gradient_norm/total"] = sum(squares.values()) ** 0.5

    def close(self) -> None:
        self._measured = {}

    def _look(self, run: Run, phase_optimizer: PhaseOptimizer, names: dict[int, str]) -> None:
        if (run.state.step + 1) % self.every:
            return
        having = [parameter for parameter in phase_optimizer.parameters if parameter.grad is not None]
        if having:
            norms = torch._foreach_norm([parameter.grad for parameter in having])
            self._measured[phase_optimizer.phase] = ([names[id(parameter)] for parameter in having], torch.stack(norms))

    def _cannot_see(self, run: Run) -> bool:
        return bool(
            getattr(run.strategy, "shard_optimizer", False) or getattr(run.strategy, "optimizer_in_backward", False)
        )
