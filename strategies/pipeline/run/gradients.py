"""Gradients of a stage: summed over replicas and shared parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.distributed.failure_store import FailureStore
from trainkit.errors import UserError

from ...reducer.grad_norm import total_norm
from ...reducer.reducer import Reducer, ReducerSettings
from ..plan.schedules import FORWARD, Action
from ..plan.stage import Placement
from .mesh import PipelineMesh


class StageGradients:
    """Reduces the gradients of this rank's parameters. The constructor is collective over all ranks.

    `phase` has the named parameters that a phase trains and its step uses; `None`: all of the task, of which the
    trained ones require a gradient.
    """

    def __init__(
        self,
        task: nn.Module,
        placement: Placement,
        mesh: PipelineMesh,
        *,
        failure_store: FailureStore | None,
        phase: dict[str, nn.Parameter] | None = None,
    ):
        self._mesh, self._failure_store = mesh, failure_store
        named = dict(task.named_parameters()) if phase is None else phase
        used = {name: parameter for name, parameter in named.items() if name in placement.used}
        self._held = {name: parameter for name, parameter in used.items() if placement.is_held(name, mesh.stage)}
        self._counted = [parameter for name, parameter in named.items() if placement.counted(name, mesh.stage)]
        # The same on all stages, also those without gradients: a clipped or skipped step must be so on each of them.
        is_wide = any(parameter.dtype == torch.float64 for parameter in named.values())
        self._norm_type = torch.float64 if is_wide else torch.float32
        shared = placement.shared_by()
        # For frozen parameters too: groups are made by all ranks together, and only some know of a later unfreezing.
        groups = mesh.holder_groups(shared)
        self._shared_names = [(groups[stages], names) for stages, names in shared.items() if mesh.stage in stages]
        self._reducer: Reducer | None = None
        self._is_trained: list[bool] | None = None  # of each held parameter
        self.follow_trained()

    def follow_trained(self) -> bool:
        """Reduce the gradients of what is trained now; return True if that has changed. Collective over replicas.

        Only what this stage holds is looked at: its replicas and the other holders have the same.
        """
        is_trained = [parameter.requires_grad for parameter in self._held.values()]
        if is_trained == self._is_trained:
            return False
        self._is_trained = is_trained
        trained = {name: parameter for name, parameter in self._held.items() if parameter.requires_grad}
        self._shared = [
            (group, [trained[name] for name in names if name in trained]) for group, names in self._shared_names
        ]
        self.close()  # or the hooks of both reducers would reduce each gradient
        mesh = self._mesh
        self._reducer = None
        if mesh.replicas > 1 and trained:
            # Summed, as each loss is weighted by its share of the global batch.
            settings = ReducerSettings(average=False, timeout_seconds=mesh.timeout.total_seconds())
            named_trained = list(trained.items())
            self._reducer = Reducer(
                named_trained, group=mesh.replica_group, settings=settings, failure_store=self._failure_store
            )
        return True

    def reduce_around(self, actions: Sequence[Action]) -> Callable[[int], AbstractContextManager[Any]] | None:
        """Return the context of each action: backwards accumulate, and the last one reduces over replicas."""
        reducer = self._reducer
        if reducer is None or not actions:
            return None

        def around(index: int) -> AbstractContextManager[Any]:
            if actions[index].kind == FORWARD:
                return nullcontext()
            # One reduction in a step, not one for each micro-batch; the last action of every schedule is a backward.
            session: AbstractContextManager[Any] = reducer.session() if index == len(actions) - 1 else reducer.no_sync()
            return session

        return around

    def detached(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients are neither reduced nor kept in buckets."""
        return nullcontext() if self._reducer is None else self._reducer.detached()

    def reduce_zeros(self) -> None:
        """Contribute zeros to the reduction if this replica has no samples. Collective over replicas."""
        if self._reducer is not None:
            self._reducer.reduce_zeros()

    def sum_shared(self) -> None:
        """Sum the gradients of each parameter over the stages that use it. Collective.

        A parameter without a gradient on any stage keeps none, as in one process.
        """
        # After the replicas are summed. Groups and parameters have the same order on all holders, or these would wait
        # for each other forever.
        for group, parameters in self._shared:
            self._check_hooks(parameters)
            # In host memory where the group takes it: flags on a GPU could be read only after its backward.
            on_host = "cpu" in dist.get_backend_config(group)
            has_gradients = torch.tensor(
                [parameter.grad is not None for parameter in parameters],
                dtype=torch.int32,
                device="cpu" if on_host or not parameters else parameters[0].device,
            )
            dist.all_reduce(has_gradients, dist.ReduceOp.MAX, group=group)
            for parameter, has_gradient in zip(parameters, has_gradients.tolist(), strict=True):
                if has_gradient:  # on some stage: the others take part with zeros
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad, group=group)

    def _check_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise UserError for a parameter with hooks: each stage would call them with its part of the gradient."""
        # Torch has no public way to list the hooks of a parameter. One of them is the reducer's.
        of_reducer = 0 if self._reducer is None else 1
        for parameter in parameters:
            if parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > of_reducer:
                name = next(name for name, held in self._held.items() if held is parameter)
                raise UserError(
                    f"the parameter {name} has hooks, and strategy=pipeline has copies of it in several stages, each "
                    "with a part of the gradient. Type strategy.shared_parameters=same_stage, or strategy=ddp."
                )

    def norm(self, mesh: PipelineMesh, device: torch.device, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the 2-norm of all stages' gradients of `parameters`; shared ones count once. Collective."""
        chosen = set(map(id, parameters))  # `in` with tensors would compare their elements
        gradients = [item.grad for item in self._counted if item.grad is not None and id(item) in chosen]
        # In float64, where squares of float32 cannot overflow; in host memory, as the group is one of gloo.
        square = total_norm(gradients, device).double().square().cpu()
        dist.all_reduce(square, group=mesh.stage_group)
        return square.sqrt().to(device, self._norm_type)

    def close(self) -> None:
        """Remove the hooks of the reducer."""
        if self._reducer is not None:
            self._reducer.close()
