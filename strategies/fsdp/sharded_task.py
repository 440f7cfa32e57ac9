"""Units of a task, and ShardedTask: its parameters are shards between steps, and gathered unit by unit in a step."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainkit.checkpoint.sharded_state import StoredTensor, elements, in_memory
from trainkit.distributed.collectives import broadcast
from trainkit.errors import UserError
from trainkit.model.deferred_init import Record, make_real, replace_content
from trainkit.model.references import references_to
from trainkit.model.transforms import modules_named
from trainkit.strategy import named_state
from trainkit.task import TaskModule
from trainkit.tree import tensors_in

from .parameter_shard import ParameterShard, Part, like, refusal
from .tensor_parallel import TensorParallel
from .tensor_plan import Division, mesh_names
from .unit_order import UnitOrder

Units = Literal["auto"] | Sequence[str]
MIB = 2**20
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its newer name
ROOT = "(task)"
"""Name of the unit of all parameters that are in no other."""

# ---- Units


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered together."""

    name: str
    module: nn.Module
    num_bytes: int
    """Of its own parameters, without those of units inside it."""


def choose_units(task: nn.Module, units: Units, *, min_bytes: float) -> list[Unit]:
    """Return the units of a task, inner ones before outer ones; the parameters that are left are the task's own unit.

    `auto` chooses modules that have a sibling of the same class and at least `min_bytes` of parameters: the blocks of a
    transformer, or the stages of a network if its blocks are smaller.

        task.blocks.0   Block  unit            task.stages.0    Sequential  unit
        task.blocks.1   Block  unit            task.stages.1    Sequential  unit
        task.head       Linear                 task.head        Linear

    Raises UserError for a name that matches nothing, and for parameters that several units share.
    """
    shared = _SharedParameters(task)
    if units == "auto":
        chosen = dict(_repeated_blocks(task, "", shared, min_bytes))
    else:
        chosen = _named(task, units)
        for name, module in chosen.items():
            shared.check(name, module)
    once: dict[int, tuple[str, nn.Module]] = {}
    for name, module in chosen.items():
        once.setdefault(id(module), (name, module))  # a shared module is one unit
    # The deepest take their parameters first, so that an outer unit has only what is left.
    inner_first = sorted(once.values(), key=lambda item: -item[0].count("."))
    return measured_units([*inner_first, (ROOT, task)])


def measured_units(named: Iterable[tuple[str, nn.Module]]) -> list[Unit]:
    """Return units with their present sizes; inner ones come before outer ones."""
    units: list[Unit] = []
    taken: set[int] = set()
    for name, module in named:
        of_unit = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        taken |= {id(parameter) for parameter in of_unit}
        units.append(Unit(name, module, sum(parameter.nbytes for parameter in of_unit)))
    return units


def describe_units(
    units: Sequence[Unit], *, num_shards: int, replicate: int, reshard_after_forward: bool | int, prefetch: int
) -> str:
    """Return the table of the units, and the memory of parameters on a rank."""
    total, root = sum(unit.num_bytes for unit in units), units[-1].num_bytes
    width = max(len(unit.name) for unit in units)
    lines = [f"{'unit':<{width}}  {'MiB':>8}  {'MiB a rank':>10}  class"]
    for unit in [units[-1], *units[:-1]]:
        unit_mib, shard_mib = unit.num_bytes / MIB, unit.num_bytes / MIB / num_shards
        lines.append(f"{unit.name:<{width}}  {unit_mib:8.2f}  {shard_mib:10.2f}  {type(unit.module).__name__}")
    largest = sorted((unit.num_bytes for unit in units[:-1]), reverse=True)
    # The next units are gathered while one is used; the parameters outside of units stay until the end of backward.
    gathered = root + sum(largest[: 1 + prefetch] if reshard_after_forward is True else largest)
    ranks = f"{num_shards} ranks" if replicate == 1 else f"{num_shards * replicate} ranks in {replicate} groups"
    lines.append(
        f"parameters: {total / MIB:.2f} MiB, {total / MIB / num_shards:.2f} MiB on each of {ranks}; "
        f"gathered at once, at most: {gathered / MIB:.2f} MiB, with {prefetch} ahead"
    )
    return "\n".join(lines)


def _repeated_blocks(
    module: nn.Module, prefix: str, shared: _SharedParameters, min_bytes: float
) -> Iterable[tuple[str, nn.Module]]:
    """Yield the outermost modules that can be units; a container yields those inside it, if there are any."""
    kinds = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_container = isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        inside = list(_repeated_blocks(child, f"{path}.", shared, min_bytes)) if is_container else []
        if inside:
            yield from inside
        elif kinds[type(child)] > 1 and _size(child) >= min_bytes and _is_block(child) and not shared.outside_of(child):
            yield path, child
        elif not is_container:
            yield from _repeated_blocks(child, f"{path}.", shared, min_bytes)


def _named(task: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that the patterns of names, or the names of classes, match."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UserError(f"units={patterns!r} is not auto or a list; write units=[{str(patterns)!r}].")
    named = {n: m for n, m in task.named_modules() if n and any(True for _ in m.parameters())}
    chosen = modules_named("units", patterns, named, "module with parameters")
    for name, module in chosen.items():
        if not _runs(module):
            raise UserError(
                f"units: {name} is a {type(module).__name__}, which has no forward; name the modules in it: "
                f"strategy.units=[{name}.*]."
            )
    return chosen


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _is_block(module: nn.Module) -> bool:
    return _runs(module) and not isinstance(module, nn.Embedding)  # whose weights output layers often use, too


def _size(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


class _SharedParameters:
    """The places of every parameter and module of a task, to find parameters that are used in and outside of a unit."""

    def __init__(self, task: nn.Module) -> None:
        self._places: dict[int, list[str]] = defaultdict(list)  # of a parameter: names of modules that hold it
        self._names: dict[int, list[str]] = defaultdict(list)  # of a module
        # All names: a module that is used in two places has parameters outside of a unit around one of them.
        for name, module in task.named_modules(remove_duplicate=False):
            self._names[id(module)].append(name)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._places[id(parameter)].append(name)

    def outside_of(self, unit: nn.Module) -> str | None:
        """Return the name of a module outside of the unit that holds one of its parameters, or `None`."""
        names = self._names[id(unit)]
        for parameter in unit.parameters():
            for holder in self._places[id(parameter)]:
                if not any(holder == name or holder.startswith(f"{name}.") for name in names):
                    return holder
        return None

    def check(self, name: str, unit: nn.Module) -> None:
        """Raise UserError if the unit shares a parameter with a module outside of it."""
        outside = self.outside_of(unit)
        if outside is not None:
            raise UserError(
                f"units: {name} and {outside or 'the task itself'} share a parameter, which can be in one unit only. "
                f"Take {name} out of strategy.units: shared parameters are then in the task's own unit."
            )


# ---- Shards


def make_mesh(group: dist.ProcessGroup, device_type: str, *, replicate: int, timeout_seconds: float) -> DeviceMesh:
    """Return the ranks of a group, in `replicate` rows of which each holds all shards.

        replicate=2, ranks 0 to 3      shard 0   shard 1
                         replica 0     rank 0    rank 1
                         replica 1     rank 2    rank 3

    Collective over the ranks of the group.
    """
    names = mesh_names("replicate", "shard")
    if replicate == 1:
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=names[1:])
    grid = torch.tensor(dist.get_process_group_ranks(group)).view(replicate, -1)
    replica, shard = divmod(group.rank(), grid.shape[1])
    limit = timedelta(seconds=timeout_seconds)
    # `use_local_synchronization`, as each rank makes its own two groups: else all ranks would have to make all groups.
    groups = [
        dist.new_group(ranks.tolist(), timeout=limit, use_local_synchronization=True)
        for ranks in (grid[:, shard], grid[replica])
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=names)


class ShardedTask:
    """Shards a task in place over the ranks of a mesh; `make_whole` undoes it.

        between steps   rank 0 [ a0 b0 ]   rank 1 [ a1 b1 ]
        unit a runs     rank 0 [ a  b0 ]   rank 1 [ a  b1 ]     gathered for its forward, and again for its backward
        gradients       rank 0 [ a0 b0 ]   rank 1 [ a1 b1 ]     summed over ranks, each rank keeps its shard

    Names of parameters are those of the task. `replicated` parameters are on every rank. A task without values gets
    those that its `records` make, of parameters this rank's shards. With `offload` shards are in host memory.
    """

    _divisions: dict[int, Division | None]  # by the id of the sharded parameter

    def __init__(
        self,
        task: TaskModule,
        units: Sequence[Unit],
        mesh: DeviceMesh,
        *,
        reshard_after_forward: bool | int,
        prefetch: int | None,
        reduce_dtype: torch.dtype | None,
        offload: bool,
        records: Mapping[str, Record],
        order: UnitOrder | None,
        parallel: TensorParallel | None,
    ) -> None:
        self.task, self.mesh, self.parallel, self._divisions = task, mesh, parallel, {}
        self._order: UnitOrder | None = None  # once the task is sharded
        self._shard_device = torch.device("cpu" if offload else mesh.device_type)
        self.shard_group = mesh.get_group(mesh.ndim - 1)
        """The ranks that hold all shards together, this one among them."""
        self.part = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        """The part of the shards that this rank holds, and the number of parts."""
        self.is_first_replica = mesh.ndim == 1 or mesh.get_local_rank(0) == 0
        self.replicated = [parameter for parameter in task.parameters() if not has_rows(parameter)]
        # Before `fully_shard`, which changes classes, attributes and hooks, and has no call that undoes it.
        self._kinds = [(module, type(module)) for module in task.modules()]
        self._before = [(module, _added_names(module)) for module in task.modules()]
        replicated_ids = {id(parameter) for parameter in self.replicated}
        self._originals = [
            (module, name, parameter)
            for module in task.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in replicated_ids
        ]
        originals = [original for _, _, original in self._originals]
        self._references = references_to(task, originals, moved="which strategy=fsdp replaces by shards")
        self._root = _Root(task)
        self._is_whole = False
        self._is_in_pass = True  # until what was gathered is freed
        self._unattached: dict[tuple[int, str], ParameterShard] = {}
        self._places_of: dict[int, list[tuple[nn.Module, str, ParameterShard]]] = defaultdict(list)  # by unit
        self._calls: set[int] = set()  # the units that ran since the end of the last evaluation, by index
        self._entered: dict[int, list[_Entered]] = {}  # the parameters of a unit that runs
        self._containers: list[list[Any]] = []  # of each unit that runs, its lists and dictionaries, and their items
        # Inner units first, as `fully_shard` gives a unit the parameters that no other has yet.
        modules: list[nn.Module] = [*(unit.module for unit in units[:-1]), self._root]
        for index, module in enumerate(modules):
            is_root = module is self._root
            # Hooks are called by compiled code, as those of fully_shard, and not part of it.
            check = torch.compiler.disable(partial(self._check_unchanged, index))
            note = torch.compiler.disable(partial(self._note_call, index))
            begin = torch.compiler.disable(partial(self._begin_unit, index))
            module.register_forward_hook(check, with_kwargs=True)  # before parameters are freed
            # After they are gathered, before hooks of the user.
            module.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
            fully_shard(
                module,
                mesh=mesh,
                # None: torch keeps the root's parameters until its backward, which follows at once.
                reshard_after_forward=None if is_root and reshard_after_forward is True else reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
                ignored_params=set(self.replicated),
            )
            module.register_forward_pre_hook(begin, prepend=True)  # before they are gathered
        self._units: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
        for unit in self._units:
            # The loss is weighted: gradients are summed, with an operation that every backend has.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if order is not None and hasattr(unit, "set_custom_reduce_scatter"):  # in newer versions of torch
                unit.set_custom_reduce_scatter(_OrderedReduceScatter(order))  # type: ignore[arg-type] # a protocol
            # Of the class that `fully_shard` has derived, and keeps for all units of the user's class.
            type(unit).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined] # in place of torch's, which raises too
        if records:
            self._make_shards(records)
        with torch.no_grad():
            self._root(None, None)  # completes what PyTorch leaves to the first forward, while all parameters train
        self.reshard()
        self._prefetches = prefetch is not None
        if prefetch is not None:
            self._gather_ahead(prefetch)
        self._make_parameter_shards(modules)
        self._added = [
            (module, {key: names - names_before.get(key, set()) for key, names in _added_names(module).items()})
            for module, names_before in self._before
        ]
        self._hide_originals()  # last, as from here on the values cannot be used
        self._order = order

    def _make_parameter_shards(self, modules: Sequence[nn.Module]) -> None:
        """Note each parameter's original and shard, and the places that hold it."""
        by_sharded = {id(module._parameters[name]): original for module, name, original in self._originals}
        self.shards = []
        for name, parameter in self.task.named_parameters():
            if isinstance(parameter, DTensor):
                original = by_sharded[id(parameter)]
                local = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)  # in the same memory
                division, shape = None, parameter.shape
                if self.parallel is not None and (division := self.parallel.division_of(original)) is not None:
                    shape = division.whole_shape(shape, self.parallel.size)
                self.shards.append(ParameterShard(name, original, parameter, local, shape, division))
        self._divisions = {id(shard.sharded): shard.division for shard in self.shards}
        of_originals = {id(shard.original): shard for shard in self.shards}
        self._places = [(module, name, of_originals[id(original)]) for module, name, original in self._originals]
        for module, name, shard in self._places:
            unit = next(unit for unit, parts in enumerate(modules) if any(part is module for part in parts.modules()))
            self._places_of[unit].append((module, name, shard))
        self._unattached = {(id(module), name): shard for module, name, shard in self._places}
        for shard in self.shards:
            shard.share_attributes()

    def _make_shards(self, records: Mapping[str, Record]) -> None:
        device = torch.device(self.mesh.device_type)
        originals = {id(original) for _, _, original in self._originals}

        def take(tensor: Tensor, value: Tensor) -> bool:
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(self.local_of(tensor, value))
            return isinstance(tensor, DTensor) or id(tensor) in originals

        def with_memory(tensor: Tensor) -> Tensor:
            is_shard = isinstance(tensor, DTensor) and tensor.is_meta
            return torch.empty_like(tensor, device=self._shard_device) if is_shard else tensor

        # Private: torch has no public call that replaces all parameters by what a function returns.
        self._root._apply(with_memory)  # type: ignore[no-untyped-call] # torch does not annotate it
        with torch.no_grad():
            make_real(self.task, device=device, records=records, take=take)

    def _gather_ahead(self, count: int) -> None:
        """Let each unit gather the next ones ahead, in the order of registration, and in backward the former ones."""
        # Of modules in the task, since units are sorted by depth.
        *units, root = self._units
        positions = {id(module): position for position, module in enumerate(self.task.modules())}
        units.sort(key=lambda unit: positions[id(unit)])
        forward, backward = [root, *units], [root, *reversed(units)]
        for index in range(len(forward)):
            forward[index].set_modules_to_forward_prefetch(forward[index + 1 : index + 1 + count])
            backward[index].set_modules_to_backward_prefetch(backward[index + 1 : index + 1 + count])

    # ---- Steps

    def run(self, step_name: str, batch: Any) -> Any:
        """Return what the task's method returns for a batch; collective."""
        if self._is_whole:
            return getattr(self.task, step_name)(batch)
        self._containers.clear()  # of a forward that has failed
        self._is_in_pass = True  # until `reshard`, so in backward too, where a checkpoint runs units again
        if self._order is not None:
            self._order.begin(step_name)
        if self.parallel is not None:
            self.parallel.num_passes += 1
            self.parallel.is_in_pass = True
        Part.is_in_step = True
        try:
            returned = self._root(step_name, batch)
        finally:
            Part.is_in_step = False
        self.end_of_pass()
        return returned

    def end_of_pass(self) -> None:
        """Compare the end of a forward or backward with that of the other ranks."""
        if self._order is not None:
            self._order.end()

    @contextmanager
    def explained(self, step_name: str) -> Iterator[None]:
        """Raise UserError in place of PyTorch's errors about parameters that are not gathered."""
        try:
            yield
        except RuntimeError as error:
            # By their words, as torch has no class for these errors.
            text = str(error)
            if "out of bounds for storage of size 0" in text or "its data is not allocated yet" in text:
                what = (
                    "needs a parameter of a unit in a backward that the unit does not see: torch.autograd.grad, an "
                    "output that is changed in place (x += y), or outputs in an object that PyTorch does not search "
                    "for tensors"
                )
            elif "resize storage that is not resizable" in text:
                raise UserError(
                    f"{type(self.task).__name__}.{step_name} keeps the memory of a gathered parameter, which is freed "
                    "after its unit ran: numpy() does. Copy it first (.clone().numpy()), or set strategy=ddp."
                ) from error
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
        self._is_in_pass = False
        if self.parallel is not None:
            self.parallel.is_in_pass = False
        for unit in self._units if not self._is_whole else ():
            unit.reshard()

    def end_evaluation(self) -> None:
        """Free what was gathered, also ahead for units that did not run: it would be taken for new weights later."""
        for index, unit in enumerate(self._units) if self._prefetches else ():
            if index not in self._calls:
                unit.unshard()  # waits for the gathering, which `reshard` would leave under way
        self.reshard()
        self._calls.clear()

    def _begin_unit(self, index: int, module: nn.Module, inputs: Any) -> None:
        """Raise UserError if ranks run different units, or with values that the gathered ones would replace."""
        if self._order is not None and self._is_in_pass:
            self._order.forward(index)  # before the gathering, in which ranks with different units would mix values
        for holder, name, shard in self._places_of[index]:
            if not self._is_in_pass:  # a callback's call, perhaps of one rank
                raise refusal(shard.sharded)
            present = holder._parameters.get(name)
            if not isinstance(present, DTensor) and present is not shard.gathered:
                raise UserError(
                    f"{shard.name} is replaced by another tensor where its unit runs, as by torch.func.functional_call,"
                    " and strategy=fsdp puts the gathered parameter in its place. Set strategy.units=[], or name units "
                    "without it; or set strategy=ddp."
                )

    def _note_call(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Of a batch nobody looks at what the step leaves.
        given = () if module is self._root else _containers((*args, *kwargs.values()))
        self._containers.append([(value, _items(value)) for value in given])
        self._calls.add(index)
        if self._unattached:
            self._attach()
        gathered = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
        # The version is private, but torch has no public count of a tensor's changes in place.
        self._entered[index] = [_Entered(weight, weight._version, weight.requires_grad) for weight in gathered]

    def _attach(self) -> None:
        """Note the gathered parameters that are there for the first time."""
        for module, name, _ in self._places:
            gathered = module._parameters[name]
            if (id(module), name) in self._unattached and not isinstance(gathered, DTensor):
                assert gathered is not None
                self._unattached.pop((id(module), name)).attach(gathered)

    def _check_unchanged(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Raise UserError if a step changed a gathered parameter in place: the change would be lost."""
        if not all(_are_same(_items(container), former) for container, former in self._containers.pop()):
            name = next((name for name, part in self.task.named_modules() if part is module), ROOT)
            raise UserError(
                f"{name} changes a list or dictionary that it is called with, and PyTorch's "
                "fully_shard gives it a copy: the caller would not see the change. Return what it adds, or set "
                "strategy.units=[]."
            )
        replicated_ids = {id(parameter) for parameter in self.replicated}  # they are no copies
        for entered in self._entered.pop(index, ()):
            weight = entered.parameter
            if weight.requires_grad != entered.requires_grad:
                self.refuse_unfreezing(self._name_of(weight))
            if weight._version != entered.version and id(weight) not in replicated_ids:
                raise UserError(
                    f"{self._name_of(weight)} was changed in place during a step, where it is a gathered copy of its "
                    "shards: the change would be lost. Change parameters in a callback's on_step_end, in `with "
                    "run.whole_task() as task:`, or set strategy=single."
                )
        if self._order is not None and torch.is_grad_enabled():
            call = _BackwardCall(self._order, index)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(call)  # before that of PyTorch, which gathers the unit

    def _name_of(self, gathered: nn.Parameter) -> str:
        named = self.task.named_parameters()
        return next((name for name, parameter in named if parameter is gathered), "a parameter")

    def refuse_unfreezing(self, name: str) -> NoReturn:
        """Raise UserError for a parameter that a step freezes or begins to train."""
        raise UserError(
            f"{name}.requires_grad was changed during a step, which strategy=fsdp does not support. Change it in a "
            "callback, as callbacks=gradual_unfreezing does, or set strategy=single."
        )

    # ---- State

    def full(self, shard: ParameterShard, local: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has the elements `local`, sharded as the parameter; collective."""
        part = _whole(shard.sharded, local)
        if shard.division is None:
            return part
        assert self.parallel is not None
        return self.parallel.join(shard.division, part)

    def first_element(self, sharded: Tensor) -> int:
        """Return the index of this rank's first element of a parameter."""
        return sum(self.elements_of_ranks(sharded)[: self.part[0]])

    def elements_of_ranks(self, sharded: Tensor) -> list[int]:
        """Return how many elements of a parameter each rank of `shard_group` has; they have rows, in order."""
        rows, *others = Tensor.size(sharded)  # of this tensor-parallel rank's part
        # As torch.chunk divides rows, and so a DTensor: the last ranks may have fewer rows, or none.
        most, row = -(-rows // self.part[1]), torch.Size(others).numel()
        return [max(min(most, rows - rank * most), 0) * row for rank in range(self.part[1])]

    def local_of(self, sharded: Tensor, saved: Tensor | StoredTensor) -> Tensor:
        """Return this rank's elements of a saved tensor, sharded as a parameter; no others are read."""
        assert isinstance(sharded, DTensor)
        local, start = sharded.to_local().detach(), self.first_element(sharded)
        division = self._divisions.get(id(sharded))
        if division is not None:
            assert self.parallel is not None
            # The part of a file is in no range of it: one parameter is read at a time.
            whole = in_memory(saved) if isinstance(saved, StoredTensor) else saved.detach()
            saved = division.part(whole, self.parallel.rank, self.parallel.size)
            return saved.flatten()[start : start + local.numel()].view(local.shape).to(local.device, copy=True)
        shard_elements = elements(saved, start, start + local.numel(), like=sharded)
        return shard_elements.view(local.shape).to(local.device)

    def state_dict(self, *, is_main: bool) -> dict[str, Any]:
        """Return the state of the task, in host memory if `is_main`, else with the shapes of parameters; collective."""
        with self._unguarded():
            state: dict[str, Any] = self.task.state_dict(keep_vars=True)
        wholes: dict[int, Tensor] = {}  # shared parameters stay shared
        shards = {id(shard.sharded): shard for shard in self.shards}
        for key, value in state.items():
            if isinstance(value, DTensor):
                # To the host one by one: the whole task may not fit on the device.
                if id(value) not in wholes:
                    full = self.full(shards[id(value)], value.to_local().detach())
                    wholes[id(value)] = full.cpu() if is_main else full.to("meta")
                state[key] = wholes[id(value)]
            elif isinstance(value, Tensor):
                state[key] = value.detach()
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a complete state, of which each rank reads its shards."""
        state = copy.copy(saved)
        shards_read: dict[int, DTensor] = {}  # a shared parameter has several keys and is read once
        # Reversed, as of several keys the last one counts: each overwrites the tensor in `nn.Module.load_state_dict`.
        for key, value in reversed(self.task.state_dict(keep_vars=True).items()):
            if isinstance(saved.get(key), DTensor):
                continue  # its own, of a checkpoint without frozen parameters
            if isinstance(value, DTensor) and key in saved:
                if id(value) not in shards_read:
                    shards_read[id(value)] = like(value, self.local_of(value, saved[key]))
                state[key] = shards_read[id(value)]
            elif key in saved:
                state[key] = in_memory(saved[key])
        with self._unguarded():
            self.task.load_state_dict(state)

    def make_whole(self) -> None:
        """Leave the task as it was before it was sharded, with the present values; collective."""
        self.reshard()
        self._fill_originals()
        self._remove_units()
        # Private: torch has no call that undoes `fully_shard`.
        for module, _ in self._added:
            _composable_state._module_state_mapping.pop(module, None)  # or it could not be sharded again
        if self.parallel is not None:
            self.parallel.remove()
        for shard in self.shards:
            vars(shard.original).pop("_is_param", None)  # of a DTensor

    @contextmanager
    def whole(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Leave the task in the block as it was before it was sharded, with the present values.

        At the end rank 0's values are written to the shards of all ranks. Collective.
        """
        if self._is_whole:
            yield
            return
        self.reshard()
        self._fill_originals()
        restore, self._is_whole = self._remove_units(), True
        outline = _outline(self.task)
        try:
            yield
            differing = sorted(name for name, _ in outline.items() ^ _outline(self.task).items())
            if differing:
                raise UserError(
                    f"the block of run.whole_task() added, removed or replaced '{differing[0]}', which optimizers and "
                    "other ranks would not have. Change values in place: with torch.no_grad(): parameter.copy_(values)."
                )
            # Rank 0's values count: the others may not have made its changes, or different ones.
            broadcast([t for t in named_state(self.task).values() if t.layout is torch.strided], group)
            with torch.no_grad():
                for shard in self.shards:
                    shard.local.copy_(self.local_of(shard.sharded, shard.original.detach()))
                    shard.sharded.requires_grad_(shard.original.requires_grad)
        finally:
            restore()  # first, as the units' classes and hooks belong to shards
            self._is_whole = False
            for module, name, shard in self._places:
                setattr(module, name, shard.sharded)
            self._hide_originals()

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Leave the task in the block without what PyTorch added to its modules, so that it can be copied."""
        restore = self._remove_units()
        if self.parallel is not None:
            self.parallel.remove()
        try:
            with self._unguarded():
                yield
        finally:
            restore()
            if self.parallel is not None:
                self.parallel.install()

    @contextmanager
    def _unguarded(self) -> Iterator[None]:
        """Let the shards be used as DTensors in the block."""
        for shard in self.shards:
            shard.unguard()
        try:
            yield
        finally:
            for shard in self.shards if not self._is_whole else ():
                shard.guard()

    def _fill_originals(self) -> None:
        """Put the original parameters back, with the values of the shards; collective."""
        if self.parallel is not None:
            self.parallel.remove()
        for shard in self.shards:
            shard.unguard()
            content = self.full(shard, shard.local.detach())
            # The object stays the same, since optimizers and attributes of the user refer to it.
            if shard.original.is_meta:  # torch refuses to assign `data` of another device
                replace_content(shard.original, content)
            else:
                shard.original.data = content
            shard.original.requires_grad_(shard.sharded.requires_grad)
            shard.original.grad = None
        for module, name, shard in self._places:
            setattr(module, name, shard.original)  # also for modules with a list of their parameters, as nn.LSTM
        for reference in self._references:
            reference.replace({id(shard.sharded): shard.original for shard in self.shards})

    def _hide_originals(self) -> None:
        """Let every reference to a parameter be to its shard, and every use of it as a whole raise UserError."""
        if self.parallel is not None:
            self.parallel.install()
        for reference in self._references:
            reference.replace({id(shard.original): shard.sharded for shard in self.shards})
        for shard in self.shards:
            # Frees the memory: the object is needed for later, its values are not.
            shard.original.data, shard.original.grad = shard.original.new_empty(0), None
            shard.guard()

    def _remove_units(self) -> Callable[[], None]:
        """Give modules their own classes and hooks back; return a function that undoes it."""
        present = [(module, type(module)) for module, _ in self._kinds]
        tables: list[tuple[dict[Any, Any], dict[Any, Any], set[Any]]] = []
        for module, kind in self._kinds:
            module.__class__ = kind
        for module, added in self._added:
            for key, names in added.items():
                if names:
                    table = vars(module) if key == "" else vars(module)[key]
                    tables.append((table, dict(table), names))
                    for name in names:
                        table.pop(name, None)  # in place, as the handles of hooks refer to the table

        def restore() -> None:
            for module, kind in present:
                module.__class__ = kind
            for table, former, names in tables:  # in the former order, which is that of the calls of hooks
                remaining = dict(table)
                table.clear()
                for name, value in former.items():
                    if name in names or name in remaining:
                        table[name] = remaining.pop(name, value)
                table.update(remaining)

        return restore


@dataclass(frozen=True)
class _Entered:
    """A gathered parameter at the start of its unit's forward."""

    parameter: nn.Parameter
    version: int
    requires_grad: bool


@dataclass
class _BackwardCall:
    """A hook on the outputs of a unit, which notes the first of them that has a gradient."""

    order: UnitOrder
    unit: int
    is_noted: bool = field(default=False)

    def __call__(self, gradient: Tensor) -> None:
        if not self.is_noted:
            self.is_noted = True
            self.order.backward(self.unit)


class _OrderedReduceScatter:
    """The reduction of gradients of `fully_shard`, which first compares their number over ranks."""

    def __init__(self, order: UnitOrder) -> None:
        self._order = order

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._order.reduce(input_tensor.numel())  # sums of buffers of different sizes would hang or mix values
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


class _Root(nn.Module):
    """A module whose forward is a step of the task: the steps of a task are methods, not its forward."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, step_name: str | None, batch: Any) -> Any:
        return None if step_name is None else getattr(self.task, step_name)(batch)


def _containers(value: Any) -> Iterator[Any]:
    """Yield the lists and dictionaries in what a unit is called with, but not what these contain."""
    if isinstance(value, (list, dict)):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _containers(part)


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _are_same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(items) == len(others) and all(item is other for item, other in zip(items, others, strict=True))


def _added_names(module: nn.Module) -> dict[str, set[Any]]:
    """Return the names in a module's attributes, under `""`, and in each of its tables of hooks."""
    tables = {key: set(table) for key, table in vars(module).items() if isinstance(table, OrderedDict)}
    return {"": set(vars(module)), **{key: names for key, names in tables.items() if "hooks" in key}}


def _refuse_copy(module: nn.Module, memo: Any) -> NoReturn:
    raise UserError(
        f"a module with the unit {type(module).__name__} cannot be copied as a whole, where each rank has a shard of "
        "it under strategy=fsdp. Copy it on every rank in `with run.whole_task() as task:`."
    )


def has_rows(parameter: nn.Parameter) -> bool:
    """Return True if there is something to shard."""
    return parameter.dim() > 0 and (parameter.is_meta or parameter.numel() > 0)


def _outline(task: nn.Module) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    """Return the identity, shape and type of each parameter and buffer."""
    return {name: (id(tensor), tensor.shape, tensor.dtype) for name, tensor in named_state(task).items()}


def _whole(sharded: Tensor, local: Tensor) -> Tensor:
    """Return the tensor on the mesh's devices of which each rank has the elements `local`; collective.

    Not by `full_tensor`: gloo's two threads assign the name of a completed collective to the same string without a
    lock, and the name of that one, ALLGATHER_COALESCED, is too long to be kept outside of the heap.
    """
    assert isinstance(sharded, DTensor)
    mesh = sharded.device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    rows, *others = Tensor.size(sharded)
    most = -(-rows // group.size())  # rows of a rank; all send as many, the last ones zeros
    padded = torch.zeros(most, *others, dtype=local.dtype, device=mesh.device_type)
    padded[: len(local)] = local
    gathered = padded.new_empty(group.size(), most, *others)
    dist.all_gather(list(gathered), padded, group=group)
    all_rows = gathered.flatten(0, 1)
    # A clone, as a view would keep the memory of the padding, and be saved with it.
    return all_rows if len(all_rows) == rows else all_rows[:rows].clone()
