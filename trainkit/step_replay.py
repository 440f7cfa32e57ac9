"""Computing a step again, to know what in it is not finite first; everything is as it was afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.before_step import BeforeStep
from trainkit.memory import recut
from trainkit.nonfinite import ModuleWatch, nonfinite_gradient
from trainkit.optimization import Optimization
from trainkit.run import Run
from trainkit.strategy import SupportsPhases, metric_modules, uses_auto_micro_batch
from trainkit.window import Window


class Call(NamedTuple):
    """One forward and backward of a step, as it was made."""

    window: Window
    step_name: str
    generators: Mapping[str, Tensor] | None = None
    """Of torch when it began; `None`: as they are now."""


class Finding(NamedTuple):
    """What this rank has found that is not finite: the output of a module, or else a gradient."""

    module: str | None = None
    parameter: str | None = None


class StepReplay:
    """Looks at steps on all ranks together; each method is collective."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def sees_modules(self) -> bool:
        """Whether the strategy calls the modules of the task, so that there is something to see."""
        return self._run.strategy.supports_module_hooks

    def look(self, optimization: Optimization, calls: Sequence[Call], *, instead: bool = False) -> Finding:
        """Return what is not finite first in forwards and backwards of one phase, with the weights as they are now.

        `instead` of the step itself, what it draws of the run's random numbers stays drawn, as if it had been made.
        """
        run, strategy = self._run, self._run.strategy
        if not self.sees_modules:
            return Finding()
        before = BeforeStep(run.task, metric_modules(strategy, run.task), counters=True)
        try:
            with _eagerly(run.task), ModuleWatch(run.task).open() as watch:
                for call in calls:
                    _set_generators(call.generators)
                    if optimization.phase and isinstance(strategy, SupportsPhases):
                        strategy.begin_phase(optimization, step_name=call.step_name)
                    window = (
                        recut(call.window, strategy.micro_batch_size)
                        if uses_auto_micro_batch(strategy)
                        else call.window
                    )
                    strategy.forward_backward(run.task, window)
            return Finding(watch.found, _nonfinite_gradient(optimization, run.task))
        finally:
            optimization.zero_grad()
            before.put_back_state() if instead else before.put_back()

    def look_at_phases(self, train: Callable[[Window], object], window: Window) -> Finding:
        """Return what is not finite first in a step of several phases, of which each sees what those before it leave.

        `train` makes the whole step, of which nothing is kept but that it has drawn its random numbers.
        """
        run = self._run
        seen: list[str] = []

        def look() -> None:
            found = None if seen else nonfinite_gradient(run.task)
            if found is not None:
                seen.append(found)

        with self._all_put_back(), _eagerly(run.task), ModuleWatch(run.task).open() as watch:
            for optimization in run.optimizations:
                optimization.looks.append(look)
            try:
                train(window)
            finally:
                for optimization in run.optimizations:
                    optimization.looks.remove(look)
        return Finding(watch.found, seen[0] if seen else None)

    @contextmanager
    def _all_put_back(self) -> Iterator[None]:
        """Leave parameters, optimizers and schedules as they were too; a copy of each is in memory meanwhile."""
        run, task, strategy = self._run, self._run.task, self._run.strategy
        before = BeforeStep(task, metric_modules(strategy, task), counters=True)
        parameters = [parameter.detach().clone() for parameter in task.parameters()]
        states = [copy.deepcopy(part.optimizer.state_dict()) for part in run.optimizations]
        schedules = [copy.deepcopy(part.schedule_state()) for part in run.optimizations]
        spikes = [None if part.spikes is None else part.spikes.state_dict() for part in run.optimizations]
        skipped = [part.skipped_steps for part in run.optimizations]
        scaler = copy.deepcopy(run.precision.state_dict())
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(task.parameters(), parameters, strict=True):
                    parameter.copy_(value)
            kept = zip(run.optimizations, states, schedules, spikes, skipped, strict=True)
            for part, state, schedule, spike, count in kept:
                part.zero_grad()
                strategy.load_optimizer_state_dict(task, part, state)
                part.load_schedule_state(schedule)
                if part.spikes is not None and spike is not None:
                    part.spikes.load_state_dict(spike)
                part.skipped_steps = count
            run.precision.load_state_dict(scaler)
            before.put_back_state()


def generators_of(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's generators that a step draws from; waits for nothing."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def in_words(found: Sequence[Finding]) -> str:
    """Return what is not finite first, from what each rank has found; nothing if no rank has."""
    module = next((finding.module for finding in found if finding.module is not None), None)
    if module is not None:
        return f"the first output that is not finite is that of {module}"
    parameter = next((finding.parameter for finding in found if finding.parameter is not None), None)
    return "" if parameter is None else f"every module's output is finite, but not the gradient of {parameter}"


def _set_generators(states: Mapping[str, Tensor] | None) -> None:
    if states is None:
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _nonfinite_gradient(optimization: Optimization, task: nn.Module) -> str | None:
    """Return the first parameter of a phase whose gradient is not finite; other phases may have theirs in place."""
    own = {id(parameter) for parameter in optimization.parameters}
    return nonfinite_gradient(task, among=own)


def _eagerly(task: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which compiled modules call their parts one by one: others do not tell of these."""
    if any(module._compiled_call_impl is not None for module in task.modules()):
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()
