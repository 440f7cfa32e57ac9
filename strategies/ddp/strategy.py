"""The strategy `ddp`: one process a device, gradients summed by our own Reducer while backward runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.errors import UserError, nearest
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.profiling.timeline import NO_COMMUNICATION, Overlap
from trainkit.strategy import PhaseTraining, Strategy
from trainkit.task import TaskModule

from ..multiprocess import MultiProcessStrategy, RankSettings
from .bucket_plan import ring_bytes
from .bucketwise_optimizer import BucketwiseOptimizer
from .comm_hooks import PeriodicAveraging, make_comm_hook
from .distributed_data_parallel import unreached_parameters
from .grad_norm import total_norm
from .reducer import Reducer, ReducerSettings, Unused
from .timeline import OverlapMeter, Timeline
from .transport import CommunicationHook, TransportName

logger = logging.getLogger(__name__)

_UNUSED = ("auto", "error", "find")
_TRANSPORTS = ("auto", "shared_memory", "group")
_NO_CONTEXT = nullcontext()


class DDPStrategy(PhaseTraining, MultiProcessStrategy):
    """Every rank trains a copy of the task on its samples; gradients are added up in buckets during backward.

        rank 0   forward  backward  . . . . . . .  step        bucket 0 travels while the
        rank 1   forward  backward  . . . . . . .  step        gradients of bucket 1 are computed
        buckets             [0======] [1======]

    Args:
        devices: Ranks to start on this machine; "auto" is one for each GPU, or two on the CPU.
        device: `auto`, `cpu` or `cuda`.
        accumulate: Micro-batches of a step on each rank.
        micro_batch_size: Samples on one device at once, at most; `auto` halves it whenever it does not fit into memory.
        bucket_mb: Size of a bucket in MiB; `None`: 25.
        unused: Parameters without a gradient: `auto` handles them, `error` names them, `find` looks for them.
        static_graph: Whether every step uses the same parameters equally often.
        transport: How gradients travel: `auto`, `shared_memory` (ranks of one host) or `group` (gloo, nccl).
        hook: How gradients are compressed: `none`, `fp16`, `bf16`, `power_sgd`, `local_sgd`; or a function
            `hook(state, bucket)` such as PyTorch's own, or its import path.
        hook_options: Settings of `power_sgd` (`rank`, `start_step`), of `local_sgd` (`start_step`, `period`), or of
            what `hook_state` makes.
        hook_state: What makes the state of a hook of your own, called with the process group and `hook_options`, or
            its import path; `None`: the state is the process group.
        overlap_optimizer: Whether the parameters of a bucket are updated as soon as it is reduced: on the CPU while
            backward goes on, on CUDA after it.
        broadcast_buffers: Whether buffers (batch-norm statistics) are those of rank 0 after every step.
        timeline: Whether to record when each bucket was ready, started and done: every rank writes the last 200 steps
            as timeline_rank_<k>.json, to be opened in ui.perfetto.dev; rank 0 logs a picture and what to change.
        timeout_seconds: Seconds to wait for another rank.
        backend: `auto` (gloo on the CPU, nccl on CUDA), or a backend of torch.distributed.
        launcher: Who starts the ranks: `local` (this process, on this machine) or `ray` (a Ray cluster).
        process_group: The ranks that train together, where this process has joined others already; `None`: all ranks.

    """

    auto_micro_batch = False

    def __init__(
        self,
        *,
        devices: int | str = "auto",
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        bucket_mb: float | None = None,
        unused: Unused = "auto",
        static_graph: bool = False,
        transport: TransportName = "auto",
        hook: str | CommunicationHook = "none",
        hook_options: Mapping[str, Any] | None = None,
        hook_state: str | Callable[..., Any] | None = None,
        overlap_optimizer: bool = False,
        broadcast_buffers: bool = True,
        timeline: bool = False,
        timeout_seconds: float = 1800.0,
        backend: str = "auto",
        launcher: str = "local",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            RankSettings(
                devices=devices,
                device=device,
                timeout_seconds=timeout_seconds,
                backend=backend,
                launcher=launcher,
                process_group=process_group,
            ),
            accumulate=accumulate,
            micro_batch_size=micro_batch_size,
            broadcast_buffers=broadcast_buffers,
        )
        if bucket_mb is not None and not bucket_mb > 0:
            raise UserError(f"bucket_mb must be above 0 MiB, got {bucket_mb}.")
        for name, value, valid in (
            ("unused", unused, _UNUSED),
            ("transport", transport, _TRANSPORTS),
        ):
            if value not in valid:
                raise UserError(f"{name}={value!r} is unknown.{nearest(value, valid)} Choose {', '.join(valid)}.")
        self.settings = ReducerSettings(
            average=False,
            bucket_mb=bucket_mb,
            unused=unused,
            static_graph=static_graph,
            transport=transport,
            timeout_seconds=self.ranks.timeout_seconds,
        )
        self.hook = make_comm_hook(hook, state=hook_state, options=hook_options)
        self.overlap_optimizer = overlap_optimizer
        if self._is_auto and (self.hook is not None or overlap_optimizer):
            raise UserError(
                "micro_batch_size=auto gives up a step where a rank runs out of memory, which does not go with "
                "overlap_optimizer=true nor with a hook; give strategy.micro_batch_size as a number."
            )
        self.record_timeline = timeline
        self.timeline: Timeline | None = None
        self._overlap_meter: OverlapMeter | None = None
        self.reducer: Reducer | None = None
        self._period: PeriodicAveraging | None = None
        self._trains_all = False  # the optimizer has exactly the reduced parameters
        self._overlapped: BucketwiseOptimizer | None = None
        self._reducers: dict[str, Reducer] = {}  # by phase

    # ---- Before and after training

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Listen to the gradients of all trained parameters, or of those of a phase; collective."""
        named = [(name, p) for name, p in task.named_parameters() if p.requires_grad]
        if phase_optimizer.phase:
            own = {id(p) for p in phase_optimizer.parameters}
            named = [(name, p) for name, p in named if id(p) in own]
        self.reducer = Reducer(
            named, group=self.comm.group, settings=self.settings, failure_store=self.comm.failure_store
        )
        self._reducers[phase_optimizer.phase] = self.reducer
        self._trains_all = {id(p) for p in phase_optimizer.parameters} == {id(p) for _, p in named}
        if self.hook is not None:
            state = self.hook.state(self.comm.group)
            self.reducer.register_hook(state, self.hook.hook)
            self._period = state if isinstance(state, PeriodicAveraging) else None
        if phase_optimizer.phase and (self._period is not None or self.overlap_optimizer):
            raise UserError(
                "overlap_optimizer=true and hook=local_sgd need a single optimizer, and this task has phases. Set "
                "strategy.overlap_optimizer=false strategy.hook=none."
            )
        if self.overlap_optimizer:
            self._overlap(phase_optimizer)
        if self.record_timeline:
            self.timeline = self.timeline or self._new_timeline()
            self.reducer.after_step = self.timeline.record

    def _overlap(self, phase_optimizer: PhaseOptimizer) -> None:
        assert self.reducer is not None
        if phase_optimizer.clip.limits or phase_optimizer.skip_nonfinite or self.precision.scaler:
            raise UserError(
                "overlap_optimizer=true updates parameters before all gradients are known, but max_grad_norm, "
                "max_grad_value, on_nonfinite=skip and fp16-mixed need all of them. Set "
                "strategy.overlap_optimizer=false, or leave those out."
            )
        self._overlapped = BucketwiseOptimizer(phase_optimizer.optimizer)
        self.reducer.after_bucket = self._overlapped.step

    def publish_failure(self, why: str) -> None:
        """Let the other ranks know that this one stops."""
        if self.reducer is None:
            super().publish_failure(why)
        elif self.comm.world_size > 1:
            self.reducer.fail(why)

    def teardown(self) -> None:
        """Stop listening to gradients and leave the group; may be called twice."""
        if self.timeline is not None:
            self._close_timeline(self.timeline)
        self.timeline = None
        super().teardown()  # tells the others if this rank is failing, through the reducer
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers, self.reducer = {}, None

    def _new_timeline(self) -> Timeline:
        return Timeline(rank=self.comm.rank)

    def _close_timeline(self, timeline: Timeline) -> None:
        """Write the trace, and on rank 0 say what it shows."""
        if self.log_dir is not None:
            timeline.write(Path(self.log_dir) / f"timeline_rank_{self.comm.rank}.json")
        if self.comm.is_main:
            drawn = timeline.drawn(strategy=type(self).__name__)
            if drawn is not None and self.log_dir is not None:
                drawn.write(Path(self.log_dir))
            for line in timeline.summary():
                logger.info("%s", line)

    # ---- A step

    def begin_phase(self, phase_optimizer: PhaseOptimizer, *, step_name: str) -> None:
        """Let the next `forward_backward` train a phase's parameters alone, by the task's method `step_name`."""
        super().begin_phase(phase_optimizer, step_name=step_name)
        self.reducer = self._reducers[phase_optimizer.phase]

    @property
    def bytes_a_step(self) -> int | None:
        """Bytes of gradients that this rank sends (in shared memory: reads and writes) in a step; not with a hook."""
        whole = sum(parameter.nbytes for parameter in self._all_trained)
        return None if self.hook is not None else ring_bytes(whole, self.comm.world_size)

    @property
    def waited_seconds(self) -> float | None:
        """Seconds after backward in which this rank has waited for buckets; a CUDA device may wait unseen."""
        reducers = self._reducers.values()  # one for each phase
        return sum(reducer.waited_seconds for reducer in reducers) if reducers else None

    def start_overlap_profile(self) -> None:
        """Measure from now on what of the reductions backward hides."""
        if self._reducers and self.comm.world_size > 1:
            self._overlap_meter = OverlapMeter(self._reducers.values(), self._new_timeline())

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Stop measuring, and return what was found; `None` on a CUDA device."""
        meter, self._overlap_meter = self._overlap_meter, None
        if meter is None:
            return NO_COMMUNICATION if self.comm.num_processes == 1 else None
        return meter.close(steps)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients are accumulated in their buckets, and not reduced."""
        return _NO_CONTEXT if self.reducer is None else self.reducer.session(sync=False)

    def _synced(self) -> AbstractContextManager[Any]:
        return _NO_CONTEXT if self.reducer is None else self.reducer.session(sync=True)

    def _backward(self, output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> None:
        """Add this micro-batch's part to the gradients and free its graph."""
        reducer = self.reducer
        if reducer is not None and reducer.is_open and self.settings.unused == "find" and output.loss is not None:
            reducer.mark_unused(unreached_parameters([output.loss], reducer.parameters))
        if self.timeline is not None:
            self.timeline.mark_backward()
        super()._backward(output, micro_batch, batch)

    def _reduce_zeros(self) -> None:
        """Take part in the reduction of the ranks that have samples, without any; collective."""
        assert self.reducer is not None
        self.reducer.reduce_zeros()

    def _normalize_gradients(self, outputs: Sequence[StepOutput], batch: StepBatch) -> None:
        """Divide by the sum of weights over all ranks where the task gave weights of its own; collective."""
        super()._normalize_gradients(outputs, batch)
        if self._weighted and self._overlapped is not None:
            raise UserError(
                "overlap_optimizer=true updates parameters before the sum of the weights that training_step returned "
                "is known. Set strategy.overlap_optimizer=false."
            )

    def optimizer_step(self, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Unscale, clip, update, and drop the gradients; return their global norm where it was needed; collective."""
        norm = None
        if self._overlapped is not None:  # every bucket was stepped as soon as it was reduced
            norm = None if phase_optimizer.clip.norm is None else self._grad_norm(phase_optimizer)
            phase_optimizer.zero_grad()
        else:
            norm = Strategy.optimizer_step(self, phase_optimizer)
        if self._period is not None:
            self._period.after_step(phase_optimizer.parameters)
        return norm

    def _grad_norm(self, phase_optimizer: PhaseOptimizer) -> Tensor:
        """Return the global 2-norm of the gradients, computed on the flat buckets where they hold all of them."""
        if self._trains_all and self.reducer is not None:
            return self.reducer.gradient_norm()
        return total_norm(phase_optimizer.gradients(), self.device)
