"""DDPStrategy: one process per device, gradients summed in buckets while backward runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoint.sharded_state import in_memory
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.distributed.collectives import gather
from trainkit.errors import UserError, nearest
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.separable import coupled_by, step_hooks
from trainkit.profiling import NO_COMMUNICATION, Overlap
from trainkit.strategy import PhaseTraining
from trainkit.task import TaskModule
from trainkit.tree import map_tensors

from ..multiprocess import MultiProcessStrategy, RankSettings
from ..reducer.bucket import Bucket
from ..reducer.bucket_plan import DEFAULT_CAP_BYTES, MIB, ring_bytes
from ..reducer.bucket_recorder import OverlapMeter, Timeline
from ..reducer.grad_norm import total_norm
from ..reducer.reducer import Reducer, ReducerSettings, Unused
from ..transports.host_layout import HostLayout, host_name
from ..transports.links import links_of_this_process
from ..transports.process_group import CommunicationHook, TransportName
from .comm_hooks import MergedHookState, PowerSGD, SavedHookState, make_comm_hook
from .distributed_data_parallel import unreached_parameters

logger = logging.getLogger(__name__)
_FIND_UNUSED = ("auto", "error", "graph")
_TRANSPORTS = ("auto", "shared_memory", "process_group")
_REDUCE_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
_BUCKETS_BETWEEN_HOSTS = 16  # of which the last is what backward cannot hide
_NO_CONTEXT = nullcontext()


class DDPStrategy(PhaseTraining, MultiProcessStrategy):
    """Every rank trains a copy of the task on its samples; gradients are summed in buckets during backward.

        rank 0   forward  backward  . . . . . . .  step        bucket 0 is reduced while the
        rank 1   forward  backward  . . . . . . .  step        gradients of bucket 1 are computed
        buckets             [0======] [1======]

    Args:
        devices: Ranks to start on this machine; `auto`: one for each GPU, or two on the CPU.
        device: `auto`, `cpu` or `cuda`.
        accumulate: Micro-batches of a step on each rank.
        micro_batch_size: Most samples on one device at once; `auto`: halved on out-of-memory.
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
        broadcast_buffers: Broadcast rank 0's buffers (batch-norm statistics) after every step.
        record_timeline: Record when each bucket was ready, started and done: every rank writes the last 200 steps to
            timeline_rank_<k>.json, for ui.perfetto.dev; rank 0 draws one in the report and logs advice.
        timeout_seconds: Seconds to wait for another rank.
        backend: `auto` (gloo on the CPU, nccl on CUDA), or a backend of torch.distributed.
        launcher: `local` (ranks are processes on this machine) or `ray` (actors of a Ray cluster).
        process_group: The ranks that train together if this process is a rank already; `None`: all ranks.

    """

    supports_auto_micro_batch = True
    largest_cap_mb = DEFAULT_CAP_BYTES / MIB
    """Size of a bucket in MiB if none is given."""

    def __init__(
        self,
        *,
        devices: int | str = "auto",
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: Unused = "auto",
        static_graph: bool = False,
        transport: TransportName = "auto",
        reduce_dtype: Literal["bf16", "fp16"] | None = None,
        comm_hook: str | CommunicationHook = "none",
        comm_hook_options: Mapping[str, Any] | None = None,
        comm_hook_state: str | Callable[..., Any] | None = None,
        optimizer_in_backward: bool = False,
        broadcast_buffers: bool = True,
        record_timeline: bool = False,
        timeout_seconds: float = 1800.0,
        backend: str = "auto",
        launcher: str = "local",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        ranks = RankSettings(devices, device, timeout_seconds, backend, launcher, process_group)
        super().__init__(
            ranks, accumulate=accumulate, micro_batch_size=micro_batch_size, broadcast_buffers=broadcast_buffers
        )
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise UserError(f"bucket_cap_mb must be above 0 MiB, got {bucket_cap_mb}.")
        for name, value, valid in (
            ("find_unused_parameters", find_unused_parameters, _FIND_UNUSED),
            ("transport", transport, _TRANSPORTS),
        ):
            if value not in valid:
                raise UserError(f"{name}={value!r} is unknown.{nearest(value, valid)} Choose {', '.join(valid)}.")
        if reduce_dtype not in _REDUCE_DTYPES:
            likely = nearest(str(reduce_dtype), ("bf16", "fp16"))
            raise UserError(f"reduce_dtype={reduce_dtype!r} is unknown.{likely} Choose null, bf16 or fp16.")
        self.reduce_dtype = reduce_dtype
        self.settings = ReducerSettings(
            average=False,  # losses are weighted by their fraction of the global batch, so their gradients are summed
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            transport=transport,
            reduce_dtype=_REDUCE_DTYPES[reduce_dtype],
            timeout_seconds=self.ranks.timeout_seconds,
        )
        self.comm_hook = make_comm_hook(comm_hook, state=comm_hook_state, options=comm_hook_options)
        if self.comm_hook is not None and reduce_dtype is not None:
            raise UserError(
                f"comm_hook={self.comm_hook.name} sends gradients itself, without regard to "
                f"reduce_dtype={reduce_dtype}. Set strategy.comm_hook=none or strategy.reduce_dtype=null."
            )
        self.optimizer_in_backward = optimizer_in_backward
        if self.auto_micro_batch and (self.comm_hook is not None or optimizer_in_backward):
            raise UserError(
                "micro_batch_size=auto repeats a step that runs out of memory, which is not possible with "
                "optimizer_in_backward=true or a comm_hook; set strategy.micro_batch_size to a number."
            )
        self.record_timeline = record_timeline
        self.timeline: Timeline | None = None
        self._overlap_meter: OverlapMeter | None = None
        self.reducer: Reducer | None = None
        self._hosts = HostLayout(())
        self._hook_states: dict[str, Any] = {}  # by phase
        self._has_warned = False  # of a hook's state that is not saved
        self._trains_all = False  # the optimizer has exactly the reduced parameters
        self._bucketwise: BucketwiseOptimizer | None = None
        self._reducers: dict[str, Reducer] = {}  # by phase
        self._tried_hooks: list[Callable[..., Any]] | None = None  # of the optimizer's steps

    # ---- Before and after training

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Make the Reducer of all trained parameters, or of those of a phase; collective."""
        self._check_rounding(phase_optimizer)
        if self._divided_by is not None:
            self._check_separable(phase_optimizer)
        named = [(name, p) for name, p in task.named_parameters() if p.requires_grad]
        # Ids are unique here: the optimizer and the task hold all of these parameters.
        optimizer_ids = {id(p) for p in phase_optimizer.parameters}
        # A single optimizer may leave out parameters that get gradients: they are reduced too, as in one process.
        if phase_optimizer.phase:
            named = [(name, p) for name, p in named if id(p) in optimizer_ids]
        comm = self.comm
        self._hosts = HostLayout.of(gather(self.host(), comm.group))
        self.reducer = Reducer(
            named,
            group=comm.group,
            settings=replace(self.settings, bucket_cap_mb=self._cap_of([p for _, p in named])),
            failure_store=comm.failure_store,
            own_groups=self._own_groups,
        )
        self._reducers[phase_optimizer.phase] = self.reducer
        # Otherwise the norm over the buckets would count gradients that are not clipped.
        self._trains_all = optimizer_ids == {id(p) for _, p in named}
        if self.comm_hook is not None:
            # One state for each phase: bucket numbers, by which it keeps errors, begin at 0 in each Reducer.
            state = self._hook_states[phase_optimizer.phase] = self.comm_hook.state(comm.group)
            self.reducer.register_hook(state, self.comm_hook.hook)
        if phase_optimizer.phase and self.optimizer_in_backward:
            raise UserError(
                "optimizer_in_backward=true needs a single optimizer, and this task has phases. Set "
                "strategy.optimizer_in_backward=false."
            )
        if phase_optimizer.needs_closure and (self.comm_hook is not None or self.optimizer_in_backward):
            raise UserError(
                "LBFGS compares the exact gradients of several evaluations, after all of them are known. Set "
                "strategy.optimizer_in_backward=false strategy.comm_hook=none."
            )
        if self.optimizer_in_backward:
            if phase_optimizer.clip.limits or phase_optimizer.skip_nonfinite or self.precision.scaler:
                raise UserError(
                    "optimizer_in_backward=true updates parameters before all gradients are known, but max_grad_norm, "
                    "max_grad_value, on_nonfinite=skip and fp16-mixed need all of them. Set "
                    "strategy.optimizer_in_backward=false, or omit those."
                )
            self._bucketwise = BucketwiseOptimizer(phase_optimizer.optimizer)
            self.updates_in_backward = True
            self.reducer.after_bucket = self._bucketwise.step
        if self.record_timeline:
            self.timeline = self.timeline or self._new_timeline()
            self.reducer.after_step.append(self.timeline.record)

    def retrain(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> None:
        """Reduce the gradients of the parameters that require one now; collective."""
        name = next((name for name, parameter in self._untrained.items() if parameter.requires_grad), None)
        # The new reducers begin with a new state of the hook: its errors would be lost.
        if self.comm_hook is not None:
            what = "the parameters of the optimizer changed" if name is None else f"{name} was unfrozen or added"
            raise UserError(
                f"{what} during the run, and {type(self).__name__} keeps state of the gradients that it began with. "
                "Set strategy.comm_hook=none."
            )
        super().retrain(task, phase_optimizers)
        self._overlap_meter = None  # of the present reducers
        for reducer in self._reducers.values():
            reducer.close()
            for parameter in reducer.parameters:
                if parameter.grad is not None:  # of no optimizer: a sum over ranks, which they will add up again
                    parameter.grad = parameter.grad / self.comm.world_size
        for phase_optimizer in phase_optimizers:
            self.prepare_optimizer(task, phase_optimizer)

    def is_outdated(self, phase_optimizers: Sequence[PhaseOptimizer]) -> bool:
        for phase_optimizer in phase_optimizers if self._divided_by is not None else ():
            self._check_separable(phase_optimizer)  # a hook may have been registered
        return super().is_outdated(phase_optimizers)

    @property
    def _divided_by(self) -> str | None:
        """The setting by which the optimizer steps parts of the parameters at once, if there is one."""
        return "optimizer_in_backward" if self.optimizer_in_backward else None

    def _check_separable(self, phase_optimizer: PhaseOptimizer) -> None:
        """Raise UserError if the optimizer or its present hooks use several parameters together."""
        # Trying copies takes milliseconds, and this runs between any two steps: only a new hook is tried.
        hooks = step_hooks(phase_optimizer.optimizer)
        if hooks == self._tried_hooks:
            return
        if phase_optimizer.has_mode:
            raise UserError(
                f"{type(phase_optimizer.optimizer).__name__} counts its steps, and {self._divided_by}=true makes one "
                f"for each part of the parameters. Set strategy.{self._divided_by}=false."
            )
        culprit, self._tried_hooks = coupled_by(phase_optimizer.optimizer), hooks
        if culprit is not None:
            raise UserError(
                f"{culprit} may use several parameters or gradients together, and {self._divided_by}=true steps the "
                "optimizer for parts of them. To clip gradients type trainer.max_grad_norm=1.0; otherwise set "
                f"strategy.{self._divided_by}=false."
            )

    def _check_rounding(self, phase_optimizer: PhaseOptimizer) -> None:
        """Raise UserError if rounding to `reduce_dtype` cannot work with the other settings."""
        finds_overflow = phase_optimizer.skip_nonfinite or self.precision.scaler is not None
        if self.reduce_dtype == "fp16" and phase_optimizer.clip.value is not None and not finds_overflow:
            raise UserError(
                "max_grad_value would make finite gradients of those that overflow with reduce_dtype=fp16. Set "
                "strategy.reduce_dtype=bf16, trainer.on_nonfinite=skip, or trainer.max_grad_norm instead."
            )

    def host(self) -> str:
        """Return the identity of this rank's machine; ranks that return the same share its memory."""
        return host_name()

    def _cap_of(self, parameters: Sequence[nn.Parameter]) -> float:
        """Return the size in MiB of a bucket of these parameters' gradients."""
        if self.settings.bucket_cap_mb is not None:
            return self.settings.bucket_cap_mb
        if len(self._hosts.ranks) == 1:
            return self.largest_cap_mb
        gradient_mb = sum(parameter.nbytes for parameter in parameters) / MIB
        return min(max(1.0, gradient_mb / _BUCKETS_BETWEEN_HOSTS), self.largest_cap_mb)

    def publish_failure(self, why: str) -> None:
        """Publish to the other ranks why this one stops."""
        if self.reducer is None:
            super().publish_failure(why)
        elif self.comm.world_size > 1:  # in shared memory too, where waiting ranks look more often than in the store
            self.reducer.publish_failure(why)

    def teardown(self) -> None:
        """Remove the hooks on parameters and leave the group; may be called twice."""
        if self.timeline is not None:
            if self.log_dir is not None:
                self.timeline.write(Path(self.log_dir) / f"timeline_rank_{self.comm.rank}.json")
            if self.comm.is_main:
                figure = self.timeline.figure(strategy=type(self).__name__)
                if figure is not None and self.log_dir is not None:
                    figure.write(Path(self.log_dir))
                for line in self.timeline.summary():
                    logger.info("%s", line)
        self.timeline = None
        super().teardown()  # publishes a failure of this rank, through the Reducer
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers, self.reducer, self._tried_hooks = {}, None, None
        self._hook_states = {}

    def _new_timeline(self) -> Timeline:
        shares_memory = self.reducer is not None and self.reducer.transport.name == "shared_memory"
        # The advice must not name a setting that changes nothing here.
        sends_nothing = shares_memory and len(self._hosts.ranks) == 1
        is_compressed = self.comm_hook is not None or self.reduce_dtype is not None
        compressed = "" if sends_nothing or is_compressed else "strategy.reduce_dtype=bf16"
        return Timeline(self.comm.rank, compressed=compressed)

    # ---- A step

    def begin_phase(self, phase_optimizer: PhaseOptimizer, *, step_name: str) -> None:
        """Train only the phase's parameters in the next `forward_backward`, by the task's method `step_name`."""
        super().begin_phase(phase_optimizer, step_name=step_name)
        self.reducer = self._reducers[phase_optimizer.phase]

    @property
    def bytes_a_step(self) -> int | None:
        """Bytes of gradients that this rank sends (in shared memory: reads and writes) a step.

        `None` with a hook or `reduce_dtype`.
        """
        gradient_bytes = sum(parameter.nbytes for parameter in self._all_trained)
        is_compressed = self.comm_hook is not None or self.reduce_dtype is not None
        return None if is_compressed else ring_bytes(gradient_bytes, self.comm.world_size)

    @property
    def waited_seconds(self) -> float | None:
        """Seconds that this rank has waited for buckets after backward; without the waits of a CUDA device."""
        reducers = self._reducers.values()  # one for each phase
        return sum(reducer.waited_seconds for reducer in reducers) if reducers else None

    def start_overlap_profile(self) -> None:
        """Start to measure how much of the reductions backward hides."""
        if self._reducers and self.comm.world_size > 1:
            self._overlap_meter = OverlapMeter(list(self._reducers.values()), self._new_timeline())

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Stop measuring and return the overlap; `None` on a CUDA device."""
        meter, self._overlap_meter = self._overlap_meter, None
        if meter is None:
            return NO_COMMUNICATION if self.comm.num_processes == 1 else None
        return meter.close(steps)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients are accumulated in their buckets and not reduced."""
        return _NO_CONTEXT if self.reducer is None else self.reducer.no_sync()

    def _synced(self) -> AbstractContextManager[Any]:
        return _NO_CONTEXT if self.reducer is None else self.reducer.session()

    def _backward(self, output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> None:
        """Add the gradients of this micro-batch and free its graph."""
        reducer = self.reducer
        # `is_open` in the last micro-batch only: the backwards of the others reduce nothing that could wait.
        finds_unused = self.settings.find_unused_parameters == "graph"
        if finds_unused and reducer is not None and reducer.is_open and output.loss is not None:
            reducer.mark_unused(unreached_parameters([output.loss], reducer.parameters))
        if self.timeline is not None:
            self.timeline.mark_backward()
        super()._backward(output, micro_batch, batch)

    def _reduce_zeros(self) -> None:
        """Take part in the reduction of the ranks that have samples, with zeros; collective."""
        assert self.reducer is not None
        self.reducer.reduce_zeros()

    def _normalize_gradients(self, outputs: Sequence[StepOutput], batch: StepBatch) -> None:
        """Divide by the sum of weights over all ranks if the task returned weights; collective."""
        super()._normalize_gradients(outputs, batch)
        # Only the output of training_step shows if it returns weights, and then the sums are made already.
        if not self._weighted:
            return
        if self._bucketwise is not None:
            raise UserError(
                "optimizer_in_backward=true updates parameters before the sum of the weights that training_step "
                "returned is known. Set strategy.optimizer_in_backward=false."
            )
        if any(isinstance(state, PowerSGD) for state in self._hook_states.values()):
            raise UserError(
                "comm_hook=power_sgd adds what a step has lost to the gradients of the next one, before the sum of the "
                "weights that training_step returned is known, by which these are divided. Set "
                "strategy.comm_hook=none."
            )

    def optimizer_step(self, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Unscale, clip, update, and clear the gradients; return their global norm if it was needed; collective."""
        if self._bucketwise is None:
            return super().optimizer_step(phase_optimizer)
        # Every bucket was updated as soon as it was reduced.
        norm = None if phase_optimizer.clip.norm is None else self._grad_norm(phase_optimizer)
        phase_optimizer.zero_grad()
        return norm

    def _grad_norm(self, phase_optimizer: PhaseOptimizer) -> Tensor:
        """Return the global 2-norm of the gradients, computed on the flat buckets where they hold all of them."""
        if self._trains_all and self.reducer is not None:
            return self.reducer.gradient_norm()
        return total_norm(phase_optimizer.gradients(), self.device)

    # ---- State

    def final_state_dict(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained state on rank 0 if the caller is in another process; collective.

        A timeline has the links of all ranks afterwards.
        """
        if self.timeline is not None:
            self.timeline.links = [link for links in gather(links_of_this_process(), self.comm.group) for link in links]
        return super().final_state_dict(task)

    def strategy_state(self) -> dict[str, Any]:
        """Return the state of the communication hook on every rank, complete on rank 0; collective."""
        hooks = self._saved_hook_states()
        if not hooks:
            return {}
        local_state: dict[str, Any] = {"hooks": {phase: state.state_dict() for phase, state in hooks.items()}}
        # Copied: pickling a view of a bucket would send the memory of the whole bucket.
        local_state = map_tensors(local_state, lambda tensor: tensor.detach().to("cpu", copy=True))
        return {"comm_hook": self._hook_name, "hook_states": self.comm.gather_object(local_state)}

    def load_strategy_state(self, saved: Mapping[str, Any]) -> None:
        """Restore this rank's state of the communication hook; from another number of ranks errors keep their sum."""
        states, hooks = saved.get("hook_states"), self._saved_hook_states()
        if not states:
            return
        name = self._hook_name
        is_same_hook = saved["comm_hook"] == name and states[0]["hooks"].keys() == hooks.keys()
        if is_same_hook and len(states) == self.comm.world_size:
            local_state = in_memory(states[self.comm.rank])  # the states of the other ranks stay on the disk
            for phase, hook in hooks.items():
                hook.load_state_dict(local_state["hooks"][phase])
            return
        is_merged = is_same_hook and all(isinstance(hook, MergedHookState) for hook in hooks.values())
        for phase, hook in hooks.items() if is_merged else ():
            assert isinstance(hook, MergedHookState)
            hook.load_from_ranks([in_memory(state["hooks"][phase]) for state in states])
        if self.comm.is_main and not is_merged:
            logger.warning(
                "the checkpoint holds communication state of %s on %d ranks, and this run has that of %s on %d: that "
                "state is dropped.",
                saved["comm_hook"],
                len(states),
                name,
                self.comm.world_size,
            )

    @property
    def _hook_name(self) -> str:
        """Name of the hook whose state checkpoints hold."""
        return "none" if self.comm_hook is None else self.comm_hook.name

    def _saved_hook_states(self) -> dict[str, SavedHookState]:
        """Return the hook's states that checkpoints hold, by phase; warn once of others."""
        saved = {phase: state for phase, state in self._hook_states.items() if isinstance(state, SavedHookState)}
        for state in self._hook_states.values() if self.comm.is_main and not self._has_warned else ():
            if not isinstance(state, SavedHookState | dist.ProcessGroup | None):
                self._has_warned = True
                logger.warning(
                    "checkpoints do not hold the state of the communication hook: %s has no state_dict and "
                    "load_state_dict. A resumed run starts with a new one.",
                    type(state).__name__,
                )
        return saved


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
