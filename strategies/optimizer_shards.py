"""ShardedOptimizer: an optimizer whose state and updates are divided over the ranks by shards of buffers (ZeRO-1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from trainkit.checkpoint.sharded_state import (
    ShardedState,
    StoredTensor,
    TensorShard,
    elements,
    in_memory,
    shard_placeholder,
)
from trainkit.distributed.collectives import Collectives
from trainkit.errors import UserError
from trainkit.optim.optimizer import PhaseOptimizer

from .reducer.bucket import Bucket, shaped_like
from .transports.sharded import ShardTransport

ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta),
    *(optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop),
)
"""Optimizers that update each element independently, so that a shard is updated as within the full parameter."""
ALIGNMENT_BYTES = 64  # of memory from torch's allocator
NEVER_SHARDED = ("step", "mu_product")
"""State with one value per parameter, even if the parameter has a single element."""


def check_elementwise(optimizers: Iterable[Optimizer], what: str, remedy: str) -> None:
    """Raise UserError for an optimizer that needs full parameters; `what` updates shards of them."""
    # By exact type: a subclass may use several elements together.
    refused = next((optimizer for optimizer in optimizers if type(optimizer) not in ELEMENTWISE), None)
    if refused is not None:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UserError(
            f"{what} updates shards of parameters, but {type(refused).__name__} may need full parameters; use one of "
            f"{names}, {remedy}."
        )


def state_dict_without_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's `state_dict` without its per-parameter state, which belongs to shards."""
    state, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = state


class ShardedOptimizer:
    """Runs an optimizer on this rank's shards of the parameters.

    The shards are views of the transport's flat weights. Parameters are moved there if their place is aligned as memory
    from an allocator is; others are copied back, since matrix products round differently at odd addresses, and a
    resumed run would not be bit-equal.

    With two sets of weights a step reads the active set and writes the next one, which becomes active in
    `use_next_weights`: until then all forwards and backwards use the weights with which they began.

    The first backward shows the buckets, and with them the shards: until `open` there is only a loaded state.
    """

    def __init__(self, phase_optimizer: PhaseOptimizer, transport: ShardTransport) -> None:
        self.phase_optimizer, self.optimizer, self.transport = phase_optimizer, phase_optimizer.optimizer, transport
        self.is_open = False
        self._shards: list[_ParameterShard] = []
        self._of_buffer: dict[int, list[_ParameterShard]] = {}
        # By buffer, the parameters with a view of each set of flat weights.
        self._moved_of: dict[int, list[tuple[nn.Parameter, list[Tensor]]]] = defaultdict(list)
        self._copied: list[tuple[nn.Parameter, list[Tensor]]] = []
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._group_of = {id(p): number for number, params in enumerate(self._groups) for p in params}
        self._parameters = [p for params in self._groups for p in params]
        self._indices = {id(p): index for index, p in enumerate(self._parameters)}
        self._saved: dict[int, dict[str, Any]] = {}  # loaded before `open`

    def open(self, buckets: Sequence[Bucket]) -> None:
        """Take this rank's shards of the buckets, with their state."""
        for bucket in buckets:
            self._add_bucket(bucket)
        self.is_open, saved, self._saved = True, self._saved, {}
        # First the state of the shards, then that of whole parameters goes, whose memory is to be saved.
        self.load_state({self._indices[id(p)]: state for p, state in self.optimizer.state.items()} | saved)
        for bucket in buckets:
            for entry in bucket.entries:
                self.optimizer.state.pop(entry.parameter, None)

    def _add_bucket(self, bucket: Bucket) -> None:
        if bucket.contents is None:
            raise UserError(
                f"{bucket.entries[0].name} has sparse gradients, which cannot be sharded; set "
                "strategy.shard_optimizer=false."
            )
        transport, active = self.transport, self.transport.active_set
        flats, ranges = [weights[bucket.index] for weights in transport.weight_sets], transport.own_ranges(bucket.index)
        shards = self._of_buffer[bucket.index] = []
        for position, (entry, offset) in enumerate(zip(bucket.entries, bucket.layout.offsets, strict=True)):
            parameter, end = entry.parameter, offset + entry.parameter.numel()
            full = [shaped_like(flat[offset:end], parameter) for flat in flats]
            with torch.no_grad():
                full[active].copy_(parameter)
            is_copied = any(view.data_ptr() % ALIGNMENT_BYTES for view in full)
            if not is_copied:
                parameter.data = full[active]
            (self._copied if is_copied else self._moved_of[bucket.index]).append((parameter, full))
            group = self._group_of.get(id(parameter), -1)  # -1: the optimizer does not have it
            for start, stop in ranges if group >= 0 else []:
                first, last = max(start, offset) - offset, min(stop, end) - offset
                if first < last:
                    # Views, not copies: the transport sums into the gradient, and sends the weights.
                    views = [flat[offset:end][first:last] for flat in flats]
                    gradient, shard = bucket.contents[offset:end][first:last], nn.Parameter(views[active])
                    shards.append(
                        _ParameterShard(parameter, position, group, first, last, gradient, views, shard, is_copied)
                    )
        self._shards += shards

    # ---- A step

    @contextmanager
    def on_shards(self) -> Iterator[None]:
        """Replace the optimizer's parameters by this rank's shards, with their gradients, inside the context."""
        for buffer in self._of_buffer:
            self._load_shards(buffer)
        # A parameter that no rank used has no gradient, and is not updated.
        with self._with_shard_params([shard for shard in self._shards if shard.owner.grad is not None]):
            yield

    def step_buffer(self, buffer: int) -> None:
        """Update this rank's shards of one buffer, whose gradients are all summed.

        May be called on the communication thread, while backward runs.
        """
        used = self.transport.used_flags(buffer).tolist()
        self._load_shards(buffer)
        shards = [shard for shard in self._of_buffer[buffer] if not used or used[shard.position]]
        if shards:
            with self._with_shard_params(shards):
                self.phase_optimizer.update(norm=None)

    def use_next_weights(self) -> None:
        """Make the next set of weights the parameters' values; all ranks' shards of it must have arrived."""
        # By assigning `data`: the parameters stay the same objects, and no value is copied.
        number = self.transport.next_set
        if number != self.transport.active_set:
            for parameter, views in self._moved:
                parameter.data = views[number]
            self.transport.active_set = number
        if self._copied:
            with torch.no_grad():
                parameters: list[Tensor] = [parameter for parameter, _ in self._copied]
                # Private: one kernel for all copies. torch has no public call for that.
                torch._foreach_copy_(parameters, [views[number] for _, views in self._copied])

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's shards."""
        return [shard.gradient for shard in self._shards if shard.owner.grad is not None]

    def release(self) -> None:
        """Move the parameters out of the flat weights, and drop the state of this rank's shards."""
        for shard in self._shards:
            self.optimizer.state.pop(shard.parameter, None)
        for parameter, _ in self._moved:
            parameter.data = parameter.data.clone()  # a view would keep the whole buffer alive
        self._moved_of.clear()
        self._copied, self._shards, self._of_buffer, self.is_open = [], [], {}, False

    @property
    def _moved(self) -> list[tuple[nn.Parameter, list[Tensor]]]:
        return [moved for of_buffer in self._moved_of.values() for moved in of_buffer]

    def _load_shards(self, buffer: int) -> None:
        """Copy the parameters' present values to this rank's shards of the next weights: callbacks may change them."""
        transport = self.transport
        sets, active, following = transport.weight_sets, transport.active_set, transport.next_set
        with torch.no_grad():
            for parameter, views in self._moved_of[buffer]:
                if parameter.data_ptr() != views[active].data_ptr():  # a callback has assigned `parameter.data`
                    parameter.data = views[active].copy_(parameter)
            if following != active:
                # The optimizer updates in place, and forwards and backwards still read the active set.
                for start, stop in transport.own_ranges(buffer):
                    sets[following][buffer][start:stop].copy_(sets[active][buffer][start:stop])
            for shard in self._of_buffer[buffer]:
                if shard.is_copied:
                    shard.views[following].copy_(_in_memory_order(shard.owner)[shard.start : shard.stop])
                if shard.parameter.data_ptr() != shard.views[following].data_ptr():
                    shard.parameter.data = shard.views[following]

    @contextmanager
    def _with_shard_params(self, shards: Sequence[_ParameterShard]) -> Iterator[None]:
        groups = self.optimizer.param_groups
        for shard in shards:
            shard.parameter.grad = shard.gradient
        try:
            for number, group in enumerate(groups):
                group["params"] = [shard.parameter for shard in shards if shard.group == number]
            yield
        finally:
            for group, params in zip(groups, self._groups, strict=True):
                group["params"] = params
            for shard in shards:
                shard.parameter.grad = None

    # ---- State

    def load_state(self, saved: Mapping[int, dict[str, Any]]) -> None:
        """Replace the state of this rank's shards by theirs of the state of full parameters, by index."""
        if not self.is_open:
            self._saved = dict(saved)
        for shard in self._shards:
            state = saved.get(self._indices[id(shard.owner)], {})
            self.optimizer.state[shard.parameter] = {n: _shard_of(n, value, shard) for n, value in state.items()}

    def full_state(self, comm: Collectives) -> dict[int, dict[str, Any]]:
        """Return the state of every full parameter, by its index in the optimizer. Collective."""
        if not self.is_open:
            self._saved = in_memory(self._saved)  # a save may replace the checkpoint that it is in
            return self._saved
        # First what there is, then the tensors: every rank takes part in the reduction of each, also without a shard.
        local_state: dict[int, dict[str, Any]] = {}
        for shard, state in self._states():
            described = {n: value.dtype if _is_sharded(n, value, shard) else value for n, value in state.items()}
            local_state.setdefault(self._indices[id(shard.owner)], {}).update(described)
        full = _merge_states(comm.all_gather_object(local_state))
        for index, state in full.items():
            for name, value in state.items():
                if isinstance(value, torch.dtype):
                    state[name] = self._full_tensor(self._parameters[index], name, value, comm)
        return full

    def take_state(self, comm: Collectives) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the state of every full parameter, and release the shards. Collective."""
        # Not read from the disk before it is divided again.
        state = self.full_state(comm) if self.is_open else self._saved
        self.release()
        return {self._parameters[index]: values for index, values in state.items()}

    def give_state(self, taken: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Load a state that was taken from another division; that of parameters that are not here is dropped."""
        # By parameter: indices of the old groups are not those of the new ones.
        by_index = {self._indices.get(id(parameter)): values for parameter, values in taken.items()}
        self.load_state({index: values for index, values in by_index.items() if index is not None})

    def sharded_state(self, task: nn.Module, comm: Collectives) -> ShardedState:
        """Return the state of the task and of this optimizer, with this rank's shards of both. Collective."""
        names = {id(parameter): name for name, parameter in task.named_parameters()}
        sharded = ShardedState(task.state_dict(), [{**state_dict_without_state(self.optimizer), "state": {}}])
        owners = {id(parameter) for parameter, _ in (*self._moved, *self._copied)} & set(self._group_of)
        for key, parameter in task.state_dict(keep_vars=True).items():
            if id(parameter) in owners:
                layout = _flat_layout(parameter, parameter.dtype)
                sharded.task[key] = shard_placeholder(f"task.{names[id(parameter)]}", layout)
        local_state: dict[int, dict[str, Any]] = {}
        for shard, state in self._states():
            owner, index = shard.owner, self._indices[id(shard.owner)]
            weights = _in_memory_order(owner)[shard.start : shard.stop]
            sharded.shards.append(TensorShard(f"task.{names[id(owner)]}", weights, shard.start, owner.numel()))
            entries = local_state.setdefault(index, {})
            for key, value in state.items():
                entries[key] = value
                if _is_sharded(key, value, shard):
                    shard_name = f"optimizer.{index}.{key}"
                    sharded.shards.append(TensorShard(shard_name, value, shard.start, owner.numel()))
                    entries[key] = shard_placeholder(shard_name, _flat_layout(owner, value.dtype))
        sharded.optimizers[0]["state"] = _merge_states(comm.all_gather_object(local_state))
        return sharded

    def _states(self) -> Iterator[tuple[_ParameterShard, dict[str, Any]]]:
        for shard in self._shards:
            yield shard, self.optimizer.state.get(shard.parameter, {})

    def _full_tensor(self, owner: nn.Parameter, name: str, dtype: torch.dtype, comm: Collectives) -> Tensor:
        # A sum with zeros: each element is on one rank, so that none is rounded.
        flat = torch.zeros(owner.numel(), dtype=dtype, device=owner.device)
        for shard, state in self._states():
            if shard.owner is owner and name in state:
                flat[shard.start : shard.stop] = state[name]
        return shaped_like(comm.all_reduce(flat), owner).clone()


@dataclass(eq=False)
class _ParameterShard:
    """A range of one parameter that this rank updates."""

    owner: nn.Parameter
    position: int  # of the owner in its buffer
    group: int
    start: int  # in the owner's elements, in the order in which they lie in memory
    stop: int
    gradient: Tensor
    views: list[Tensor]  # of each set of weights
    parameter: nn.Parameter
    is_copied: bool  # the owner is not in the flat weights


def _merge_states(states: Sequence[dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Return the union of the ranks' states, in the order of parameters."""
    merged: dict[int, dict[str, Any]] = {}
    for state in states:
        for index, values in state.items():
            merged.setdefault(index, {}).update(values)
    return dict(sorted(merged.items()))


def _flat_layout(owner: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor with the strides that a parameter has as a view of flat weights."""
    return shaped_like(torch.empty(owner.numel(), dtype=dtype, device="meta"), owner)


def _in_memory_order(parameter: Tensor) -> Tensor:
    """Return the elements of a parameter in the order that they have in flat weights."""
    # Flat weights keep memory formats such as channels_last: without a copy if the parameter has the same strides.
    shaped = shaped_like(parameter.new_empty(parameter.numel()), parameter)
    if shaped.stride() == parameter.stride():
        return parameter.as_strided((parameter.numel(),), (1,))
    return parameter.reshape(-1)


def _is_sharded(name: str, value: Any, shard: _ParameterShard) -> bool:
    """Return True if a value of the shard's state has one element for each element of the shard."""
    return isinstance(value, Tensor) and name not in NEVER_SHARDED and value.shape == shard.parameter.shape


def _shard_of(name: str, value: Any, shard: _ParameterShard) -> Any:
    """Return the shard of a value in the state of the full parameter; nothing else of it is read."""
    owner = shard.owner
    if not isinstance(value, (Tensor, StoredTensor)) or name in NEVER_SHARDED or value.shape != owner.shape:
        return in_memory(value)
    shard_elements = elements(value, shard.start, shard.stop, like=_flat_layout(owner, value.dtype))
    return shard_elements.to(owner.device)
