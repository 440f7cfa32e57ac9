"""State of a partitioned task and its optimizers, whole or sharded by stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoint.sharded_state import ShardedState, TensorShard, in_memory, shard_placeholder
from trainkit.distributed.collectives import broadcast
from trainkit.errors import UserError
from trainkit.strategy import named_state

from ..plan.stage import Placement, has_meta, keep_local_parameters, materialize
from ..trace.attributes import Table, pickled, place_of, unpickled
from .absent import AbsentTensors
from .mesh import PipelineMesh
from .optimizer_shards import OptimizerShards

EXTRA_STATE = "_extra_state"
"""End of the key of what `get_extra_state` returns in a state dict."""

AllGather = Callable[[Any], list[Any]]
K = TypeVar("K", int, str)


class PipelineState:
    """State of a task and its optimizers; from `keep_local` on each stage has a part of it."""

    def __init__(self) -> None:
        self._placement: Placement | None = None
        self._group: dist.ProcessGroup | None = None
        self._stage = 0
        self.absent = AbsentTensors()
        """The parameters and buffers of other stages."""
        self._places: dict[str, str] = {}  # of parameters, buffers and attributes, in words
        self._assigned: dict[str, tuple[Table, str]] = {}  # those of other stages that steps assign
        self.optimizer_shards: OptimizerShards | None = None
        # Before the first step, as a step may make two buffers one.
        self._names: dict[str, str] = {}  # the first name of each key of the state dict
        self._registered: set[str] = set()  # the parameters and buffers
        # Loaded while parameters are on the meta device, to be applied once they exist.
        self._waiting_task: dict[str, Any] | None = None
        self._waiting_optimizers: list[tuple[Optimizer, dict[str, Any]]] = []

    def keep_local(
        self,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        placement: Placement,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        optimizer_shards: OptimizerShards | None,
        replaced: Iterable[str],
    ) -> None:
        """Keep the local part of the task and its optimizers on the device, and drop the rest. Collective.

        Parameters on the meta device are created here. `replaced` are the attributes and buffers that steps assign.
        """
        self._placement, self._group, self._stage = placement, group, group.rank()
        self.optimizer_shards = optimizer_shards
        self._names, self._registered = _canonical_names(task), set(named_state(task))
        if has_meta(task):
            seed = torch.tensor([torch.initial_seed() % 2**62])  # seeds have 64 bits without a sign, which int64 lacks
            # Replicas train together, but evaluate separately: then the others are not here.
            dist.broadcast(seed, group=None if optimizers else group, group_src=0)
            materialize(task, seed=int(seed), device=device, keep=self._is_held)
        keep_local_parameters(task, placement, rank=self._stage, device=device)
        for optimizer in optimizers:
            self._keep_own_optimizer_state(optimizer, task, device)
        if self._waiting_task is not None:
            self.load_task(task, self._waiting_task)
        for optimizer, saved in self._waiting_optimizers:
            self.load_optimizer(task, optimizer, saved)
        self._waiting_task, self._waiting_optimizers = None, []
        # Last, as what is above writes to the tensors of other stages too.
        self._places = {
            name: f"stage {ranks[0]}, and this is stage {self._stage}" for name, ranks in placement.holders.items()
        }
        self.absent.add(
            self._places, {name: tensor for name, tensor in named_state(task).items() if not self._is_held(name)}
        )
        self._assigned = {
            name: place_of(task, name) for name in replaced if name in self._places and not self._is_held(name)
        }

    @property
    def assigned_elsewhere(self) -> Collection[str]:
        """The attributes and buffers that steps assign on other stages, of which this one has placeholders."""
        return self._assigned.keys()

    def hide_assigned(self) -> None:
        """Make absent what a step has left on this stage in attributes and buffers of other stages."""
        for name, (table, key) in self._assigned.items():
            if isinstance(table.get(key), Tensor):
                table[key] = self.absent.hide(self._places[name], name, table[key])

    def _is_held(self, name: str) -> bool:
        assert self._placement is not None
        return self._placement.is_held(name, self._stage)

    def _is_updated(self, name: str) -> bool:
        """Return True if this rank keeps the parameter's optimizer state."""
        return self._is_held(name) and (self.optimizer_shards is None or self.optimizer_shards.owns(name))

    # ---- The task

    def gather_task(self, task: nn.Module) -> dict[str, Any]:
        """Return the task's state dict, complete in stage 0. Collective over stages."""
        with self.absent.readable():
            state: dict[str, Any] = task.state_dict()
        if self._placement is None:
            return state
        names = self._names
        # Every stage has all keys in the same order: messages between two stages have no names.
        for key, local_value in list(state.items()):
            source = self._placement.holders[names[key]][0] if key in names else self._source_of_extra_state(key)
            state[key] = self._sent_to_first(local_value, source=source)
        return state

    def _sent_to_first(self, local_value: Any, *, source: int) -> Any:
        """Return the tensor or object of stage `source` on the first stage, `local_value` on others. Collective."""
        # Point to point: in a broadcast every stage would need the memory of every tensor.
        if source == 0 or self._stage not in (0, source):
            return local_value
        if not isinstance(local_value, Tensor):
            box = [local_value]
            if self._stage == source:
                dist.send_object_list(box, group=self._group, group_dst=0)
            else:
                dist.recv_object_list(box, group=self._group, group_src=source)
            return box[0]
        if self._stage == source:
            # In host memory, as the group is one of gloo; the first stage's GPU need not hold the task, either.
            dist.send(local_value.detach().cpu().contiguous(), group=self._group, group_dst=0)
            return local_value
        received = torch.empty(local_value.shape, dtype=local_value.dtype)
        dist.recv(received, group=self._group, group_src=source)
        return received

    @contextmanager
    def whole_on_first(self, task: nn.Module, device: torch.device) -> Iterator[None]:
        """Give the first stage copies of all parameters and buffers in the block, and changed attributes for good.

        Collective over the stages, where it begins.
        """
        assert self._placement is not None
        contents: list[tuple[Tensor, Tensor]] = []
        for name, ranks in self._placement.holders.items():
            table, key = place_of(task, name)
            local_value: Any = table.get(key)
            if name in self._registered:
                received = self._sent_to_first(local_value, source=ranks[0])
                # Not twice for a tensor with two names: the copy would be kept as its content.
                if self._stage == 0 and all(tensor is not local_value for tensor, _ in contents):
                    contents.append((local_value, local_value.data))
                    # The object stays, with its hooks and gradient; a copy, as the step may write to it.
                    local_value.data = received.detach().to(device, copy=True)
                continue
            sent = pickled(local_value, task) if self._stage == ranks[0] and key in table else None
            box = self._sent_to_first(sent, source=ranks[0])
            if self._stage == 0 and ranks[0] != 0 and box is not None:
                table[key] = unpickled(box, task)
        try:
            yield
        finally:
            for tensor, content in contents:
                tensor.data = content

    def _source_of_extra_state(self, key: str) -> int:
        """Return the stage that changes the attributes of the module whose extra state is `key`."""
        assert self._placement is not None
        prefix = key.removesuffix(EXTRA_STATE)
        return next((ranks[0] for name, ranks in self._placement.holders.items() if name.startswith(prefix)), 0)

    def load_task(self, task: nn.Module, saved: dict[str, Any]) -> None:
        """Load this stage's part of a whole state dict."""
        with self.absent.readable():
            current = task.state_dict()
        # Meta tensors could not take the values: these wait until `keep_local` has created the ones of this stage.
        if set(current) != set(saved) or (self._placement is None and not has_meta(task)):
            task.load_state_dict(in_memory(saved))  # raises with the names that differ
            return
        if self._placement is None:
            self._waiting_task = saved
            return
        names = self._names
        with torch.no_grad():  # parameters are leaves, which a graph must not see written
            for key, tensor in current.items():
                if key in names and self._is_held(names[key]):
                    tensor.copy_(in_memory(saved[key]))
                elif key.endswith(EXTRA_STATE):
                    module = task.get_submodule(key.removesuffix(EXTRA_STATE).rstrip("."))
                    module.set_extra_state(in_memory(saved[key]))

    def make_whole(self, task: nn.Module) -> None:
        """Gather every parameter and buffer, complete in host memory on every stage. Collective over stages."""
        if self._placement is not None:
            self.absent.clear()  # for good: after a run every rank has the whole task
            self._gather_everywhere(task, torch.device("cpu"))

    @contextmanager
    def whole(self, task: nn.Module, device: torch.device, mesh: PipelineMesh) -> Iterator[None]:
        """Give every stage all parameters and buffers in the block, and then every rank those of the first one.

        Collective over all ranks.
        """
        with self.absent.readable():
            places = {name: place_of(task, name) for name in named_state(task)}
            contents = [(table, key, table[key], table[key].data) for table, key in places.values()]
            if self._placement is not None:
                self._gather_everywhere(task, device)
            outline = _outline(task)  # after the gathering, which may replace buffers
            try:
                yield
                differing = sorted(name for name, _ in outline.items() ^ _outline(task).items())
                if differing:
                    raise UserError(
                        f"the block of run.whole_task() added, removed or replaced '{differing[0]}', which optimizers "
                        "and other ranks would not have. Change values in place: with torch.no_grad(): "
                        "parameter.copy_(values)."
                    )
                _send_from_first([table[key] for table, key in places.values()], mesh)
            finally:
                for name, (table, key, tensor, content) in zip(places, contents, strict=True):
                    if self._placement is not None and not self._is_held(name):
                        table[key], tensor.data = tensor, content  # the absent object, with its single element

    def _gather_everywhere(self, task: nn.Module, device: torch.device) -> None:
        """Give every stage all parameters and buffers on the device, and the attributes. Collective over stages."""
        assert self._placement is not None
        seen = set()  # tensors by identity
        for name, ranks in self._placement.holders.items():
            table, key = place_of(task, name)
            if name not in self._registered:
                self._share_attribute(task, table, key, source=ranks[0])
                continue
            tensor = table[key]
            # All stages take part for every name, in the order of `holders`, or they would wait for each other forever.
            content = torch.empty(tensor.shape, dtype=tensor.dtype)
            if self._is_held(name):
                content = tensor.detach().cpu().contiguous()
            dist.broadcast(content, group=self._group, group_src=ranks[0])
            if id(tensor) in seen:  # two buffers that the step made one on this stage
                table[key] = content.to(device)
            elif not self._is_held(name) or tensor.device != device:
                tensor.data = content.to(device)
            seen.add(id(tensor))

    def _share_attribute(self, task: nn.Module, table: Table, key: str, *, source: int) -> None:
        """Give every stage the attribute of one of them. Collective over stages."""
        # `None` for what cannot be pickled, such as a lock: then each stage keeps its value.
        box = [pickled(table[key], task) if self._stage == source and key in table else None]
        dist.broadcast_object_list(box, group=self._group, group_src=source)
        if self._stage != source and box[0] is not None:
            table[key] = unpickled(box[0], task)

    # ---- The optimizer

    def gather_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict, complete in stage 0 of the first replica.

        Collective over the stages of the first replica, and with `optimizer_shards` over all ranks.
        """
        assert self._group is not None
        state: dict[str, Any] = optimizer.state_dict()
        if (divided := self.optimizer_shards) is not None:
            state["state"] = _joined(divided.gather(state["state"]))
            if divided.mesh.replica:  # the first replica has all of its stages' state now
                return state
        parts: list[Any] = [None] * self._group.size()
        dist.gather_object(state["state"], parts if self._stage == 0 else None, group=self._group, group_dst=0)
        if self._stage == 0:
            state["state"] = _joined(parts)
        return state

    def load_optimizer(self, task: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Load this stage's part of an optimizer's state."""
        if self._placement is None and has_meta(task):
            self._waiting_optimizers.append((optimizer, saved))
            return
        states = saved["state"]
        if self._placement is not None:
            names = _parameter_names(task, optimizer)
            # The rest stays on the disk: `in_memory` below reads only what this rank updates.
            states = {index: state for index, state in states.items() if self._is_updated(names[index])}
        saved = in_memory({**saved, "state": states})
        # The kernels are those of this run, not those that were saved.
        groups = [
            {**old, **{key: new[key] for key in ("fused", "foreach") if key in new}}
            for old, new in zip(saved["param_groups"], optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict({**saved, "param_groups": groups})

    def _keep_own_optimizer_state(self, optimizer: Optimizer, task: nn.Module, device: torch.device) -> None:
        """Drop the state of parameters that other ranks update, and move the rest to `device`."""
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in task.named_parameters():
            if parameter not in optimizer.state:
                continue
            if not self._is_updated(name):
                del optimizer.state[parameter]
                continue
            state = optimizer.state[parameter]
            # Adagrad's constructor makes it, also for a parameter without values; others begin with 0.
            first_value = groups[id(parameter)].get("initial_accumulator_value", 0.0)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # torch keeps counts of steps in host memory
                    on_meta = value.is_meta
                    state[key] = torch.full_like(value, first_value, device=device) if on_meta else value.to(device)

    # ---- Shards

    def shards(
        self, task: nn.Module, optimizers: Sequence[Optimizer], *, writes: bool, all_gather: AllGather
    ) -> ShardedState | None:
        """Return the state with placeholders, and the shards of this stage; `None` while every stage has the whole.

        Collective. `writes` is true in one replica. `all_gather` returns the values of all ranks, first those of the
        stages of this rank's replica.
        """
        if (placement := self._placement) is None:
            return None
        shards: dict[str, TensorShard] = {}

        def placeholder(entry: str, value: Any, owner: str, *, writes: bool) -> Any:
            if not isinstance(value, Tensor) or (value.dim() == 0 and not entry.startswith("task.")):
                return value  # a count of steps; a scalar of the task may be known to one stage only
            # Shared and unused parameters are on several stages, of which the first writes them.
            if writes and placement.counted(owner, self._stage):
                shards[entry] = TensorShard(entry, value.detach().contiguous().view(-1), 0, value.numel())
            return shard_placeholder(entry, torch.empty(value.shape, dtype=value.dtype, device="meta"))

        optimizer_states = []
        for number, optimizer in enumerate(optimizers):
            names, optimizer_state = _parameter_names(task, optimizer), optimizer.state_dict()
            divided = self.optimizer_shards is not None
            local_state = {
                index: {
                    key: placeholder(f"optimizer_{number}.{index}.{key}", value, names[index], writes=writes or divided)
                    for key, value in state.items()
                }
                for index, state in optimizer_state["state"].items()
            }
            optimizer_states.append({**optimizer_state, "state": _joined(all_gather(local_state))})
        with self.absent.readable():
            task_state: dict[str, Any] = task.state_dict()
        extra = [key for key in task_state if key.endswith(EXTRA_STATE)]
        local_extra = {key: task_state[key] for key in extra if self._source_of_extra_state(key) == self._stage}
        gathered_extra = _joined(all_gather(local_extra))
        for key in extra:
            if key in gathered_extra:
                task_state[key] = gathered_extra[key]
            else:  # of a stage that has not taken part
                del task_state[key]
        for key, name in self._names.items():
            task_state[key] = placeholder(f"task.{name}", task_state[key], name, writes=writes)
        return ShardedState(task_state, optimizer_states, list(shards.values()))


def _send_from_first(tensors: Sequence[Tensor], mesh: PipelineMesh) -> None:
    """Give every rank the contents of the first one. Collective over all ranks."""
    on_host = [tensor.detach().cpu().contiguous() for tensor in tensors]
    # First along the first stages, which can then send to the other stages of their replicas.
    if mesh.stage == 0:
        broadcast(on_host, mesh.replica_group)
    broadcast(on_host, mesh.stage_group)
    with torch.no_grad():
        for tensor, content in zip(tensors, on_host, strict=True):
            tensor.copy_(content)


def _outline(task: nn.Module) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    """Return the identity, shape and type of each parameter and buffer."""
    return {name: (id(tensor), tensor.shape, tensor.dtype) for name, tensor in named_state(task).items()}


def _joined(parts: Sequence[dict[K, Any]]) -> dict[K, Any]:
    """Return the states of all stages or replicas by parameter or key; where several have one, that of the first."""
    # Sorted, as one process saves it; reversed, so that the first one's overwrites the others.
    return dict(sorted({key: state for part in reversed(parts) for key, state in part.items()}.items()))


def _canonical_names(task: nn.Module) -> dict[str, str]:
    """Return for each key of the state dict the first name of the parameter or buffer there."""
    first = {id(tensor): name for name, tensor in named_state(task).items()}
    state = task.state_dict(keep_vars=True)  # the tensors themselves: by default those are detached, with other ids
    return {key: first[id(tensor)] for key, tensor in state.items() if id(tensor) in first}


def _parameter_names(task: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, by their index in its state dict."""
    # A state dict numbers parameters through all groups, in this order.
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
