"""UndoableStep: a step that a survivor takes back after the loss of another rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainkit.data.batch import StepBatch
from trainkit.loops.rollback import nonfinite_state
from trainkit.metrics.step_output import StepOutput
from trainkit.metrics.sync import preserve_state, restore
from trainkit.model.carried_state import is_looked_at
from trainkit.phases import PhaseStep
from trainkit.run import Run, UnsavedState
from trainkit.strategy import local_state, metric_modules
from trainkit.task import TaskModule

FIRST_STEPS = 3  # in which steps may set buffers that were `None`
_OF_EVERY_MODULE = vars(nn.Module()).keys()


class UndoableStep:
    """Takes back a step or an evaluation that the loss of another rank has broken.

        lost in forward, backward, sum    what these change is restored; weights were not touched
        lost in an update                 the state is neither that of this step nor of the last: it is not used
        lost after the step               the state is that of this step
        lost in an evaluation             what it has changed is restored, and it is repeated

    No rank finishes a step before all have sent their gradients. So the survivor with the most steps is right: it has
    the sum that the others lack. A state that cannot be taken back is not handed over, and a checkpoint must do.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_begun = False
        self._steps = 0
        self._buffers: list[tuple[dict[str, Tensor | None], str]] = []  # where the buffers of modules are
        self._extra: list[nn.Module] = []  # modules with an extra state
        self._metrics: list[nn.Module] = []
        self._has_custom_state_dict = False  # a module, whose state only its own code knows
        self._weights: list[Tensor] = []
        self._written: dict[int, Tensor] = {}  # weights that steps write to, such as a momentum encoder's, by position
        # What there was before the step: copies, and counts of writes.
        self._copies: list[Tensor] = []  # of the buffers
        self._written_copies: list[Tensor] = []
        self._kept: tuple[list[Any], Any] = [], None
        self._versions: list[int] = []
        self._had_gradients = False
        # Such a callback may swap the weights for an evaluation; ours swap them back for what is saved.
        self._may_swap = any(
            "on_evaluation_start" in callback.overridden_hooks()
            and not type(callback).__module__.startswith("trainkit.callbacks.")
            for callback in run.callbacks
        )
        self._is_evaluating = False
        self._unswapped: list[Tensor] = []  # the weights before an evaluation, if they may be swapped
        self._flags: tuple[frozenset[str], frozenset[str]] | None = None  # `_find_flags` before the evaluation
        self._attributes = _plain_attributes(run.task)
        run.undo_step = self.undo

    def find_state(self) -> None:
        """Find what a step may change; called when a module has registered something."""
        # Not in each step, which would take as long as a small step itself.
        task, strategy = self._run.task, self._run.strategy
        held = local_state(strategy, task)
        self._buffers = _present_buffers(task, held)
        self._copies = []
        self._extra = [m for m in task.modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
        self._metrics = metric_modules(strategy, task)
        self._has_custom_state_dict = any(_has_custom_state_dict(module) for module in task.modules())
        parameters = dict(task.named_parameters())
        written = {id(tensor) for tensor in self._written.values()}
        self._weights = [tensor for name, tensor in held.items() if name in parameters and not tensor.is_meta]
        self._written = {index: tensor for index, tensor in enumerate(self._weights) if id(tensor) in written}

    def wrap(self, phase: PhaseStep) -> PhaseStep:
        """Return a phase of the step that can be taken back until its first update."""
        return replace(phase, forward_backward=partial(self._forward_backward, phase.forward_backward))

    def _forward_backward(
        self, forward_backward: Callable[[StepBatch], list[StepOutput]], batch: StepBatch
    ) -> list[StepOutput]:
        if not self._is_begun:  # the first phase of the step
            self._steps += 1
            if 1 < self._steps <= FIRST_STEPS:  # the first step may have set buffers that were `None`
                self.find_state()
            self.begin()
            # Those of a task with a manual step may wait for a later update, and no payload has them.
            self._had_gradients = self._run.task.manual and _has_gradients(self._run.task)
        if self._run.strategy.is_updating or not is_looked_at(self._steps):
            return forward_backward(batch)
        # By values, as a write to `parameter.data` is not counted.
        values = [tensor.detach().clone() for tensor in self._weights]
        try:
            return forward_backward(batch)
        finally:  # also in a step that a loss breaks
            for index, (tensor, value) in enumerate(zip(self._weights, values, strict=True)):
                if index not in self._written and not torch.equal(tensor, value):
                    self._written[index] = tensor
                    self._written_copies.append(value)

    def begin(self) -> None:
        """Keep what a step or an evaluation may change."""
        self._is_begun, self._is_evaluating = True, False  # a rollback may have left an evaluation
        self._keep_buffers()
        self._written_copies = [tensor.detach().clone() for tensor in self._written.values()]
        # Private: torch has no public count of writes to a tensor; comparing values would cost a copy.
        self._versions = [tensor._version for tensor in self._weights]
        # Without random generators: those of the dead rank are lost, and all get new seeds.
        with self._run.strategy.readable():
            self._kept = (
                [deepcopy(module.get_extra_state()) for module in self._extra],
                preserve_state(self._metrics) if self._metrics else None,
            )

    def _keep_buffers(self) -> None:
        tensors = [cast(Tensor, buffers[name]) for buffers, name in self._buffers]
        # Into another shape a copy would be broadcast. Sparse tensors have no fixed number of values.
        fits = [tensor.shape for tensor in tensors] == [copy.shape for copy in self._copies]
        if not fits or not all([tensor.layout is torch.strided for tensor in tensors]):
            self._copies = [tensor.detach().clone() for tensor in tensors]
        elif tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, tensors)  # in a third of the time of single copies

    def begin_evaluation(self) -> None:
        """Keep what an evaluation may change."""
        self.begin()
        self._is_evaluating, self._flags = True, self._find_flags()
        self._unswapped = [tensor.detach().clone() for tensor in self._weights] if self._may_swap else []

    def end(self) -> None:
        """End the step, which is counted, or the evaluation."""
        self._is_begun = self._run.strategy.is_updating = False
        self._flags = None

    def end_evaluation(self) -> None:
        """Note that callbacks have put the weights back, in place of which they may have evaluated others."""
        self._is_evaluating, self._unswapped = False, []

    def undo(self) -> UnsavedState | None:
        """Return to the end of the last step; return `None` if the state is that of no step, or is not all known."""
        return self._unsaved() if self._has_undone() else None

    def _has_undone(self) -> bool:
        run = self._run
        versions = [tensor._version for tensor in self._weights]
        is_written = any(
            version != versions[index] for index, version in enumerate(self._versions) if index not in self._written
        )
        if self._is_evaluating:  # by values, as a write to `parameter.data` is not counted
            is_written = not all(map(torch.equal, self._weights, self._unswapped))
        if run.strategy.is_updating or (is_written and (self._is_evaluating or self._is_begun)):
            return False
        # What is not finite is left to the policy for it, which needs the rank that had the loss.
        weights = {str(index): tensor for index, tensor in enumerate(self._weights)}
        if (run.means is not None and run.means.nonfinite_steps()) or nonfinite_state(weights):
            return False
        if not self._is_begun:
            return not (run.task.manual and _has_gradients(run.task))
        tables = {(id(buffers), name) for buffers, name in self._buffers}
        present = _present_buffers(run.task, local_state(run.strategy, run.task))
        has_new = any((id(buffers), name) not in tables for buffers, name in present)
        if self._has_custom_state_dict or self._had_gradients or has_new:
            return False
        self._take_back()
        return True

    def _take_back(self) -> None:
        extra_states, metric_states = self._kept
        # Not copied into the buffers, which the step may have replaced.
        for (buffers, name), copy in zip(self._buffers, self._copies, strict=True):
            buffers[name] = copy
        with torch.no_grad():
            for tensor, copy in zip(self._written.values(), self._written_copies, strict=True):
                tensor.copy_(copy)
        for module, state in zip(self._extra, extra_states, strict=True):
            module.set_extra_state(state)
        if metric_states is not None:
            restore(metric_states)

    def _unsaved(self) -> UnsavedState:
        present = _plain_attributes(self._run.task)
        changed = [name for name, value in self._attributes.items() if present.get(name, value) != value]
        return UnsavedState(*(self._flags or self._find_flags()), sorted({*changed, *self._run.carried_state}))

    def _find_flags(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of the parameters that are frozen, and of the modules in evaluation mode."""
        task = self._run.task
        self._run.strategy.end_phases()  # or what other phases train would be taken for frozen
        return (
            frozenset(name for name, parameter in task.named_parameters() if not parameter.requires_grad),
            frozenset(name for name, module in task.named_modules() if not module.training),
        )


def set_flags(task: TaskModule, unsaved: UnsavedState) -> None:
    """Freeze parameters, and put modules into evaluation mode, as a survivor had them."""
    for name, parameter in task.named_parameters():
        if parameter.requires_grad == (name in unsaved.frozen):
            parameter.requires_grad_(name not in unsaved.frozen)
    for name, module in task.named_modules():
        module.training = name not in unsaved.evaluating


def _present_buffers(task: TaskModule, held: Mapping[str, Tensor]) -> list[tuple[dict[str, Tensor | None], str]]:
    """Return where the buffers are that this rank holds, which are among the tensors `held`."""
    ids = {id(tensor) for tensor in held.values()}
    return [
        (module._buffers, name)
        for module in task.modules()
        for name, tensor in module._buffers.items()
        if id(tensor) in ids and not cast(Tensor, tensor).is_meta
    ]


def _plain_attributes(task: TaskModule) -> dict[str, Any]:
    """Return the numbers and texts in attributes of the user's modules by name, but of those that save their own."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in task.named_modules()
        if not type(module).__module__.startswith(("torch.", "trainkit."))
        and type(module).get_extra_state is nn.Module.get_extra_state
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and name not in _OF_EVERY_MODULE
    }


def _has_gradients(task: TaskModule) -> bool:
    return any([parameter.grad is not None for parameter in task.parameters()])


def _has_custom_state_dict(module: nn.Module) -> bool:
    """Return True if a module of the user's has code for its state dict, which may change more than buffers."""
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    codes = [type(module)._save_to_state_dict, *hooks]
    return not all(str(getattr(code, "__module__", "")).startswith("torch.") for code in codes)
