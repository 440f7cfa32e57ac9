"""One optimizer step, and its phases: in a fixed order, or driven by the task's `manual_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainkit.data.batch import StepBatch
from trainkit.errors import UserError, nearest
from trainkit.metrics.step_output import StepOutput
from trainkit.state import TrainState
from trainkit.task import TaskModule


@dataclass(frozen=True)
class PhaseStep:
    """Forward, backward and update of one optimizer; each call is collective."""

    phase: str
    """Empty for the one optimizer of a task without phases."""
    every: int
    """The phase runs every this many steps."""
    begin: Callable[[str | None], None]
    """Makes the phase the one that is trained, by this method of the task or the default one."""
    forward_backward: Callable[[StepBatch], list[StepOutput]]
    """Adds the gradients of a step batch."""
    update: Callable[[], Tensor | None]
    """Clips, updates the parameters and drops the gradients; returns their norm if it was needed."""
    step_schedules: Callable[[], None]


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step in two calls; both are collective."""

    begin: Callable[[StepBatch], list[StepOutput]]
    """Computes a step batch and returns the outputs of this rank's micro-batches."""
    finish: Callable[[], None]
    """Makes the remaining updates."""
    grad_norms: Mapping[str, Tensor]
    """The norm of each phase's last gradient, if it was needed."""


class PhaseControl:
    """The argument of `manual_step`: drives the phases of a step. Each method is collective.

    Micro-batches, their weights, precision and the reduction over ranks are those of any other step:

        def manual_step(self, control):
            for _ in range(5):
                control.backward("critic")
                control.step("critic")
            control.backward("actor")
            control.step("actor")
    """

    def __init__(self, phases: Sequence[PhaseStep]) -> None:
        self.outputs: list[StepOutput] = []
        """The outputs of the phases of this step, with metrics named `<phase>/<name>`."""
        self.norms: dict[str, Tensor] = {}
        """The norm of each phase's gradient in its last step, if it was needed."""
        self.num_steps = 0
        """Optimizer steps of the whole task before this one."""
        self._phases = {phase.phase: phase for phase in phases}
        self.batch = StepBatch([], 0, 0, False)
        """The micro-batches of this rank in this step, on its device."""

    def begin(self, batch: StepBatch, *, num_steps: int) -> None:
        """Start the next step."""
        self.batch, self.num_steps, self.outputs = batch, num_steps, []

    def backward(self, phase: str, *, step: str | None = None) -> Mapping[str, float | Tensor]:
        """Add to the phase's parameters the gradient of its mean loss over the global batch.

        `step` names another method of the task that returns the loss. Returns the loss and metrics of this rank's last
        micro-batch, as tensors on the device that nothing waits for. Gradients accumulate until `step`.
        """
        current = self._find(phase)
        # Before each backward, also of the same phase: another one may have been trained in between.
        current.begin(step)
        outputs = current.forward_backward(self.batch)
        for output in outputs:
            metrics = {f"{phase}/{name}": value for name, value in output.metrics.items()}
            if output.loss is not None:
                metrics[f"{phase}/loss"] = output.loss
            # Names of several phases would collide in the means: each phase has a loss.
            objects = [counted._replace(name=f"{phase}/{counted.name}") for counted in output.objects]
            named = StepOutput(output.loss, output.weight, metrics, own_weight=output.own_weight, objects=objects)
            self.outputs.append(named)
        last = outputs[-1] if outputs else None  # a rank without samples has no outputs
        return {} if last is None or last.loss is None else {"loss": last.loss, **last.metrics}

    def step(self, phase: str) -> None:
        """Unscale and clip the phase's gradient, update its parameters, drop the gradient, step its schedules."""
        current = self._find(phase)
        norm = current.update()
        current.step_schedules()
        if norm is not None:
            self.norms[phase] = norm  # kept on the device; the loop reads it when it logs

    def due(self, phase: str) -> bool:
        """Return True if the phase runs in this step, by its `every`."""
        return self.num_steps % self._find(phase).every == 0

    def run_due_phases(self) -> None:
        """Make the backward and step of each phase that runs in this step, in order."""
        for phase in self._phases:
            if self.due(phase):
                self.backward(phase)
                self.step(phase)

    def _find(self, phase: str) -> PhaseStep:
        phase_step = self._phases.get(phase)
        if phase_step is None:
            hint = nearest(phase, self._phases)
            raise UserError(f"unknown phase {phase!r}.{hint} configure_phases declares {', '.join(self._phases)}.")
        return phase_step


def phased_step(task: TaskModule, state: TrainState, phases: Sequence[PhaseStep]) -> TrainStep:
    """Return the step of a task with several optimizers: `begin` updates each of them before the next phase begins."""
    control = PhaseControl(phases)

    def begin(batch: StepBatch) -> list[StepOutput]:
        control.begin(batch, num_steps=state.step)
        if task.manual:
            task.manual_step(control)
        else:
            control.run_due_phases()
        return control.outputs

    # Nothing remains for `finish`: each phase was updated before the next one began, as a GAN needs it.
    return TrainStep(begin, lambda: None, control.norms)
