"""Several optimizers in one step: named phases, in a fixed order or driven by the task itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.errors import UserError, nearest
from trainkit.step_output import StepOutput
from trainkit.window import Window

if TYPE_CHECKING:
    from trainkit.left_out import LeftOutSteps
    from trainkit.optimization import Optimization, OptimizerSpec
    from trainkit.run import Run
    from trainkit.step_watch import StepWatch
    from trainkit.strategy import Strategy
    from trainkit.task import TaskModule


@dataclass(frozen=True)
class Phase:
    """One part of a step: a loss of its own that trains parameters of its own.

        def configure_phases(self):
            return [
                Phase("discriminator", Adam(self.discriminator.parameters())),   # calls discriminator_step(batch)
                Phase("generator", Adam(self.generator.parameters()), every=2),  # calls generator_step(batch)
            ]

    The phases of a step see the same global batch, one after the other. While one is on, no other parameters require
    a gradient, so none is computed for them.

    Args:
        name: What metrics of the phase are logged under: `train/<name>/loss`.
        optimizer: The phase's optimizer, or `(optimizer, schedule)`; its parameters are those that the phase trains.
        step: The task's method that returns the loss; `<name>_step` unless given.
        every: The phase takes part in every so many steps, from the first on.
        clip_norm: Largest global norm of the phase's gradient; the trainer's unless given.
        clip_value: Largest absolute value of an element of it.

    """

    name: str
    optimizer: OptimizerSpec
    step: str | None = None
    every: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise UserError(f"Phase({self.name!r}): a name has letters, digits and underscores, such as 'generator'.")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise UserError(f"Phase({self.name!r}, every={self.every!r}): give a whole number of steps, at least 1.")

    @property
    def step_name(self) -> str:
        """The task's method that returns the loss."""
        return self.step or f"{self.name}_step"


class PhaseControl:
    """What a task with `manual = True` drives its steps with; each method is collective.

    The micro-batches of a step, their weights, the precision and the reduction over ranks are taken care of:

        def manual_step(self, control):
            for _ in range(5):
                control.backward("critic")
                control.step("critic")
            control.backward("actor")
            control.step("actor")
    """

    def __init__(self, task: TaskModule, strategy: Strategy, optimizations: Sequence[Optimization]) -> None:
        from trainkit.strategy import SupportsPhases

        self.outputs: list[StepOutput] = []
        """What the phases of this step returned, their metrics under `<phase>/<name>`."""
        self.norms: dict[str, Tensor] = {}
        """The norm of each phase's gradient in its last step, where it was needed."""
        self.num_steps = 0
        """Optimizer steps of the whole task before this one."""
        self.left_out: LeftOutSteps | None = None
        """Where steps may be left out."""
        self._task = task
        assert isinstance(strategy, SupportsPhases)  # checked before any rank was started
        self._begin_phase = strategy.begin_phase
        self._forward_backward: Callable[[TaskModule, Window], list[StepOutput]] = strategy.forward_backward
        self._optimizer_step: Callable[[Optimization], Tensor | None] = strategy.optimizer_step
        self._optimizations = {optimization.phase: optimization for optimization in optimizations}
        self._window = Window([], 0, 0, False)

    def measure(self, watch: StepWatch) -> None:
        """Let the time of backwards and steps be counted from now on."""
        self._forward_backward = watch.forward_backward(self._forward_backward)
        self._optimizer_step = watch.optimizer_step(self._optimizer_step)

    def begin(self, window: Window, *, num_steps: int) -> None:
        """Turn to the global batch of the next step."""
        self._window, self.num_steps, self.outputs = window, num_steps, []

    def backward(self, phase: str, *, step: str | None = None) -> Mapping[str, float | Tensor]:
        """Leave in the phase's parameters the gradient of its mean loss over the global batch.

        `step` names another method of the task that returns the loss. Returns the loss and metrics of this rank's
        last micro-batch, which are tensors on the device: nothing waits for them. Called twice without a `step`
        between, the second gradient is added to the first.
        """
        optimization = self._find(phase)
        self._begin_phase(optimization, step_name=step or optimization.step_name)
        if self.left_out is not None:
            self.left_out.keep(phase, self._window, step or optimization.step_name)
        outputs = self._forward_backward(self._task, self._window)
        self.outputs += [_named(output, phase) for output in outputs]
        last = outputs[-1] if outputs else None
        return {} if last is None or last.loss is None else {"loss": last.loss, **last.metrics}

    def step(self, phase: str) -> None:
        """Unscale and clip the phase's gradient, update its parameters, drop the gradient, step its schedules."""
        optimization = self._find(phase)
        norm = self._optimizer_step(optimization)
        if self.left_out is not None:
            self.left_out.put_back(optimization)
        optimization.after_step()
        if norm is not None:
            self.norms[phase] = norm

    def due(self, phase: str) -> bool:
        """Return whether the phase takes part in this step, by its `every`."""
        return self.num_steps % self._find(phase).every == 0

    def _find(self, phase: str) -> Optimization:
        optimization = self._optimizations.get(phase)
        if optimization is None:
            known = list(self._optimizations)
            raise UserError(
                f"{type(self._task).__name__} has no phase {phase!r}.{nearest(phase, known)} "
                f"configure_phases declares {', '.join(known)}."
            )
        return optimization


class Phases:
    """Drives the phases of each step."""

    def __init__(self, run: Run, optimizations: Sequence[Optimization]) -> None:
        self.control = PhaseControl(run.task, run.strategy, optimizations)
        self._task, self._state = run.task, run.state
        self._names = [optimization.phase for optimization in optimizations]

    def train(self, window: Window) -> list[StepOutput]:
        """Make one step of all phases that take part in it, and return what they returned; collective."""
        control = self.control
        control.begin(window, num_steps=self._state.step)
        if self._task.manual:
            self._task.manual_step(control)
        else:
            for name in self._names:
                if control.due(name):
                    control.backward(name)
                    control.step(name)
        return control.outputs


def check_phases_run(task: TaskModule, strategy: Strategy) -> None:
    """Raise UserError for a task with phases on a strategy that cannot train these."""
    from trainkit.strategy import SupportsPhases

    if not has_phases(task):
        return
    if not isinstance(strategy, SupportsPhases):
        name = type(strategy).__name__
        raise UserError(
            f"{type(task).__name__} has phases, which {name} cannot train: each has a step and optimizer of its own, "
            f"and {name} prepares one of each. Type strategy=ddp, strategy=dp, strategy=pipeline or strategy=single."
        )
    strategy.check_phases(task)


def has_phases(task: TaskModule) -> bool:
    """Return whether a task is trained in phases; raises UserError for `manual` without any."""
    from trainkit.task import TaskModule

    declared = type(task).configure_phases is not TaskModule.configure_phases
    if task.manual and not declared:
        raise UserError(
            f"{type(task).__name__} has manual = True, which needs named optimizers; define configure_phases(self): "
            "return [Phase('model', torch.optim.AdamW(self.parameters()))]."
        )
    return declared


def check_phases(phases: object, task: TaskModule) -> list[Phase]:
    """Return the phases that a task declares; raises UserError for what cannot be driven."""
    where = f"{type(task).__name__}.configure_phases"
    if not isinstance(phases, (list, tuple)) or not phases or not all(isinstance(phase, Phase) for phase in phases):
        raise UserError(f"{where} returned {phases!r}; return a list of trainkit.Phase(name, optimizer).")
    names = [phase.name for phase in phases]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UserError(f"{where} returned two phases called {repeated!r}; names tell them apart.")
    for phase in phases:
        if not task.manual and not callable(getattr(task, phase.step_name, None)):
            raise UserError(
                f"{where} declares the phase {phase.name!r}, and there is no method {phase.step_name}."
                f"{nearest(phase.step_name, dir(task))} Define {phase.step_name}(self, batch), which returns the loss."
            )
    return list(phases)


def check_disjoint(optimizations: Sequence[Optimization], task: TaskModule) -> None:
    """Raise UserError if a parameter is trained by two phases."""
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    owner: dict[int, str] = {}
    for optimization in optimizations:
        for parameter in optimization.parameters:
            first = owner.setdefault(id(parameter), optimization.phase)
            if first != optimization.phase:
                raise UserError(
                    f"the parameter {names.get(id(parameter), '?')} is trained by the phases {first!r} and "
                    f"{optimization.phase!r} of {type(task).__name__}; a parameter belongs to one. "
                    "Add up the losses in one phase to train shared layers."
                )


def by_phase(states: Sequence[Any], optimizations: Sequence[Optimization]) -> Any:
    """Return the state of the one optimizer of a task without phases, else the states by the names of the phases."""
    if optimizations[0].phase == "":
        return states[0]
    return {part.phase: state for part, state in zip(optimizations, states, strict=True)}


def saved_by_phase(
    optimizers: Any, schedules: Any, optimizations: Sequence[Optimization], *, where: str
) -> list[tuple[Any, Any]]:
    """Return each optimization's saved state and schedules; raises UserError if those are of other phases."""
    names = [part.phase for part in optimizations]
    saved = [""] if "param_groups" in optimizers else list(optimizers)
    if sorted(saved) != sorted(names):
        raise UserError(f"{where} was saved {_described(saved)}, and this task is trained {_described(names)}.")
    return [(optimizers, schedules)] if saved == [""] else [(optimizers[name], schedules[name]) for name in names]


def _described(phases: list[str]) -> str:
    return "without phases" if phases == [""] else f"with the phases {', '.join(phases)}"


def _named(output: StepOutput, phase: str) -> StepOutput:
    """Return a phase's output with its metrics, and its loss as one of them, under the phase's name."""
    metrics = {f"{phase}/{name}": value for name, value in output.metrics.items()}
    if output.loss is not None:
        metrics[f"{phase}/loss"] = output.loss
    objects = [counted._replace(name=f"{phase}/{counted.name}") for counted in output.objects]
    return StepOutput(output.loss, output.weight, metrics, own_weight=output.own_weight, objects=objects)
