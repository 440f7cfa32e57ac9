"""The strategy `fusion`: gradients in balanced buffers, of which every rank sums an equal part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.checkpoint.shards import ShardedState
from trainkit.data.batch import StepBatch
from trainkit.distributed.collectives import gather
from trainkit.distributed.failure_store import FailureStore
from trainkit.errors import UserError, nearest
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.strategy import Strategy, named_state
from trainkit.task import TaskModule

from ..ddp.bucket_plan import MIB
from ..ddp.grad_norm import total_norm
from ..ddp.reducer import Unused
from ..ddp.shared_memory import why_no_shared_memory
from ..ddp.strategy import DDPStrategy
from ..ddp.timeline import Timeline
from .communication_thread import CommunicationThread
from .exchange import GlooExchange
from .host_copy import HostCopier, open_host_copier
from .partition import HostLayout, Servers
from .sharded_optimizer import ShardedOptimizer, check_elementwise, state_dict_without_state
from .shared_buffers import SharedBuffers
from .transport import FusionSettings, ServerGroups, ShardTransport, open_server_groups

logger = logging.getLogger(__name__)


def open_shard_transport(
    name: str,
    group: dist.ProcessGroup,
    *,
    host: str,
    servers: Servers,
    device: torch.device,
    failure_store: FailureStore,
    timeout_seconds: float,
    settings: FusionSettings,
    num_gradients: Callable[[], list[int]],
) -> ShardTransport:
    """Return the transport called `name`; "auto" is shared memory inside each host where that works. Collective.

    `host` names the machine that this rank is on. Raises UserError on every rank for what cannot be.
    """

    def exchange(channels: ServerGroups, device: torch.device, staging: HostCopier) -> GlooExchange:
        return GlooExchange(
            channels,
            failure_store=failure_store,
            device=device,
            staging=staging,
            timeout_seconds=timeout_seconds,
            settings=settings,
            num_gradients=num_gradients,
        )

    hosts = HostLayout.of(gather(host, group))
    local = _local_group(hosts, group)
    reason = _why_no_host_buffers(hosts, group, local, servers)
    if name != "exchange" and reason is None:
        channels = open_server_groups(hosts.columns(servers), group)
        alone = len(hosts.ranks) == 1
        return SharedBuffers(
            local,
            names=hosts.beside(group.rank()),
            between=None if alone or channels is None else exchange(channels, torch.device("cpu"), HostCopier()),
            num_servers=hosts.servers_of_a_host(servers),
            device=device,
            staging=open_host_copier(device),
            failure_store=failure_store,
            timeout_seconds=timeout_seconds,
            settings=settings,
            num_gradients=num_gradients,
        )
    if name == "shared_memory":
        raise UserError(f"transport=shared_memory cannot work here: {reason}. Set strategy.transport=auto.")
    if servers == "host" and group.size() > 1:
        why = "transport=exchange makes every rank one" if name == "exchange" else f"it cannot: {reason}"
        raise UserError(f"servers=host needs memory that a host's ranks share, and {why}. Set strategy.servers=rank.")
    if name == "auto" and group.rank() == 0 and group.size() > len(hosts.ranks):
        logger.info("buffers go through gloo, not through shared memory: %s", reason)
    channels = open_server_groups([range(group.size())], group)
    assert channels is not None
    return exchange(channels, device, open_host_copier(device))


def _local_group(hosts: HostLayout, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of this host's ranks. Collective."""
    if len(hosts.ranks) == 1:
        return group
    found = group
    for ranks in hosts.ranks:
        made = dist.new_group([dist.get_global_rank(group, rank) for rank in ranks], backend="gloo")
        if group.rank() in ranks:
            assert made is not None
            found = made
    return found


def _why_no_host_buffers(
    hosts: HostLayout, group: dist.ProcessGroup, local: dist.ProcessGroup, servers: Servers
) -> str | None:
    """Return None if the ranks of every host can share memory, else the first reason. Collective."""
    if group.size() == 1:
        return "there is one rank only"
    if len(hosts.ranks) == group.size() and servers == "rank":
        return "every rank is on a host of its own"
    if servers == "rank" and not hosts.are_even:
        return "hosts have unequal numbers of ranks"
    reasons = gather(why_no_shared_memory(local, torch.device("cpu")), group)
    return next((reason for reason in reasons if reason is not None), None)


def host_name() -> str:
    """Return what tells this machine from others: a number that its kernel drew when it started."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        import socket

        return socket.gethostname()


MAX_OVERLAPPED_BYTES = 64 * MIB  # of weights, of which a second set takes no memory worth saving
_TRANSPORTS = ("auto", "shared_memory", "exchange")
_SERVERS = ("rank", "host")
_WIRES = {"same": None, "bf16": torch.bfloat16}


class FusionStrategy(DDPStrategy):
    """Every rank is a worker and a server; server i sums part i of every buffer, while backward goes on.

        rank 0   backward  [ part 0 | part 1 ] --+--> server 0: part 0 of all ranks, summed --+--> step
        rank 1   backward  [ part 0 | part 1 ] --+--> server 1: part 1 of all ranks, summed --+--> step

    Buffers are filled in the order in which gradients arrive; the servers' parts are equal whatever the sizes of
    parameters. Ranks of one host read each other's buffers in shared memory; between hosts parts travel through gloo.
    With `shard_optimizer` a server updates its part of the weights, and keeps the optimizer's state of that part only:
    as soon as the part is summed, unless all gradients are needed first (clipping, fp16, weights of its own).

    Args:
        devices: Ranks to start on this machine; "auto" is one for each GPU, or two on the CPU.
        device: `auto`, `cpu` or `cuda`.
        accumulate: Micro-batches of a step on each rank.
        micro_batch_size: Samples on one device at once, at most; `auto` halves it whenever it does not fit into memory.
        buffer_mb: Size of a buffer in MiB; a parameter that is larger travels in several windows of this size.
        in_flight: Windows that travel through gloo at once, at most, each with a copy of its own; inside a host buffers
            are summed where they are, in memory that is taken once.
        wire: Number format in which gradients travel: `same` as they are, or `bf16`, summed in fp32.
        transport: `auto`, `shared_memory` (inside each host) or `exchange` (gloo only).
        servers: `rank`: every rank is a server; `host`: the first rank of each host.
        communication_thread: Whether a thread moves buffers while backward goes on, instead of the thread that runs
            backward itself, in between; `auto`: on CUDA.
        shard_optimizer: Whether each rank keeps and steps the optimizer for its part of the weights only.
        overlap_optimizer: Whether servers then update their part while backward goes on, with a second set of weights;
            `auto`: for weights of at most 64 MiB.
        unused: Parameters without a gradient: `auto` handles them, `error` names them, `find` looks for them.
        broadcast_buffers: Whether buffers (batch-norm statistics) are those of rank 0 after every step.
        timeline: Whether to record when each buffer was ready, started and done.
        timeout_seconds: Seconds to wait for another rank.
        backend: `auto` (gloo on the CPU, nccl on CUDA), or a backend of torch.distributed.
        launcher: Who starts the ranks: `local` (this process, on this machine) or `ray` (a Ray cluster).

    """

    def __init__(
        self,
        *,
        devices: int | str = "auto",
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        buffer_mb: float = 4.0,
        in_flight: int = 4,
        wire: Literal["same", "bf16"] = "same",
        transport: Literal["auto", "shared_memory", "exchange"] = "auto",
        servers: Servers = "rank",
        communication_thread: Literal["auto"] | bool = "auto",
        shard_optimizer: bool = False,
        overlap_optimizer: Literal["auto"] | bool = "auto",
        unused: Unused = "auto",
        broadcast_buffers: bool = True,
        timeline: bool = False,
        timeout_seconds: float = 1800.0,
        backend: str = "auto",
        launcher: str = "local",
    ) -> None:
        super().__init__(
            devices=devices,
            device=device,
            accumulate=accumulate,
            micro_batch_size=micro_batch_size,
            bucket_mb=_positive("buffer_mb", buffer_mb),
            unused=unused,
            transport="group",  # until ours takes its place
            broadcast_buffers=broadcast_buffers,
            timeline=timeline,
            timeout_seconds=timeout_seconds,
            backend=backend,
            launcher=launcher,
        )
        for name, value, valid in (
            ("wire", wire, tuple(_WIRES)),
            ("transport", transport, _TRANSPORTS),
            ("servers", servers, _SERVERS),
        ):
            if value not in valid:
                raise UserError(f"{name}={value!r} is unknown.{nearest(value, valid)} Choose {', '.join(valid)}.")
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
            raise UserError(f"in_flight must be a whole number of windows, at least 1, got {in_flight!r}.")
        for name, choice in (("communication_thread", communication_thread), ("overlap_optimizer", overlap_optimizer)):
            if choice not in ("auto", True, False):
                raise UserError(f"{name} must be auto, true or false, got {choice!r}.")
        self.transport_name = transport
        self.servers: Servers = servers
        self.communication_thread = communication_thread
        self.shard_optimizer = shard_optimizer
        self._overlap_choice = overlap_optimizer
        if self._is_auto and shard_optimizer:
            raise UserError(
                "micro_batch_size=auto does not go with shard_optimizer=true, where no rank has all gradients; give "
                "strategy.micro_batch_size as a number."
            )
        self.buffer_settings = FusionSettings(int(buffer_mb * MIB), in_flight, _WIRES[wire], shard_optimizer)
        self._transport: ShardTransport | None = None
        self._optimization: PhaseOptimizer | None = None
        self._sharded: ShardedOptimizer | None = None
        self._steps_inside = False  # whether servers may step while backward goes on
        self._saved_state: dict[int, Any] = {}  # of an optimizer whose pieces are not known yet

    # ---- Before and after training

    def check_phases(self, task: TaskModule) -> None:
        """Raise UserError: buffers and servers are those of one optimizer."""
        raise UserError(
            f"{type(task).__name__} has phases, which {type(self).__name__} cannot train: each has a step and "
            f"optimizer of its own, and {type(self).__name__} prepares one of each. Type strategy=ddp, strategy=dp, "
            "strategy=pipeline or strategy=single."
        )

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Listen to the gradients of all trained parameters and open the way that they take; collective."""
        self._saved_state, self._optimization = {}, phase_optimizer
        if self.shard_optimizer:
            self._check_shards(phase_optimizer)
        super().prepare_optimizer(task, phase_optimizer)
        assert self.reducer is not None
        self._steps_inside = self.shard_optimizer and self._may_step_inside(phase_optimizer)
        self._transport = self._open_transport()
        self.reducer.transport.close()
        self.reducer.transport = self._transport

    def _may_step_inside(self, phase_optimizer: PhaseOptimizer) -> bool:
        """Return whether servers update their part while backward goes on; collective."""
        if self._overlap_choice == "auto":
            wanted = sum(parameter.nbytes for parameter in self._all_trained) <= MAX_OVERLAPPED_BYTES
        else:
            wanted = bool(self._overlap_choice)
        waits = not wanted or self.precision.scaler is not None or _needs_all_gradients(phase_optimizer)
        return not self.comm.any_rank(waits)

    def _check_shards(self, phase_optimizer: PhaseOptimizer) -> None:
        check_elementwise(phase_optimizer.optimizer)
        if self.device.type != "cpu":
            raise UserError("shard_optimizer=true works on the CPU only; set strategy.shard_optimizer=false.")

    def _open_transport(self) -> ShardTransport:
        reducer = self.reducer
        assert reducer is not None

        def num_gradients() -> list[int]:
            return [0 if layout.sparse else layout.numel for layout in reducer.plan.buckets]

        transport = open_shard_transport(
            self.transport_name,
            self.comm.group,
            host=self.host(),
            servers=self.servers,
            device=self.device,
            failure_store=reducer.failure_store,
            timeout_seconds=self.ranks.timeout_seconds,
            settings=replace(self.buffer_settings, second_weights=self._steps_inside),
            num_gradients=num_gradients,
        )
        if not self._has_thread():
            return transport
        return CommunicationThread(
            transport, failure_store=reducer.failure_store, rank=self.comm.rank, device=self.device
        )

    def _has_thread(self) -> bool:
        if isinstance(self.communication_thread, bool):
            return self.communication_thread
        return self.device.type == "cuda"

    def host(self) -> str:
        """Return what the machine that this rank is on is called; ranks that return the same share its memory."""
        return host_name()

    def teardown(self) -> None:
        """Give parameters memory of their own again and leave the group; may be called twice."""
        if self._sharded is not None:
            self._sharded.release()
            self._sharded = None
        self._transport, self._optimization, self._saved_state = None, None, {}
        super().teardown()

    @property
    def bytes_a_step(self) -> int | None:
        """Bytes that this rank sends (in shared memory: reads from and writes to others) in a step, once known."""
        return None if self._transport is None else self._transport.bytes_a_step

    def _new_timeline(self) -> Timeline:
        return Timeline(rank=self.comm.rank, word="buffer", compressed="strategy.wire=bf16")

    # ---- A step

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Leave in every `.grad` the gradient of the weighted mean loss over the whole global batch; collective.

        With servers that step at once also leave the new weights beside the old ones.
        """
        if self._transport is not None:
            # Known after the first step: where the buffers are, and that no sum of weights is still to come.
            steps = self._steps_inside and self._sharded is not None and self._weighted is False
            self._transport.on_summed = self._step_part if steps else None
        return super().forward_backward(task, batch)

    def _step_part(self, buffer: int) -> None:
        """Update this rank's parts of a buffer's weights."""
        assert self._transport is not None and self._sharded is not None and self._optimization is not None
        used = [bool(count) for count in self._transport.used(buffer).tolist()]
        self._sharded.step_buffer(buffer, used, partial(self._optimization.update, norm=None))

    def optimizer_step(self, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Clip, update this rank's part of the weights or all of them, and drop the gradients; collective."""
        if not self.shard_optimizer:
            return super().optimizer_step(phase_optimizer)
        assert self._transport is not None
        sharded, norm = self._shards(phase_optimizer), None
        if self._transport.on_summed is None:
            norm = self._update_shards(sharded, phase_optimizer)
            self._share_weights()
        elif phase_optimizer.clip.norm is not None:  # without a limit
            norm = self._grad_norm(phase_optimizer)
        phase_optimizer.zero_grad()
        sharded.adopt()
        return norm

    def _update_shards(self, sharded: ShardedOptimizer, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Unscale, clip and update this rank's part of the weights; collective."""
        norm = None
        with sharded.on_shards():
            if self.precision.scaler is not None:
                overflow = ~torch.isfinite(self._grad_norm(phase_optimizer))  # anywhere: all skip the same steps
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
        """Return the global 2-norm of the gradients; collective."""
        if not self.shard_optimizer:
            return super()._grad_norm(phase_optimizer)
        own = total_norm(self._shards(phase_optimizer).gradients(), self.device)
        return self.comm.all_reduce(own.double().square()).sqrt().to(own.dtype)

    def _shards(self, phase_optimizer: PhaseOptimizer) -> ShardedOptimizer:
        """Return this rank's part of the optimizer, made after the first backward has shown the buffers."""
        if self._sharded is None:
            assert self.reducer is not None and self._transport is not None
            buckets = self.reducer.buckets
            self._sharded = ShardedOptimizer(phase_optimizer.optimizer, buckets, self._transport, self._saved_state)
            self._saved_state = {}
        return self._sharded

    def _share_weights(self) -> None:
        """Leave on every rank the weights that each has updated; collective."""
        assert self.reducer is not None and self._transport is not None
        where = f"gathering the weights of step {self.reducer.step - 1}"
        shares = [self._transport.share(bucket.index, where=where) for bucket in self.reducer.buckets]
        for share in shares:
            share.wait()

    # ---- State, whole and the same as under every other strategy

    def optimizer_state_dict(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> dict[str, Any]:
        """Return the optimizer's whole state; collective."""
        if not self.shard_optimizer:
            return super().optimizer_state_dict(task, phase_optimizer)
        settings = state_dict_without_state(phase_optimizer.optimizer)
        if self._sharded is None:  # no step has been made
            return {**settings, "state": self._saved_state}
        sum_of: Callable[[Tensor], Tensor] = self.comm.all_reduce
        return {**settings, "state": self._sharded.whole_state(sum_of, self.comm.all_gather_object)}

    def shards(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> ShardedState | None:
        """Return the state with this rank's pieces of it, where the optimizer is sharded and a step has been made."""
        return None if self._sharded is None else self._sharded.shards(task, self.comm.all_gather_object)

    def local_state(self, task: TaskModule) -> dict[str, Tensor]:
        """Return all parameters and buffers: every rank holds them."""
        return named_state(task)

    def load_optimizer_state_dict(
        self, task: TaskModule, phase_optimizer: PhaseOptimizer, saved: dict[str, Any]
    ) -> None:
        """Give the optimizer the state in `saved`, of which this rank will keep its part."""
        if not self.shard_optimizer:
            super().load_optimizer_state_dict(task, phase_optimizer, saved)
            return
        Strategy.load_optimizer_state_dict(self, task, phase_optimizer, {**saved, "state": {}})
        self._saved_state = dict(saved["state"])


def _needs_all_gradients(phase_optimizer: PhaseOptimizer) -> bool:
    """Return whether no part can be updated before all gradients are known, or somebody expects one step at a time."""
    optimizer = phase_optimizer.optimizer
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return phase_optimizer.clip.limits or phase_optimizer.skip_nonfinite or bool(hooks)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise UserError(f"{name} must be above 0 MiB, got {value}.")
    return value
