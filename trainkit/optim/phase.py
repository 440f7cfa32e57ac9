"""Phase: one of several optimizers of a task, and the checks of those that a task declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Unit

from trainkit.errors import UserError, nearest
from trainkit.settings import check_arguments
from trainkit.task import OptimizerSpec, TaskModule

GradientLimit = Annotated[float, Gt(0), "None disables it"]
"""The largest norm or value of a gradient."""


@dataclass(frozen=True)
class Phase:
    """One of several optimizers of a task: a loss and the parameters that it trains.

        def configure_phases(self):
            return [
                Phase("discriminator", Adam(self.discriminator.parameters())),   # calls discriminator_step(batch)
                Phase("generator", Adam(self.generator.parameters()), every=2),  # calls generator_step(batch)
            ]

    The phases of a step see the same global batch, one after the other. During a phase only its parameters require a
    gradient.

    Args:
        name: Prefix of the phase's metrics: `train/<name>/loss`.
        optimizer: The phase's optimizer, or `(optimizer, schedule)`; the phase trains its parameters.
        step: The task's method that returns the loss; by default `<name>_step`.
        every: Run the phase every this many steps, from the first on.
        max_grad_norm: Clip the phase's gradient to this global norm; by default the trainer's.
        max_grad_value: Clip each element of the phase's gradient to this absolute value.

    """

    name: str
    optimizer: OptimizerSpec
    step: str | None = None
    every: Annotated[int, Ge(1), Unit("steps")] = 1
    max_grad_norm: GradientLimit | None = None
    max_grad_value: GradientLimit | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise UserError(f"Phase({self.name!r}): a name has letters, digits and underscores, such as 'generator'.")
        check_arguments(Phase, vars(self), of=f"Phase({self.name!r})")

    @property
    def step_name(self) -> str:
        """The task's method that returns the loss."""
        return self.step or f"{self.name}_step"


def check_phases(phases: object, task: TaskModule) -> list[Phase]:
    """Return the phases that a task declares; raises UserError for invalid ones."""
    where = f"{type(task).__name__}.configure_phases"
    if not isinstance(phases, (list, tuple)) or not phases or not all(isinstance(phase, Phase) for phase in phases):
        raise UserError(f"{where} returned {phases!r}; return a list of trainkit.Phase(name, optimizer).")
    names = [phase.name for phase in phases]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UserError(f"{where} returned two phases called {repeated!r}; names must be unique.")
    for phase in phases:
        if not task.manual and not callable(getattr(task, phase.step_name, None)):
            raise UserError(
                f"{where} declares the phase {phase.name!r}, but the method {phase.step_name} is missing."
                f"{nearest(phase.step_name, dir(task))} Define {phase.step_name}(self, batch), which returns the loss."
            )
    return list(phases)
