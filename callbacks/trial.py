"""Steps that are tried and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.errors import UserError
from trainkit.phases import PhaseControl
from trainkit.rng import rng_untouched
from trainkit.strategy import SupportsPhases, local_state

if TYPE_CHECKING:
    from trainkit.run import Run
    from trainkit.step_output import StepOutput
    from trainkit.window import Window


@contextmanager
def trial(run: Run, *, who: str) -> Iterator[None]:
    """Leave weights, buffers, optimizers, averages of norms, the scaler and random generators as they were before.

    Raises UserError where a part of them cannot be put back: in optimizers that a strategy keeps in parts.
    """
    for setting in ("shard_optimizer", "overlap_optimizer"):
        if getattr(run.strategy, setting, False):
            raise UserError(
                f"{who} puts the optimizer back as it was, which strategy.{setting}=true does not allow; set it to "
                "false while you look (weights are the same under every strategy)."
            )
    held = {name: tensor.detach().clone() for name, tensor in local_state(run.strategy, run.task).items()}
    groups = [[_settings(group) for group in one.optimizer.param_groups] for one in run.optimizations]
    states = [
        {parameter: _copy(state) for parameter, state in one.optimizer.state.items()} for one in run.optimizations
    ]
    spikes = [None if one.spikes is None else one.spikes.state_dict() for one in run.optimizations]
    skipped = [one.skipped_steps for one in run.optimizations]
    scaler = run.precision.state_dict()
    try:
        with rng_untouched():
            yield
    finally:
        with torch.no_grad():
            for name, tensor in local_state(run.strategy, run.task).items():
                tensor.copy_(held[name])
        for one, own_groups, own_states in zip(run.optimizations, groups, states, strict=True):
            one.optimizer.state.clear()
            one.optimizer.state.update(own_states)
            for group, settings in zip(one.optimizer.param_groups, own_groups, strict=True):
                group.update(settings)
            one.zero_grad()
        for one, own_spikes, own_skipped in zip(run.optimizations, spikes, skipped, strict=True):
            if one.spikes is not None and own_spikes is not None:
                one.spikes.load_state_dict(own_spikes)
            one.skipped_steps = own_skipped
        run.precision.load_state_dict(scaler)
        if run.optimizations[0].phase:
            assert isinstance(run.strategy, SupportsPhases)
            run.strategy.end_phases()


class TriedPhases(PhaseControl):
    """Makes the steps of a task with phases, but leaves schedules where they are."""

    def make_step(self, run: Run, window: Window, *, number: int) -> list[StepOutput]:
        """Return what the phases returned that take part in the step of this number; collective."""
        self.begin(window, num_steps=number)
        if run.task.manual:
            run.task.manual_step(self)
        else:
            for optimization in run.optimizations:
                if self.due(optimization.phase):
                    self.backward(optimization.phase)
                    self.step(optimization.phase)
        return self.outputs

    def step(self, phase: str) -> None:
        """Update the phase's parameters alone."""
        self._optimizer_step(self._find(phase))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) for name, value in group.items() if name != "params"}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return {name: _copy(part) for name, part in value.items()} if isinstance(value, dict) else value
