"""The state of a task in a pipeline, whole and under the bare task's names, wherever its parts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainkit.checkpoints.shards import Shards
from trainkit.optimization import Optimization
from trainkit.strategy import named_state
from trainkit.task import TaskModule

from .choice import Choice
from .staged_task import StagedTask


class StagedState(StagedTask):
    """Gathers the state of all stages, and gives each its own part; every method is collective."""

    def final_state_dict(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained weights on the main rank if the caller is in another process; collective.

        Where the ranks were there before (torchrun), every one has the whole task again, in host memory.
        """
        if self._environment is None:
            self._state.make_whole(task)
            return None
        weights = {name: tensor.cpu() for name, tensor in self.state_dict(task).items()}
        return weights if self.comm.is_main else None

    def state_dict(self, task: TaskModule) -> dict[str, Any]:
        """Return the task's parameters and buffers, complete on the main rank."""
        return self._state.gather_task(task) if self.comm.rank == 0 else task.state_dict()

    def load_state_dict(self, task: TaskModule, saved: dict[str, Any]) -> None:
        """Give each stage its part of the parameters and buffers in `saved`."""
        self._state.load_task(task, saved)

    def local_state(self, task: TaskModule) -> dict[str, Tensor]:
        """Return the parameters and buffers of this stage, themselves and by name; all of them before the cut."""
        everything = named_state(task)
        placement = None if self._staging is None else self._staging.placement
        if placement is None:
            return everything
        return {name: tensor for name, tensor in everything.items() if placement.is_held(name, self.stage)}

    def optimizer_state_dict(self, task: TaskModule, optimization: Optimization) -> dict[str, Any]:
        """Return the optimizer's state, complete on the main rank."""
        if not self._is_placed or self.comm.rank != 0:
            return super().optimizer_state_dict(task, optimization)
        return self._state.gather_optimizer(optimization.optimizer)

    def shards(self, task: TaskModule, optimizations: Sequence[Optimization]) -> Shards | None:
        """Return the state with this stage's pieces of it, once the task has been cut."""
        optimizers = [optimization.optimizer for optimization in optimizations]
        return self._state.shards(task, optimizers, writes=self.comm.rank == 0, all_gather=self.comm.all_gather_object)

    def load_optimizer_state_dict(self, task: TaskModule, optimization: Optimization, saved: dict[str, Any]) -> None:
        """Give this stage's optimizer the state of its own parameters in `saved`."""
        self._state.load_optimizer(task, optimization.optimizer, saved)

    def strategy_state(self) -> dict[str, Any]:
        """Return how the task is cut, so that a resumed run is cut the same way."""
        choice = None if self._staging is None else self._staging.choice
        return {} if choice is None else {"pipeline": choice.saved()}

    def load_strategy_state(self, saved: Mapping[str, Any]) -> None:
        """Cut the task as in the run that is resumed, if it has as many stages."""
        if "pipeline" in saved and self._staging is not None and not self._is_placed:
            self._staging.known = Choice.loaded(saved["pipeline"])
