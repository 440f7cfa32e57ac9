"""DDPStrategy: one process per device, gradients summed in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Unit
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.devices import has_streams, of_rank
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.precision import Precision
from trainkit.optim.separable import SeparableCheck
from trainkit.strategy import PhaseTraining
from trainkit.task import TaskModule

from ..multiprocess import MultiProcessStrategy
from ..reducer.bucket import Bucket
from ..reducer.bucket_plan import DEFAULT_CAP_BYTES, MIB, ring_bytes
from ..reducer.bucket_recorder import Timeline
from ..reducer.gradient_reducer import REDUCE_DTYPES, GradientReducer, check_rounding
from ..reducer.reducer import ReducerSettings, Unused
from ..transports.process_group import CommunicationHook, TransportName
from ..transports.selection import open_transport
from .comm_hooks import PowerSGD, make_comm_hook
from .hook_states import HookStates


@dataclass(kw_only=True, eq=False, repr=False)
class DDPStrategy(PhaseTraining, MultiProcessStrategy):
    """Every rank trains a copy of the task on its samples; gradients are summed in buckets during backward.

        rank 0   forward  backward  . . . . . . .  step        bucket 0 is reduced while the
        rank 1   forward  backward  . . . . . . .  step        gradients of bucket 1 are computed
        buckets             [0======] [1======]

    Further settings are those of `MultiProcessStrategy`.

    Args:
        bucket_cap_mb: Size of a bucket in MiB; `None`: 25, and between hosts a sixteenth of the gradients, from 1 to
            25, so that backward hides all but the last of many.
        find_unused_parameters: Parameters without a gradient: `auto` (handled), `error` (named), `graph` (found before
            backward, by a walk over the autograd graph).
        static_graph: Every step uses the same parameters equally often.
        transport: Sum of the buckets: `auto`, `shared_memory` (inside each host) or `process_group` (gloo, nccl).
        reduce_dtype: Dtype in which gradients are sent and added: their own (`None`), `bf16` or `fp16`. Ranks that
            share memory add theirs exactly first. What overflows in fp16 is infinite, and ends as `on_nonfinite` of the
            Trainer says.
        comm_hook: Compression of gradients: `none`, `power_sgd`; or a function `hook(state, bucket)`, such as
            PyTorch's, or its import path. `power_sgd` refuses tasks whose `training_step` returns weights.
        comm_hook_options: Settings of `power_sgd` (`rank`, `start_step`), or arguments of `comm_hook_state`.
        comm_hook_state: Function that makes the state of a custom hook, called with the process group and
            `comm_hook_options`, or its import path; `None`: the state is the process group.
        optimizer_in_backward: Update the parameters of a bucket as soon as it is reduced: on the CPU during backward,
            on CUDA after it.
        devices_per_rank: Devices of a rank; above 1 the task's `place_on(devices)` moves its parts to them.
        record_timeline: Record when each bucket was ready, started and done: every rank writes the last 200 steps to
            timeline_rank_<k>.json, for ui.perfetto.dev; rank 0 draws one in the report and logs advice.

    """

    supports_auto_micro_batch = True
    is_replicated = True

    bucket_cap_mb: Annotated[float, Gt(0), Unit("MiB")] | None = None
    find_unused_parameters: Unused = "auto"
    static_graph: bool = False
    transport: TransportName = "auto"
    reduce_dtype: Literal["bf16", "fp16"] | None = None
    comm_hook: str | CommunicationHook = "none"
    comm_hook_options: Mapping[str, Any] | None = None
    comm_hook_state: str | Callable[..., Any] | None = None
    optimizer_in_backward: bool = False
    devices_per_rank: Annotated[int, Ge(1), Unit("devices")] = 1
    record_timeline: bool = False
    gradients: GradientReducer = field(init=False)

    def __post_init__(self, device: str, micro_batch_size: int | Literal["auto"] | None) -> None:
        super().__post_init__(device, micro_batch_size)
        settings = ReducerSettings(
            average=False,  # losses are weighted by their fraction of the global batch, so their gradients are summed
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            timeout_seconds=self.timeout_seconds,
        )
        self.gradients = GradientReducer(
            settings,
            largest_cap_mb=DEFAULT_CAP_BYTES / MIB,
            open_transport=partial(
                open_transport,
                name=self.transport,
                reduce_dtype=REDUCE_DTYPES[self.reduce_dtype],
                own_groups=self._own_groups,
            ),
            timeline=Timeline if self.record_timeline else None,
            strategy=type(self).__name__,
        )
        self._hook = make_comm_hook(self.comm_hook, state=self.comm_hook_state, options=self.comm_hook_options)
        if self._hook is not None and self.reduce_dtype is not None:
            raise UserError(
                f"comm_hook={self._hook.name} sends gradients itself, without regard to "
                f"reduce_dtype={self.reduce_dtype}. Set strategy.comm_hook=none or strategy.reduce_dtype=null."
            )
        if self.auto_micro_batch and (self._hook is not None or self.optimizer_in_backward):
            raise UserError(
                "micro_batch_size=auto repeats a step that runs out of memory, which is not possible with "
                "optimizer_in_backward=true or a comm_hook; set strategy.micro_batch_size to a number."
            )
        self._is_compressed = self._hook is not None or self.reduce_dtype is not None
        self._hook_states = HookStates(self._hook)
        self._bucketwise: BucketwiseOptimizer | None = None
        self._separable: SeparableCheck | None = None  # with `optimizer_in_backward`

    # ---- Before and after training

    def validate(self, task: TaskModule, precision: Precision) -> str:
        """Return the kind of device of the ranks; raises UserError too for a task that cannot use all of a rank's."""
        if self.devices_per_rank > 1 and type(task).place_on is TaskModule.place_on:
            raise UserError(
                f"devices_per_rank={self.devices_per_rank} needs a task that says what is on which device; define "
                f"{type(task).__name__}.place_on(self, devices), or set strategy.devices_per_rank=1."
            )
        return super().validate(task, precision)

    @property
    def hands_over(self) -> bool:
        return super().hands_over and self._hook is None  # a hook's state changes while gradients are sent

    def _devices_per_rank(self) -> int:
        return self.devices_per_rank

    @property
    def devices_of_rank(self) -> list[torch.device]:
        device = self.device
        if not has_streams(device) or self.devices_per_rank == 1:
            return [device] * self.devices_per_rank  # the CPU several times, so that such a task runs anywhere
        return [of_rank(device.type, (device.index or 0) + number) for number in range(self.devices_per_rank)]

    def _place(self, task: TaskModule) -> None:
        if self.devices_per_rank == 1:
            super()._place(task)
            return
        task.place_on(self.devices_of_rank)
        for name, tensor in chain(task.named_parameters(), task.named_buffers()):
            if tensor.device not in self.devices_of_rank:
                raise UserError(
                    f"{type(task).__name__}.place_on has left {name} on {tensor.device}; move it to one of the "
                    f"rank's devices: {', '.join(map(str, self.devices_of_rank))}."
                )

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Make the Reducer of all trained parameters, or of those of a phase; collective."""
        check_rounding(self.reduce_dtype, phase_optimizer, self.precision)
        if self.optimizer_in_backward:
            self._separable = SeparableCheck("optimizer_in_backward", phase_optimizer)
        if phase_optimizer.phase and self.optimizer_in_backward:
            raise UserError(
                "optimizer_in_backward=true needs a single optimizer, and this task has phases. Set "
                "strategy.optimizer_in_backward=false."
            )
        if phase_optimizer.needs_closure and (self._hook is not None or self.optimizer_in_backward):
            raise UserError(
                "LBFGS compares the exact gradients of several evaluations, after all of them are known. Set "
                "strategy.optimizer_in_backward=false strategy.comm_hook=none."
            )
        needs_all = phase_optimizer.clip.limits or phase_optimizer.skip_nonfinite or self.precision.scaler
        if self.optimizer_in_backward and needs_all:
            raise UserError(
                "optimizer_in_backward=true updates parameters before all gradients are known, but max_grad_norm, "
                "max_grad_value, on_nonfinite=skip and fp16-mixed need all of them. Set "
                "strategy.optimizer_in_backward=false, or omit those."
            )
        reducer = self.gradients.add(task, phase_optimizer, comm=self.comm, log_dir=self.log_dir)
        self._hook_states.register(reducer, phase=phase_optimizer.phase)
        if self.optimizer_in_backward:
            self._bucketwise = BucketwiseOptimizer(phase_optimizer.optimizer)
            self.updates_in_backward = True
            reducer.after_bucket = self._bucketwise.step
        timeline = self.gradients.timeline
        if timeline is not None and (self._is_compressed or not reducer.transport.sends):
            timeline.compressed = ""  # its advice must not name a setting that changes nothing here

    def retrain(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> None:
        """Reduce the gradients of the parameters that require one now; collective."""
        name = next((name for name, parameter in self._untrained.items() if parameter.requires_grad), None)
        # The new reducers begin with a new state of the hook: its errors would be lost.
        if self._hook is not None:
            what = "the parameters of the optimizer changed" if name is None else f"{name} was unfrozen or added"
            raise UserError(
                f"{what} during the run, and {type(self).__name__} keeps state of the gradients that it began with. "
                "Set strategy.comm_hook=none."
            )
        super().retrain(task, phase_optimizers)
        self.gradients.reset()
        for phase_optimizer in phase_optimizers:
            self.prepare_optimizer(task, phase_optimizer)

    def is_outdated(self, phase_optimizers: Sequence[PhaseOptimizer]) -> bool:
        if self._separable is not None:
            self._separable.check()  # a hook may have been registered
        return super().is_outdated(phase_optimizers)

    def _release(self) -> None:
        self._hook_states.clear()

    # ---- A step

    def begin_phase(self, phase_optimizer: PhaseOptimizer, *, step_name: str) -> None:
        """Train only the phase's parameters in the next `forward_backward`, by the task's method `step_name`."""
        super().begin_phase(phase_optimizer, step_name=step_name)
        self.gradients.begin_phase(phase_optimizer.phase)

    @property
    def bytes_a_step(self) -> int | None:
        """Bytes of gradients that this rank sends (in shared memory: reads and writes) a step.

        `None` with a hook or `reduce_dtype`.
        """
        gradient_bytes = sum(parameter.nbytes for parameter in self._all_trained)
        return None if self._is_compressed else ring_bytes(gradient_bytes, self.comm.world_size)

    def _backward(self, output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> None:
        """Add the gradients of this micro-batch and free its graph."""
        self.gradients.begin_backward(output)
        super()._backward(output, micro_batch, batch)

    def _scale_gradients(self, factor: float | Tensor) -> None:
        """Divide by the sum of the weights that `training_step` returned."""
        # Only its output shows that it returns weights, and then the sums are made already.
        if self._bucketwise is not None:
            raise UserError(
                "optimizer_in_backward=true updates parameters before the sum of the weights that training_step "
                "returned is known. Set strategy.optimizer_in_backward=false."
            )
        if any(isinstance(state, PowerSGD) for state in self._hook_states):
            raise UserError(
                "comm_hook=power_sgd adds what a step has lost to the gradients of the next one, before the sum of the "
                "weights that training_step returned is known, by which these are divided. Set "
                "strategy.comm_hook=none."
            )
        if self.devices_per_rank > 1 and isinstance(factor, Tensor):  # one kernel takes tensors of one device
            for parameter in self._trained:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device, non_blocking=True))
            return
        super()._scale_gradients(factor)

    def optimizer_step(self, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Unscale, clip, update, and clear the gradients; return their global norm if it was needed; collective."""
        if self._bucketwise is None:
            return super().optimizer_step(phase_optimizer)
        # Every bucket was updated as soon as it was reduced.
        norm = None if phase_optimizer.clip.norm is None else self._grad_norm(phase_optimizer)
        phase_optimizer.zero_grad()
        return norm

    def _grad_norm(self, phase_optimizer: PhaseOptimizer) -> Tensor:
        return self.gradients.norm(phase_optimizer, self.device)

    # ---- State

    def strategy_state(self) -> dict[str, Any]:
        """Return the state of the communication hook on every rank, complete on rank 0; collective."""
        return {**super().strategy_state(), **self._hook_states.saved(self.comm)}

    def load_strategy_state(self, saved: Mapping[str, Any]) -> None:
        """Restore this rank's state of the communication hook; from another number of ranks errors keep their sum."""
        super().load_strategy_state(saved)
        self._hook_states.load(saved, self.comm)


class BucketwiseOptimizer:
    """Steps an optimizer for the parameters of a bucket as soon as that is reduced.

        bucket 0   reduced | step
        bucket 1             reduced | step        the step of one bucket hides behind the next one's reduction

    On the CPU this runs inside backward. Hooks on the optimizer's step run once for each bucket.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._parts: dict[int, list[list[nn.Parameter]]] = {}  # by bucket: its parameters in each group

    def step(self, bucket: Bucket) -> None:
        """Update the bucket's parameters."""
        # Buckets do not change after the first backward, so they are matched with the groups once.
        parts = self._parts.get(bucket.index)
        if parts is None:
            members = [{id(parameter) for parameter in group} for group in self._groups]
            reduced = [entry.parameter for entry in bucket.entries]
            parts = self._parts[bucket.index] = [[p for p in reduced if id(p) in ids] for ids in members]
        # The groups themselves stay: a schedule changes their learning rates, and the state is keyed by parameter.
        groups = self.optimizer.param_groups
        try:
            for group, part in zip(groups, parts, strict=True):
                group["params"] = part
            self.optimizer.step()
        finally:  # or a checkpoint, or zero_grad, would miss parameters
            for group, params in zip(groups, self._groups, strict=True):
                group["params"] = params
