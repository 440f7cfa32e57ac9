"""The strategy `fusion`: gradients in balanced buffers, of which every rank sums an equal shard."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.checkpoint.sharded_state import ShardedState, in_memory
from trainkit.data.batch import StepBatch
from trainkit.distributed.collectives import gather
from trainkit.errors import UserError, nearest
from trainkit.metrics.step_output import StepOutput
from trainkit.model.references import references_to
from trainkit.optim.chained_optimizer import members
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.strategy import Strategy, named_state
from trainkit.task import TaskModule

from ..ddp.strategy import DDPStrategy
from ..optimizer_shards import ShardedOptimizer, check_elementwise, state_dict_without_state
from ..reducer.bucket_plan import MIB
from ..reducer.bucket_recorder import Timeline
from ..reducer.grad_norm import total_norm
from ..reducer.reducer import Reducer, Unused
from ..transports.communication_thread import CommunicationThread
from ..transports.gloo_ring import GlooExchange
from ..transports.host_layout import HostLayout
from ..transports.sharded import FusionSettings, ServerGroups, ShardTransport, open_server_groups
from ..transports.shared_buffers import SharedBuffers
from ..transports.shared_memory import why_no_shared_memory

logger = logging.getLogger(__name__)

Servers = Literal["rank", "host"]

MAX_BYTES_IN_BACKWARD = 64 * MIB  # of weights, for which "auto" accepts the memory of a second set
_LARGEST_MESSAGE = MIB // 4  # of a ring: more of them take processor time; fewer leave links idle
_LARGEST_SHARD = MIB  # that gloo divides into messages
_TRANSPORTS = ("auto", "shared_memory", "exchange")


class FusionStrategy(DDPStrategy):
    """Every rank is a worker and a server; server i sums shard i of every buffer while backward runs.

        rank 0   backward  [ shard 0 | shard 1 ] --+--> server 0: shard 0 of all ranks, summed --+--> step
        rank 1   backward  [ shard 0 | shard 1 ] --+--> server 1: shard 1 of all ranks, summed --+--> step

    Buffers are filled in the order in which gradients arrive; shards are equal regardless of the sizes of parameters.
    Ranks of one host read each other's buffers in shared memory; between hosts shards are sent through gloo. With
    `shard_optimizer` a server keeps the optimizer state of its shard only, and updates that shard of the weights: as
    soon as it is summed, unless all gradients are needed first (clipping, fp16, weights from `training_step`).

    Arguments that are not listed are those of DDPStrategy.

    Args:
        buffer_mb: Size of a buffer in MiB, sent through gloo in chunks of at most 1 MiB for each server (a quarter of
            it with `shard_optimizer`); `None`: 4, and between hosts a sixteenth of the gradients, from 1 to 4.
        max_in_flight: Chunks that are sent through gloo at once, at most, each with its own copy. Inside a host buffers
            are summed in place, and this has no effect.
        reduce_dtype: Dtype in which gradients and sums are sent: their own (`None`), `bf16` or `fp16`. Inside a host
            they are added in fp32. What overflows in fp16 is infinite, and ends as `on_nonfinite` of the Trainer says.
        transport: `auto`, `shared_memory` (inside each host) or `exchange` (gloo only).
        servers: `rank`: every rank is a server; `host`: the first rank of each host.
        communication_thread: Move buffers on a separate thread while backward runs, instead of on backward's own thread
            between two buffers; `auto`: on CUDA and between hosts.
        shard_optimizer: Each rank keeps and steps the optimizer for its shard of the weights only.
        optimizer_in_backward: With `shard_optimizer`: update shards while backward runs, with a second set of weights;
            `auto`: if the weights have at most 64 MiB.

    """

    largest_cap_mb = 4.0

    def __init__(
        self,
        *,
        devices: int | str = "auto",
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        buffer_mb: float | None = None,
        max_in_flight: int = 4,
        reduce_dtype: Literal["bf16", "fp16"] | None = None,
        transport: Literal["auto", "shared_memory", "exchange"] = "auto",
        servers: Servers = "rank",
        communication_thread: Literal["auto"] | bool = "auto",
        shard_optimizer: bool = False,
        optimizer_in_backward: Literal["auto"] | bool = "auto",
        find_unused_parameters: Unused = "auto",
        broadcast_buffers: bool = True,
        record_timeline: bool = False,
        timeout_seconds: float = 1800.0,
        backend: str = "auto",
        launcher: str = "local",
    ) -> None:
        if buffer_mb is not None and not buffer_mb > 0:
            raise UserError(f"buffer_mb must be above 0 MiB, got {buffer_mb}.")
        super().__init__(
            devices=devices,
            device=device,
            accumulate=accumulate,
            micro_batch_size=micro_batch_size,
            bucket_cap_mb=buffer_mb,
            find_unused_parameters=find_unused_parameters,
            transport="process_group",  # until prepare_optimizer replaces it
            reduce_dtype=reduce_dtype,
            broadcast_buffers=broadcast_buffers,
            record_timeline=record_timeline,
            timeout_seconds=timeout_seconds,
            backend=backend,
            launcher=launcher,
        )
        for name, value, valid in (("transport", transport, _TRANSPORTS), ("servers", servers, ("rank", "host"))):
            if value not in valid:
                raise UserError(f"{name}={value!r} is unknown.{nearest(value, valid)} Choose {', '.join(valid)}.")
        if type(max_in_flight) is not int or max_in_flight < 1:
            raise UserError(f"max_in_flight must be a whole number of chunks, at least 1, got {max_in_flight!r}.")
        switches = {"communication_thread": communication_thread, "optimizer_in_backward": optimizer_in_backward}
        for name, choice in switches.items():
            if choice not in ("auto", True, False):
                raise UserError(f"{name} must be auto, true or false, got {choice!r}.")
        if self.auto_micro_batch and shard_optimizer:
            raise UserError(
                "micro_batch_size=auto does not work with shard_optimizer=true, where no rank has all gradients; give "
                "strategy.micro_batch_size as a number."
            )
        self.transport_name = transport
        self.servers: Servers = servers
        self.communication_thread = communication_thread
        self.shard_optimizer = shard_optimizer
        self.fusion_settings = FusionSettings(
            _LARGEST_MESSAGE if shard_optimizer else _LARGEST_SHARD,
            max_in_flight,
            self.settings.reduce_dtype,
            shard_optimizer,
        )
        self._in_backward = optimizer_in_backward
        self._steps_in_backward = False  # what ranks decided
        self._transport: ShardTransport | None = None
        self._thread: CommunicationThread | None = None
        self._phase_optimizer: PhaseOptimizer | None = None
        self._sharded: ShardedOptimizer | None = None
        self._saved_state: dict[int, Any] = {}  # loaded before the first step shows this rank's shards
        self._saved_for: list[nn.Parameter] = []  # of these, by index

    # ---- Before and after training

    def check_phases(self, task: TaskModule) -> None:
        raise UserError(
            f"{type(task).__name__} has phases, which {type(self).__name__} cannot train: its buffers and servers are "
            "those of one optimizer. Type strategy=ddp, strategy=dp, strategy=fsdp, strategy=pipeline or "
            "strategy=single."
        )

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Register hooks on all trained parameters and open the transport of their gradients; collective."""
        self._saved_state, self._phase_optimizer = {}, phase_optimizer
        if self.shard_optimizer:
            remedy = "or set strategy.shard_optimizer=false; strategy=fsdp shards Muon too"
            check_elementwise(members(phase_optimizer.optimizer), "shard_optimizer=true", remedy)
            if self.device.type != "cpu":
                raise UserError("shard_optimizer=true works on the CPU only; set strategy.shard_optimizer=false.")
            references_to(task, phase_optimizer.parameters, moved="which shard_optimizer=true moves to its buffers")
        super().prepare_optimizer(task, phase_optimizer)
        assert self.reducer is not None
        self._steps_in_backward = self.shard_optimizer and self._can_step_in_backward(phase_optimizer)
        self._transport = self._open_transport()
        is_remote = self.device.type == "cuda" or len(self._hosts.ranks) > 1
        if self.communication_thread is True or (self.communication_thread == "auto" and is_remote):
            self._thread = CommunicationThread(
                self._transport, failure_store=self.reducer.failure_store, rank=self.comm.rank, device=self.device
            )
        # Before the first backward, which makes the buckets in the memory of the transport.
        self.reducer.transport.close()
        self.reducer.transport = self._thread or self._transport

    def is_outdated(self, phase_optimizers: Sequence[PhaseOptimizer]) -> bool:
        is_outdated = super().is_outdated(phase_optimizers)
        if self._tried_hooks:
            self._steps_in_backward = False  # hooks expect one call for each step
        return is_outdated

    def retrain(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> None:
        state, owners = self._saved_state, self._saved_for
        if self.shard_optimizer and self.reducer is not None:
            self._check_no_gradients(self.reducer, phase_optimizers[0])
        if self._sharded is not None:
            # In full, as the new buffers have other shards; and before the transport with the weights is closed.
            state, owners = self._sharded.full_state(self.comm), self._sharded.parameters
            self._sharded.release()
            self._sharded = None
        super().retrain(task, phase_optimizers)
        self._saved_for = phase_optimizers[0].parameters
        # By parameter: indices of the old groups are not those of the new ones.
        index_of = {id(parameter): index for index, parameter in enumerate(self._saved_for)}
        by_owner = {id(owners[index]): values for index, values in state.items()}
        self._saved_state = {index_of[owner]: values for owner, values in by_owner.items() if owner in index_of}

    def _check_no_gradients(self, reducer: Reducer, phase_optimizer: PhaseOptimizer) -> None:
        """Raise UserError if the optimizer has a parameter with gradients of earlier steps, summed on a shard only."""
        present = set(map(id, phase_optimizer.parameters))
        for entry in reducer.entries:
            if id(entry.parameter) in present and entry.parameter.grad is not None:
                raise UserError(
                    f"{entry.name} came into the optimizer with gradients of earlier steps, which "
                    "shard_optimizer=true does not sum for parameters without an optimizer. Freeze it until then "
                    "(requires_grad_(False)), or set strategy.shard_optimizer=false."
                )

    @property
    def _divided_by(self) -> str | None:
        return "shard_optimizer" if self.shard_optimizer else None

    def teardown(self) -> None:
        """Move parameters out of the buffers and leave the group; may be called twice."""
        # First the parameters, which are in the memory that `super` releases.
        if self._sharded is not None:
            self._sharded.release()
            self._sharded = None
        self._transport, self._thread, self._phase_optimizer = None, None, None
        self._saved_state, self._saved_for = {}, []
        super().teardown()

    @property
    def bytes_a_step(self) -> int | None:
        """Bytes that this rank sends (in shared memory: reads from and writes to others) in a step; None before it."""
        return None if self._transport is None else self._transport.bytes_a_step

    def _new_timeline(self) -> Timeline:
        return Timeline(self.comm.rank, "buffer", size_key="strategy.buffer_mb")

    def _can_step_in_backward(self, phase_optimizer: PhaseOptimizer) -> bool:
        """Return True if servers update their shards while backward runs, the same on every rank; collective."""
        is_wanted = self._in_backward
        if is_wanted == "auto":
            is_wanted = sum(parameter.nbytes for parameter in self._all_trained) <= MAX_BYTES_IN_BACKWARD
        optimizer = phase_optimizer.optimizer
        # Private: torch has no public way to ask for them.
        has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        needs_all_gradients = (
            phase_optimizer.clip.limits
            or phase_optimizer.skip_nonfinite
            or self.precision.scaler is not None
            or has_hooks  # which expect one call for each step
        )
        # Ranks that gather weights in backward and after it would wait for each other.
        return not self.comm.any_rank(not is_wanted or needs_all_gradients)

    # ---- Transport selection

    def _open_transport(self) -> ShardTransport:
        """Return the transport; "auto" is shared memory inside each host if that works. Collective.

        Raises UserError on every rank if the requested one cannot work.
        """
        name, group, hosts = self.transport_name, self.comm.group, self._hosts
        local: dist.ProcessGroup | None = group
        if len(hosts.ranks) > 1:
            local = self._own_groups.new_of_sets(hosts.ranks, group, backend="gloo")
        assert local is not None
        reason = _why_no_shared_buffers(hosts, group, local, self.servers)
        if name != "exchange" and reason is None:
            return self._open_shared_buffers(hosts, local)
        if name == "shared_memory":
            raise UserError(f"transport=shared_memory cannot work here: {reason}. Set strategy.transport=auto.")
        if self.servers == "host" and group.size() > 1:
            why = "transport=exchange does not use it" if name == "exchange" else f"it cannot work here: {reason}"
            raise UserError(f"servers=host needs shared memory on each host, but {why}. Set strategy.servers=rank.")
        # Ranks on hosts of their own have nothing to share, which is no news.
        if name == "auto" and group.rank() == 0 and group.size() > len(hosts.ranks):
            logger.info("buffers are sent through gloo instead of shared memory: %s", reason)
        groups = open_server_groups([range(group.size())], group, own_groups=self._own_groups)
        assert groups is not None
        return self._open_exchange(groups, self.device)

    def _open_shared_buffers(self, hosts: HostLayout, local: dist.ProcessGroup) -> SharedBuffers:
        assert self.reducer is not None
        num_servers = 1 if self.servers == "host" else hosts.fewest_ranks
        groups = open_server_groups(hosts.columns(num_servers), self.comm.group, own_groups=self._own_groups)
        between = None
        if groups is not None and len(hosts.ranks) > 1:
            between = self._open_exchange(groups, torch.device("cpu"))  # its buffers are in shared memory
        return SharedBuffers(
            local,
            names=hosts.ranks_on_host(self.comm.rank),
            between=between,
            num_servers=num_servers,
            device=self.device,
            failure_store=self.reducer.failure_store,
            timeout_seconds=self.ranks.timeout_seconds,
            settings=replace(self.fusion_settings, second_weights=self._steps_in_backward),
            num_gradients=self._num_gradients,
        )

    def _open_exchange(self, groups: ServerGroups, device: torch.device) -> GlooExchange:
        assert self.reducer is not None
        return GlooExchange(
            groups,
            failure_store=self.reducer.failure_store,
            device=device,
            timeout_seconds=self.ranks.timeout_seconds,
            settings=replace(self.fusion_settings, second_weights=self._steps_in_backward),
            num_gradients=self._num_gradients,
        )

    def _num_gradients(self) -> list[int]:
        assert self.reducer is not None
        return [0 if layout.sparse else layout.numel for layout in self.reducer.plan.buckets]

    # ---- A step

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Leave in every `.grad` the gradient of the weighted mean loss over the whole global batch; collective.

        With steps in backward also leave the new weights in the next set.
        """
        if self._transport is not None:
            # The first step shows the buffers, and whether a division by the sum of weights follows backward.
            steps = self._steps_in_backward and self._sharded is not None and self._weighted is False
            self._transport.on_summed = self._step_shard if steps else None
        return super().forward_backward(task, batch)

    def optimizer_step(self, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Clip, update this rank's shard of the weights or all of them, and drop the gradients; collective."""
        if not self.shard_optimizer:
            return super().optimizer_step(phase_optimizer)
        assert self._transport is not None
        sharded, norm = self._sharded_optimizer(phase_optimizer), None
        if self._transport.on_summed is None:
            norm = self._update_shards(sharded, phase_optimizer)
            self._gather_weights()
        elif phase_optimizer.clip.norm is not None:  # an infinite limit: the norm is only logged
            norm = self._grad_norm(phase_optimizer)
        phase_optimizer.zero_grad()
        sharded.use_next_weights()
        return norm

    def _step_shard(self, buffer: int) -> None:
        """Update this rank's shards of a buffer's weights."""
        assert self._transport is not None and self._sharded is not None and self._phase_optimizer is not None
        # May be called on the communication thread, while backward runs.
        used = [bool(count) for count in self._transport.used_flags(buffer).tolist()]
        self._sharded.step_buffer(buffer, used, partial(self._phase_optimizer.update, norm=None))

    def _update_shards(self, sharded: ShardedOptimizer, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Unscale, clip and update this rank's shard of the weights; collective."""
        norm = None
        with sharded.on_shards():
            if self.precision.scaler is not None:
                overflow = ~torch.isfinite(self._grad_norm(phase_optimizer))  # on any rank: all skip the same steps
                sharded.unscale(phase_optimizer.unscale, overflow=overflow)
            if phase_optimizer.clip.norm is not None or phase_optimizer.skip_nonfinite:
                norm = self._grad_norm(phase_optimizer)
            if phase_optimizer.clip.norm is not None and norm is not None:
                phase_optimizer.clip_by_norm(norm)
            elif phase_optimizer.clip.value is not None:
                phase_optimizer.clip_by_value()
            phase_optimizer.update(norm=norm)
        return norm

    def _grad_norm(self, phase_optimizer: PhaseOptimizer) -> Tensor:
        if not self.shard_optimizer:
            return super()._grad_norm(phase_optimizer)
        local_norm = total_norm(self._sharded_optimizer(phase_optimizer).gradients(), self.device)
        # In float64: the square of a norm in float32 overflows above 2e19.
        return self.comm.all_reduce(local_norm.double().square()).sqrt().to(local_norm.dtype)

    def _sharded_optimizer(self, phase_optimizer: PhaseOptimizer) -> ShardedOptimizer:
        """Return this rank's shard of the optimizer, created once the first backward has shown the buffers."""
        if self._sharded is None:
            assert self.reducer is not None and self._transport is not None
            buckets = self.reducer.buckets
            self._sharded = ShardedOptimizer(phase_optimizer.optimizer, buckets, self._transport, self._saved_state)
            self._saved_state = {}
        return self._sharded

    def _gather_weights(self) -> None:
        """Leave on every rank the shards of the next weights that all ranks have updated; collective."""
        assert self.reducer is not None and self._transport is not None
        where = f"gathering the weights of step {self.reducer.step - 1}"
        transport = self._thread or self._transport
        # All are started before the first is waited for, so that links stay busy.
        works = [transport.gather_weights(bucket.index, where=where) for bucket in self.reducer.buckets]
        for work in works:
            work.wait()

    # ---- State, full and the same as under every other strategy

    def optimizer_state_dict(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> dict[str, Any]:
        if not self.shard_optimizer:
            return super().optimizer_state_dict(task, phase_optimizer)
        settings = state_dict_without_state(phase_optimizer.optimizer)
        if self._sharded is None:  # before the first step
            self._saved_state = in_memory(self._saved_state)  # a save may replace the checkpoint that it is in
            return {**settings, "state": self._saved_state}
        return {**settings, "state": self._sharded.full_state(self.comm)}

    def load_optimizer_state_dict(
        self, task: TaskModule, phase_optimizer: PhaseOptimizer, saved: dict[str, Any]
    ) -> None:
        """Load the optimizer's full state, of which this rank reads its shard when the first step has shown it."""
        if not self.shard_optimizer:
            super().load_optimizer_state_dict(task, phase_optimizer, saved)
            return
        # Without the state, which is that of whole parameters: the optimizer would keep all of it on every rank.
        Strategy.load_optimizer_state_dict(self, task, phase_optimizer, {**saved, "state": {}})
        if self._sharded is None:
            self._saved_state, self._saved_for = dict(saved["state"]), phase_optimizer.parameters
        else:  # a rollback
            self._sharded.load_state(saved["state"])

    def shards(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> ShardedState | None:
        """Return this rank's shards of the state; `None` if the optimizer is not sharded, or before the first step."""
        return None if self._sharded is None else self._sharded.sharded_state(task, self.comm)

    def local_state(self, task: TaskModule) -> dict[str, Tensor]:
        """Return all parameters and buffers: every rank holds them."""
        return named_state(task)


def _why_no_shared_buffers(
    hosts: HostLayout, group: dist.ProcessGroup, local: dist.ProcessGroup, servers: Servers
) -> str | None:
    """Return None if the ranks of every host can share memory, else the first reason. Collective."""
    if group.size() == 1:
        return "there is only one rank"
    if len(hosts.ranks) == group.size() and servers == "rank":
        return "every rank is on a different host"
    if servers == "rank" and not hosts.is_even:
        return "hosts have unequal numbers of ranks"
    # Over all hosts: if one host cannot share memory, all ranks use the other transport.
    reasons = gather(why_no_shared_memory(local, torch.device("cpu")), group)
    return next((reason for reason in reasons if reason is not None), None)
