"""The gradients of one stage: added up over the replicas that have a copy, and over stages that share a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.distributed.failure_store import FailureStore

from ..ddp.clipping import total_norm
from ..ddp.reducer import Reducer, ReducerSettings
from .grid import Grid
from .placement import Placement
from .schedules import FORWARD, Action


class StageGradients:
    """Makes the gradients of this rank's parameters those of the whole step. To be made by all ranks at once.

    Args:
        task: The task, whose parameters require a gradient as far as they are trained.
        placement: Where they are.
        grid: Where this rank is.
        limit: How long to wait for other ranks.
        board: Where they say why they stop.
        phase: The parameters that a phase trains and their names, as far as its step uses them; `None`: all.

    """

    def __init__(
        self,
        task: nn.Module,
        placement: Placement,
        grid: Grid,
        *,
        limit: timedelta,
        board: FailureStore | None,
        phase: dict[str, nn.Parameter] | None = None,
    ):
        named = dict(task.named_parameters()) if phase is None else phase
        used = [(name, parameter) for name, parameter in named.items() if name in placement.used]
        mine = [
            (name, parameter)
            for name, parameter in used
            if placement.is_held(name, grid.stage) and parameter.requires_grad
        ]
        self._counted = [parameter for name, parameter in named.items() if placement.counted(name, grid.stage)]
        # The same on all stages, of which some may have no gradients: they must not judge a norm differently.
        is_wide = any(parameter.dtype == torch.float64 for parameter in named.values())
        self._norm_type = torch.float64 if is_wide else torch.float32
        shared = placement.shared_by()
        groups = grid.holder_groups(shared, limit=limit)
        self._shared = [
            (groups[stages], [named[name] for name in names if name in named and named[name].requires_grad])
            for stages, names in shared.items()
            if grid.stage in stages
        ]
        self._reducer: Reducer | None = None
        if grid.replicas > 1 and mine:
            settings = ReducerSettings(average=False, timeout_seconds=limit.total_seconds())
            self._reducer = Reducer(mine, group=grid.copies, settings=settings, board=board)

    def session_around(self, actions: Sequence[Action]) -> Callable[[int], AbstractContextManager[Any]] | None:
        """Return what gives the context of each action: backwards reduce over replicas, the last one for all."""
        reducer = self._reducer
        if reducer is None or not actions:
            return None

        def around(index: int) -> AbstractContextManager[Any]:
            if actions[index].kind == FORWARD:
                return nullcontext()
            session: AbstractContextManager[Any] = reducer.session(sync=index == len(actions) - 1)
            return session

        return around

    def reduce_nothing(self) -> None:
        """Take part in the reduction of replicas that have samples, without any; collective over copies."""
        if self._reducer is not None:
            self._reducer.reduce_nothing()

    def add_up_shared(self) -> None:
        """Leave on every stage that uses a parameter the sum of all stages' gradients; collective.

        A parameter to which no stage gives a gradient in this step has none, as in one process.
        """
        for group, parameters in self._shared:
            on_host = "cpu" in dist.get_backend_config(group)
            found = torch.tensor(
                [parameter.grad is not None for parameter in parameters],
                dtype=torch.int32,
                device="cpu" if on_host or not parameters else parameters[0].device,
            )
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            for parameter, has_gradient in zip(parameters, found.tolist(), strict=True):
                if has_gradient:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad, group=group)

    def norm(self, grid: Grid, device: torch.device) -> Tensor:
        """Return the 2-norm of all stages' gradients, those of shared parameters counted once; collective."""
        gradients = [parameter.grad for parameter in self._counted if parameter.grad is not None]
        square = total_norm(gradients, device).double().square().cpu()
        dist.all_reduce(square, group=grid.pipeline)
        return square.sqrt().to(device, self._norm_type)

    def close(self) -> None:
        """Leave the parameters to themselves."""
        if self._reducer is not None:
            self._reducer.close()
