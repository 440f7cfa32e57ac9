"""The state of a task and its optimizers, of which each stage writes what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoints.shards import Piece, elsewhere

from .placement import Placement

AllGather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class StageShards:
    """Describes the whole state, and takes the pieces of it that one stage writes: what it is the first to hold."""

    task: nn.Module
    placement: Placement
    stage: int
    writes: bool  # one replica does
    pieces: dict[str, Piece] = field(default_factory=dict)

    def of_task(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the task's state dict, in which every parameter and buffer (`names`: key to name) is elsewhere."""
        state: dict[str, Any] = self.task.state_dict()
        for key, name in names.items():
            state[key] = self._taken(f"task.{name}", state[key], owner=name)
        return state

    def of_optimizer(self, optimizer: Optimizer, number: int, all_gather: AllGather) -> dict[str, Any]:
        """Return an optimizer's state dict, in which every tensor is elsewhere. Collective."""
        names = {id(parameter): name for name, parameter in self.task.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        whole: dict[str, Any] = optimizer.state_dict()
        described = {
            index: {
                key: self._taken(f"optimizer_{number}.{index}.{key}", value, owner=names[id(parameters[index])])
                for key, value in state.items()
            }
            for index, state in whole["state"].items()
        }
        known = {index: state for told in reversed(all_gather(described)) for index, state in told.items()}
        return {**whole, "state": dict(sorted(known.items()))}

    def _taken(self, place: str, value: Any, *, owner: str) -> Any:
        if not isinstance(value, Tensor) or (value.dim() == 0 and not place.startswith("task.")):
            return value  # a count of steps
        if self.writes and self.placement.counted(owner, self.stage):
            self.pieces[place] = Piece(place, value.detach().contiguous().view(-1), 0, value.numel())
        return elsewhere(place, torch.empty(value.shape, dtype=value.dtype, device="meta"))
