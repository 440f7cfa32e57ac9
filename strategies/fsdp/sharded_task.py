"""ShardedTask: a task whose parameters are shards between steps, and gathered unit by unit while a step runs."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainkit.errors import UserError
from trainkit.task import TaskModule

from .units import Unit


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """A parameter of the task, and the elements of it that this rank holds."""

    name: str
    sharded: nn.Parameter
    """What the task holds between steps: a DTensor."""
    local: nn.Parameter
    """The elements of this rank, in the same memory."""


class ShardedTask:
    """Shards a task in place over the ranks of a mesh; `make_whole` undoes it.

        between steps   rank 0 [ a0 b0 ]   rank 1 [ a1 b1 ]
        unit a runs     rank 0 [ a  b0 ]   rank 1 [ a  b1 ]     gathered for its forward, and again for its backward
        gradients       rank 0 [ a0 b0 ]   rank 1 [ a1 b1 ]     summed over ranks, each rank keeps its shard

    Names of parameters are those of the task. `replicated` parameters are on every rank.
    """

    def __init__(
        self, task: TaskModule, units: Sequence[Unit], mesh: DeviceMesh, *, reshard_after_forward: bool | int
    ) -> None:
        self.task, self.mesh = task, mesh
        self.replicated = [parameter for parameter in task.parameters() if parameter.dim() == 0]  # nothing to shard
        self._kinds = [(module, type(module)) for module in task.modules()]
        self._before = [(module, _added_names(module)) for module in task.modules()]
        whole = {id(parameter) for parameter in self.replicated}
        self._originals = [
            (module, name, parameter)
            for module in task.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in whole
        ]
        self._root = _Root(task)
        self._calls: list[int] = []  # the units that ran since `take_calls`, by index
        self._versions: dict[int, list[tuple[nn.Parameter, int]]] = {}  # of the parameters of a unit that runs
        modules: list[nn.Module] = [*(unit.module for unit in units[:-1]), self._root]
        for index, module in enumerate(modules):
            is_root = module is self._root
            module.register_forward_hook(partial(self._check_unchanged, index))  # before parameters are freed
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=None if is_root and reshard_after_forward is True else reshard_after_forward,
                ignored_params=set(self.replicated),
            )
            module.register_forward_pre_hook(partial(self._note_call, index))  # after they are gathered
        self._units: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
        for unit in self._units:
            # The loss is weighted: gradients are summed, with an operation that every backend has.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        with torch.no_grad():
            self._root(None, None)  # completes what PyTorch leaves to the first forward, while all parameters train
        self.reshard()
        for _, _, original in self._originals:
            original.data = original.new_empty(0)  # a use of it outside of the task's modules must fail
        self.shards = [
            ParameterShard(name, parameter, nn.Parameter(parameter.to_local().detach(), parameter.requires_grad))
            for name, parameter in task.named_parameters()
            if isinstance(parameter, DTensor)
        ]
        self._added = [
            (module, {key: names - before.get(key, set()) for key, names in _added_names(module).items()})
            for module, before in self._before
        ]

    # ---- Steps

    def run(self, step_name: str, batch: Any) -> Any:
        """Return what the task's method returns for a batch; collective."""
        return self._root(step_name, batch)

    @contextmanager
    def explained(self, step_name: str) -> Iterator[None]:
        """Raise UserError in place of PyTorch's errors about parameters that are not gathered."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if "mixed torch.Tensor and DTensor" in text:
                what = "uses a parameter of a unit outside of the unit's forward"
            elif "out of bounds for storage of size 0" in text:
                what = (
                    "needs a parameter of a unit in a backward that the unit does not see: torch.autograd.grad, or "
                    "outputs in an object that PyTorch does not search for tensors"
                )
            else:
                raise
            raise UserError(
                f"{type(self.task).__name__}.{step_name} {what}, where each rank has a shard of it. Set "
                "strategy.units=[], with which all parameters are whole during a step, or name units without it."
            ) from error

    def sync_gradients(self, is_last: bool) -> None:
        """Reduce gradients in the next backward, or only accumulate them."""
        self._units[-1].set_requires_gradient_sync(is_last)

    def reshard(self) -> None:
        """Free what was gathered: afterwards the task holds shards only."""
        for unit in self._units:
            unit.reshard()

    def take_calls(self) -> int:
        """Return a digest of the order in which units ran since the last call."""
        digest = zlib.crc32(repr(self._calls).encode())
        self._calls.clear()
        return digest

    def _note_call(self, index: int, module: nn.Module, inputs: Any) -> None:
        self._calls.append(index)
        whole = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
        self._versions[index] = [(parameter, parameter._version) for parameter in whole]

    def _check_unchanged(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """Raise UserError if a step changed a gathered parameter in place: the change would be lost."""
        kept = {id(parameter) for parameter in self.replicated}
        for changed, version in self._versions.pop(index, ()):
            if changed._version != version and id(changed) not in kept:
                named = self.task.named_parameters()
                name = next((name for name, parameter in named if parameter is changed), "a parameter")
                raise UserError(
                    f"{name} was changed in place during a step, where it is a gathered copy of its shards: the "
                    "change would be lost. Change parameters in a callback's on_step_end, or set strategy=ddp."
                )

    # ---- State

    def full(self, shard: ParameterShard, local: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has the elements `local`, sharded as the parameter; collective."""
        return _whole(_like(shard.sharded, local))

    def first_element(self, shard: ParameterShard) -> int:
        """Return the index of this rank's first element of a parameter."""
        rows, *others = shard.sharded.shape
        first_row = min(self.mesh.get_local_rank() * -(-rows // self.mesh.size()), rows)
        return first_row * torch.Size(others).numel()

    def local_of(self, sharded: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's elements of a whole tensor, sharded as a parameter."""
        assert isinstance(sharded, DTensor)
        moved = whole.detach().to(sharded.device)
        return distribute_tensor(moved, self.mesh, sharded.placements, src_data_rank=None).to_local()

    def state_dict(self, *, is_main: bool) -> dict[str, Any]:
        """Return the state of the task, in host memory if `is_main`, else with the shapes of parameters; collective."""
        state: dict[str, Any] = self.task.state_dict(keep_vars=True)
        wholes: dict[int, Tensor] = {}  # shared parameters stay shared
        for key, value in state.items():
            if isinstance(value, DTensor):
                if id(value) not in wholes:
                    whole = _whole(value.detach())
                    wholes[id(value)] = whole.cpu() if is_main else whole.to("meta")
                state[key] = wholes[id(value)]
            elif isinstance(value, Tensor):
                state[key] = value.detach()
        return state

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a complete state, of which each rank keeps its shards."""
        expected = self.task.state_dict(keep_vars=True)
        state = OrderedDict(saved)
        for key, value in expected.items():
            if isinstance(value, DTensor) and isinstance(state.get(key), Tensor):
                local = self.local_of(value, state[key])
                state[key] = _like(value, local)
        self.task.load_state_dict(state)

    def make_whole(self) -> None:
        """Leave the task as it was before it was sharded, with the present values; collective."""
        self.reshard()
        wholes: dict[int, nn.Parameter] = {}
        present = {id(original): module._parameters[name] for module, name, original in self._originals}
        for module, name, original in self._originals:
            sharded = present[id(original)]
            if id(original) not in wholes:
                assert isinstance(sharded, DTensor)
                original.data = _whole(sharded.detach())
                original.requires_grad_(sharded.requires_grad)
                original.grad = None
                wholes[id(original)] = original
            setattr(module, name, original)  # also for modules with a list of their parameters, as nn.LSTM
        for module, kind in self._kinds:
            module.__class__ = kind
        for module, added in self._added:
            _composable_state._module_state_mapping.pop(module, None)  # or it could not be sharded again
            for key, names in added.items():
                table = vars(module) if key == "" else vars(module)[key]
                for name in names:
                    table.pop(name, None)


class _Root(nn.Module):
    """A module whose forward is a step of the task: the steps of a task are methods, not its forward."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, step_name: str | None, batch: Any) -> Any:
        return None if step_name is None else getattr(self.task, step_name)(batch)


def _added_names(module: nn.Module) -> dict[str, set[Any]]:
    """Return the names in a module's attributes, under `""`, and in each of its tables of hooks."""
    tables = {key: set(table) for key, table in vars(module).items() if isinstance(table, OrderedDict)}
    return {"": set(vars(module)), **{key: names for key, names in tables.items() if "hooks" in key}}


def _like(sharded: Tensor, local: Tensor) -> DTensor:
    """Return the DTensor of which each rank has the elements `local`, sharded as `sharded`."""
    assert isinstance(sharded, DTensor)
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _whole(sharded: Tensor) -> Tensor:
    assert isinstance(sharded, DTensor)
    whole: Tensor = sharded.full_tensor()
    return whole.clone() if sharded.device_mesh.size() == 1 else whole
