"""The strategy `fusion`: gradients in balanced buffers, of which every rank sums an equal shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch.distributed as dist
from annotated_types import Ge, Gt, Unit
from torch import Tensor

from trainkit.checkpoint.sharded_state import ShardedState
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.devices import has_streams
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput
from trainkit.model.references import references_to
from trainkit.optim.chained_optimizer import members
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.separable import SeparableCheck, step_hooks
from trainkit.strategy import named_state
from trainkit.task import TaskModule

from ..multiprocess import MultiProcessStrategy
from ..optimizer_shards import ShardedOptimizer, check_elementwise, state_dict_without_state
from ..reducer.bucket_plan import MIB
from ..reducer.bucket_recorder import Timeline
from ..reducer.grad_norm import total_norm
from ..reducer.gradient_reducer import REDUCE_DTYPES, GradientReducer, check_rounding
from ..reducer.reducer import ReducerSettings, Unused
from ..transports.communication_thread import CommunicationThread
from ..transports.hosts import HostLayout
from ..transports.process_group import ProcessGroupTransport, Transport
from ..transports.sharded import FusionSettings, ShardTransport
from ..transports.shared_buffers import Servers, ShardTransportName, open_shard_transport

MAX_BYTES_IN_BACKWARD = 64 * MIB  # of weights, for which "auto" accepts the memory of a second set
_LARGEST_MESSAGE = MIB // 4  # of a ring: more of them take processor time; fewer leave links idle
_LARGEST_SHARD = MIB  # that gloo divides into messages
_LARGEST_BUFFER_MB = 4.0


@dataclass(kw_only=True, eq=False, repr=False)
class FusionStrategy(MultiProcessStrategy):
    """Every rank is a worker and a server; server i sums shard i of every buffer while backward runs.

        rank 0   backward  [ shard 0 | shard 1 ] --+--> server 0: shard 0 of all ranks, summed --+--> step
        rank 1   backward  [ shard 0 | shard 1 ] --+--> server 1: shard 1 of all ranks, summed --+--> step

    Buffers are filled in the order in which gradients arrive; shards are equal regardless of the sizes of parameters.
    Ranks of one host read each other's buffers in shared memory; between hosts shards are sent through gloo. With
    `shard_optimizer` a server keeps the optimizer state of its shard only, and updates that shard of the weights: as
    soon as it is summed, unless all gradients are needed first (clipping, fp16, weights from `training_step`).

    Further settings are those of `MultiProcessStrategy`.

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
        find_unused_parameters: Parameters without a gradient: `auto` (handled), `error` (named), `graph` (found before
            backward, by a walk over the autograd graph).
        record_timeline: Record when each bucket was ready, started and done: every rank writes the last 200 steps to
            timeline_rank_<k>.json, for ui.perfetto.dev; rank 0 draws one in the report and logs advice.

    """

    supports_auto_micro_batch = True
    is_replicated = True

    buffer_mb: Annotated[float, Gt(0), Unit("MiB")] | None = None
    max_in_flight: Annotated[int, Ge(1), Unit("chunks")] = 4
    reduce_dtype: Literal["bf16", "fp16"] | None = None
    transport: ShardTransportName = "auto"
    servers: Servers = "rank"
    communication_thread: Literal["auto"] | bool = "auto"
    shard_optimizer: bool = False
    optimizer_in_backward: Literal["auto"] | bool = "auto"
    find_unused_parameters: Unused = "auto"
    record_timeline: bool = False
    process_group: dist.ProcessGroup | None = field(default=None, init=False)  # buffers are exchanged by all ranks
    gradients: GradientReducer = field(init=False)

    def __post_init__(self, device: str, micro_batch_size: int | Literal["auto"] | None) -> None:
        super().__post_init__(device, micro_batch_size)
        if self.auto_micro_batch and self.shard_optimizer:
            raise UserError(
                "micro_batch_size=auto does not work with shard_optimizer=true, where no rank has all gradients; give "
                "strategy.micro_batch_size as a number."
            )
        if not self.shard_optimizer:  # callbacks ask whether gradients are complete
            self.optimizer_in_backward = False
        self.fusion_settings = FusionSettings(
            _LARGEST_MESSAGE if self.shard_optimizer else _LARGEST_SHARD,
            self.max_in_flight,
            REDUCE_DTYPES[self.reduce_dtype],
            self.shard_optimizer,
        )
        settings = ReducerSettings(
            average=False,  # losses are weighted by their fraction of the global batch, so their gradients are summed
            bucket_cap_mb=self.buffer_mb,
            find_unused_parameters=self.find_unused_parameters,
            timeout_seconds=self.timeout_seconds,
        )
        self.gradients = GradientReducer(
            settings,
            largest_cap_mb=_LARGEST_BUFFER_MB,
            open_transport=self._open_transport,
            timeline=partial(Timeline, word="buffer", size_key="strategy.buffer_mb") if self.record_timeline else None,
            strategy=type(self).__name__,
        )
        self._steps_in_backward = False  # what ranks decided
        self._transport: ShardTransport | None = None
        self._thread: CommunicationThread | None = None  # which moves the buffers of `_transport`
        self._shards: ShardedOptimizer | None = None
        self._separable: SeparableCheck | None = None  # with `shard_optimizer`

    # ---- Before and after training

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Register hooks on all trained parameters and open the transport of their gradients; collective."""
        check_rounding(self.reduce_dtype, phase_optimizer, self.precision)
        if self.shard_optimizer:
            remedy = "or set strategy.shard_optimizer=false; strategy=fsdp shards Muon too"
            check_elementwise(members(phase_optimizer.optimizer), "shard_optimizer=true", remedy)
            if self.device.type != "cpu":
                raise UserError("shard_optimizer=true works on the CPU only; set strategy.shard_optimizer=false.")
            references_to(task, phase_optimizer.parameters, moved="which shard_optimizer=true moves to its buffers")
            self._separable = SeparableCheck("shard_optimizer", phase_optimizer)
            # An overflow in one rank's shards must skip the step on all of them.
            phase_optimizer.max_over_ranks = partial(self.comm.reduce_in_place, op="max", where="the overflow check")
        self._steps_in_backward = self.shard_optimizer and self._can_step_in_backward(phase_optimizer)
        self.gradients.add(task, phase_optimizer, comm=self.comm, log_dir=self.log_dir)
        if self.shard_optimizer:
            assert self._transport is not None
            self._shards = ShardedOptimizer(phase_optimizer, self._transport)

    def _open_transport(self, process_group: ProcessGroupTransport, *, hosts: HostLayout) -> Transport:
        """Return the transport of the buffers of a new Reducer; collective."""
        self._transport = open_shard_transport(
            process_group,
            name=self.transport,
            servers=self.servers,
            settings=replace(self.fusion_settings, second_weights=self._steps_in_backward),
            num_gradients=self._num_gradients,
            hosts=hosts,
            own_groups=self._own_groups,
        )
        is_remote = has_streams(self.device) or len(hosts.ranks) > 1
        uses_thread = is_remote if self.communication_thread == "auto" else self.communication_thread
        self._thread = None
        if uses_thread:
            self._thread = CommunicationThread(
                self._transport, failure_store=process_group.failure_store, rank=self.comm.rank, device=self.device
            )
        return self._thread or self._transport

    def _num_gradients(self) -> list[int]:
        """Return the elements of the gradients in each buffer, once the first backward has shown the buffers."""
        assert self.gradients.reducer is not None
        return [0 if layout.sparse else layout.numel for layout in self.gradients.reducer.plan.buckets]

    def _can_step_in_backward(self, phase_optimizer: PhaseOptimizer) -> bool:
        """Return True if servers update their shards while backward runs, the same on every rank; collective."""
        is_wanted = self.optimizer_in_backward
        if is_wanted == "auto":
            is_wanted = sum(parameter.nbytes for parameter in self._all_trained) <= MAX_BYTES_IN_BACKWARD
        needs_all_gradients = (
            phase_optimizer.clip.limits
            or phase_optimizer.skip_nonfinite
            or self.precision.scaler is not None
            or step_hooks(phase_optimizer.optimizer)  # which expect one call for each step
        )
        # Ranks that gather weights in backward and after it would wait for each other.
        return not self.comm.any_rank(not is_wanted or bool(needs_all_gradients))

    def is_outdated(self, phase_optimizers: Sequence[PhaseOptimizer]) -> bool:
        if self._separable is not None:
            self._separable.check()  # a hook may have been registered
            if self._separable.hooks and self._transport is not None:  # they expect one call for each step
                self._steps_in_backward, self._transport.on_summed = False, None
        return super().is_outdated(phase_optimizers)

    def retrain(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> None:
        """Reduce the gradients of the parameters that require one now; collective."""
        state = None
        if self._shards is not None:
            self._check_no_gradients(phase_optimizers[0])
            state = self._shards.take_state(self.comm)  # before the transport with the weights is closed
        super().retrain(task, phase_optimizers)
        self.gradients.reset()
        for phase_optimizer in phase_optimizers:
            self.prepare_optimizer(task, phase_optimizer)
        if self._shards is not None and state is not None:
            self._shards.give_state(state)

    def _check_no_gradients(self, phase_optimizer: PhaseOptimizer) -> None:
        """Raise UserError if the optimizer has a parameter with gradients of earlier steps, summed on a shard only."""
        assert self.gradients.reducer is not None
        present = set(map(id, phase_optimizer.parameters))
        for entry in self.gradients.reducer.entries:
            if id(entry.parameter) in present and entry.parameter.grad is not None:
                raise UserError(
                    f"{entry.name} came into the optimizer with gradients of earlier steps, which "
                    "shard_optimizer=true does not sum for parameters without an optimizer. Freeze it until then "
                    "(requires_grad_(False)), or set strategy.shard_optimizer=false."
                )

    def _release(self) -> None:
        # The parameters are in the memory of the transport, which is closed next.
        if self._shards is not None:
            self._shards.release()
        self._shards, self._separable, self._transport, self._thread = None, None, None, None

    @property
    def bytes_a_step(self) -> int | None:
        """Bytes that this rank sends (in shared memory: reads from and writes to others) in a step; None before it."""
        return None if self._transport is None else self._transport.bytes_a_step

    # ---- A step

    def _backward(self, output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> None:
        """Add the gradients of this micro-batch and free its graph."""
        self.gradients.begin_backward(output)
        super()._backward(output, micro_batch, batch)

    def optimizer_step(self, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Clip, update this rank's shard of the weights or all of them, and drop the gradients; collective.

        With steps in backward the shards are updated already: what is left is to use the new weights.
        """
        if self._shards is None:
            return super().optimizer_step(phase_optimizer)
        assert self._transport is not None and self.gradients.reducer is not None
        shards, norm = self._shards, None
        if not shards.is_open:
            shards.open(self.gradients.reducer.buckets)
        if self._transport.on_summed is None:
            with shards.on_shards():
                norm = super().optimizer_step(phase_optimizer)
            self._gather_weights()
        elif phase_optimizer.clip.norm is not None:  # an infinite limit: the norm is only logged
            norm = self._grad_norm(phase_optimizer)
        phase_optimizer.zero_grad()
        shards.use_next_weights()
        # The first step shows the buffers, and whether a division by the sum of weights follows backward.
        steps = self._steps_in_backward and self._weighted is False
        self._transport.on_summed = shards.step_buffer if steps else None
        return norm

    def _gather_weights(self) -> None:
        """Leave on every rank the shards of the next weights that all ranks have updated; collective."""
        reducer, transport = self.gradients.reducer, self._thread or self._transport
        assert reducer is not None and transport is not None
        where = f"gathering the weights of step {reducer.step - 1}"
        # All are started before the first is waited for, so that links stay busy.
        works = [transport.gather_weights(bucket.index, where=where) for bucket in reducer.buckets]
        for work in works:
            work.wait()

    def _grad_norm(self, phase_optimizer: PhaseOptimizer) -> Tensor:
        if self._shards is None:
            return self.gradients.norm(phase_optimizer, self.device)
        local_norm = total_norm(self._shards.gradients(), self.device)
        # In float64: the square of a norm in float32 overflows above 2e19.
        return self.comm.all_reduce(local_norm.double().square()).sqrt().to(local_norm.dtype)

    # ---- State, full and the same as under every other strategy

    def optimizer_state_dict(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> dict[str, Any]:
        if self._shards is None:
            return super().optimizer_state_dict(task, phase_optimizer)
        settings = state_dict_without_state(phase_optimizer.optimizer)
        return {**settings, "state": self._shards.full_state(self.comm)}

    def load_optimizer_state_dict(
        self, task: TaskModule, phase_optimizer: PhaseOptimizer, saved: dict[str, Any]
    ) -> None:
        """Load the optimizer's full state, of which this rank reads its shard when the first step has shown it."""
        if self._shards is None:
            super().load_optimizer_state_dict(task, phase_optimizer, saved)
            return
        # Without the state, which is that of whole parameters: the optimizer would keep all of it on every rank.
        super().load_optimizer_state_dict(task, phase_optimizer, {**saved, "state": {}})
        self._shards.load_state(saved["state"])

    def shards(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> ShardedState | None:
        """Return this rank's shards of the state; `None` if the optimizer is not sharded, or before the first step."""
        if self._shards is None or not self._shards.is_open:
            return None
        return self._shards.sharded_state(task, self.comm)

    def local_state(self, task: TaskModule) -> dict[str, Tensor]:
        """Return all parameters and buffers: every rank holds them."""
        return named_state(task)
