"""GradientReducer: the gradients of a task, summed over ranks in buckets while backward runs.

    task with phases    generator  ->  Reducer of its parameters    begin_phase("generator"): this one has the session
                        critic     ->  Reducer of its parameters
    task without        ""         ->  Reducer of all trained parameters

Strategies have one such object; what differs between them is the size of a bucket and the transport that sums it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.distributed.collectives import ProcessGroupCollectives, gather
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.precision import Precision
from trainkit.profiling import Overlap
from trainkit.task import TaskModule

from ..gradient_sum import NO_CONTEXT, GradientSum
from ..transports.hosts import HostLayout, links_of_this_process
from ..transports.process_group import Transport
from .bucket_plan import MIB
from .bucket_recorder import OverlapMeter, Timeline
from .grad_norm import total_norm
from .reducer import Reducer, ReducerSettings
from .unused_parameters import unreached_parameters

logger = logging.getLogger(__name__)

REDUCE_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
_BUCKETS_BETWEEN_HOSTS = 16  # of which the last is what backward cannot hide


class GradientReducer(GradientSum):
    """Sums gradients with a Reducer for each phase of the task, which `add` makes.

    Args:
        settings: Of every Reducer; without a size of buckets it is `largest_cap_mb`, and between hosts a sixteenth of
            the gradients, from 1 MiB to `largest_cap_mb`.
        largest_cap_mb: Size of a bucket in MiB.
        open_transport: Returns the transport of a Reducer, given that of the process group and `hosts`; collective.
        timeline: Makes the record of the steps, given the rank; `None`: steps are not recorded.
        strategy: Name of the strategy in the report.

    """

    def __init__(
        self,
        settings: ReducerSettings,
        *,
        largest_cap_mb: float,
        open_transport: Callable[..., Transport],
        timeline: Callable[[int], Timeline] | None,
        strategy: str,
    ) -> None:
        self.settings, self.strategy = settings, strategy
        self.largest_cap_mb = largest_cap_mb
        self.reducer: Reducer | None = None
        """That of the present phase."""
        self.timeline: Timeline | None = None
        self._open_transport, self.make_timeline = open_transport, timeline
        self._reducers: dict[str, Reducer] = {}  # by phase
        self._complete: set[str] = set()  # phases whose optimizer has exactly the reduced parameters
        self._meter: OverlapMeter | None = None
        self._log_dir: Path | None = None

    def add(
        self,
        task: TaskModule,
        phase_optimizer: PhaseOptimizer,
        *,
        comm: ProcessGroupCollectives,
        log_dir: Path | None,
    ) -> Reducer:
        """Return the Reducer of all trained parameters, or of those of a phase; collective."""
        named = [(name, p) for name, p in task.named_parameters() if p.requires_grad]
        # Ids are unique here: the optimizer and the task hold all of these parameters.
        optimizer_ids = {id(p) for p in phase_optimizer.parameters}
        # A single optimizer may leave out parameters that get gradients: they are reduced too, as in one process.
        if phase_optimizer.phase:
            named = [(name, p) for name, p in named if id(p) in optimizer_ids]
        if not named:
            phase = f" of the phase {phase_optimizer.phase!r}" if phase_optimizer.phase else ""
            raise UserError(
                f"no parameter{phase} of {type(task).__name__} requires a gradient, so {self.strategy} has nothing to "
                "sum. Call requires_grad_(True) on what is trained before fit."
            )
        hosts = HostLayout.gather(comm.group)
        reducer = self.reducer = self._reducers[phase_optimizer.phase] = Reducer(
            named,
            group=comm.group,
            settings=replace(self.settings, bucket_cap_mb=self._cap_mb([p for _, p in named], hosts)),
            failure_store=comm.failure_store,
            open_transport=partial(self._open_transport, hosts=hosts),
        )
        if optimizer_ids == {id(p) for _, p in named}:
            self._complete.add(phase_optimizer.phase)
        self._log_dir = log_dir
        if self.make_timeline is not None:
            self.timeline = self.timeline or self.make_timeline(comm.rank)
            reducer.after_step.append(self.timeline.record)
        return reducer

    def _cap_mb(self, parameters: Sequence[nn.Parameter], hosts: HostLayout) -> float:
        """Return the size in MiB of a bucket of these parameters' gradients."""
        if self.settings.bucket_cap_mb is not None:
            return self.settings.bucket_cap_mb
        if len(hosts.ranks) == 1:
            return self.largest_cap_mb
        gradient_mb = sum(parameter.nbytes for parameter in parameters) / MIB
        return min(max(1.0, gradient_mb / _BUCKETS_BETWEEN_HOSTS), self.largest_cap_mb)

    def reset(self) -> None:
        """Close the Reducers, before others take their place; gradients stay, ready to be summed again."""
        reducers = list(self._reducers.values())
        self._close_reducers()
        for reducer in reducers:
            for parameter in reducer.parameters:
                if parameter.grad is not None:  # of no optimizer: a sum over ranks, which they will add up again
                    parameter.grad = parameter.grad / reducer.world_size

    def finish(self) -> None:
        """Give the timeline the links of all ranks; collective."""
        if self.timeline is not None and self.reducer is not None:
            links = gather(links_of_this_process(), self.reducer.group)
            self.timeline.links = [link for links_of_rank in links for link in links_of_rank]

    def close(self) -> None:
        """Write the timeline, remove the hooks on parameters and close the transports; may be called twice."""
        if self.timeline is not None:
            self._write_timeline(self.timeline)
        self.timeline = None
        self._close_reducers()

    def _close_reducers(self) -> None:
        for reducer in self._reducers.values():
            reducer.close()
        self.reducer, self._meter, self._reducers, self._complete = None, None, {}, set()

    def _write_timeline(self, timeline: Timeline) -> None:
        if self._log_dir is not None:
            timeline.write(self._log_dir / f"timeline_rank_{timeline.rank}.json")
        if timeline.rank == 0:
            figure = timeline.figure(strategy=self.strategy)
            if figure is not None and self._log_dir is not None:
                figure.write(self._log_dir)
            for line in timeline.summary():
                logger.info("%s", line)

    def fail(self, message: str) -> None:
        """Tell ranks that wait in shared memory, where they look more often than in the failure store."""
        for reducer in self._reducers.values():
            reducer.fail(message)

    # ---- A step

    def begin_phase(self, phase: str) -> None:
        """Sum the gradients of this phase's parameters from now on."""
        self.reducer = self._reducers[phase]

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients are accumulated in their buckets and not reduced."""
        return NO_CONTEXT if self.reducer is None else self.reducer.no_sync()

    def session(self) -> AbstractContextManager[Any]:
        """Return the context of a step's last backward, during which buckets are reduced. Collective."""
        return NO_CONTEXT if self.reducer is None else self.reducer.session()

    def begin_backward(self, output: StepOutput) -> None:
        """Prepare for the backward of a micro-batch, which follows."""
        reducer = self.reducer
        # `is_open` in the last micro-batch only: the backwards of the others reduce nothing that could wait.
        finds_unused = self.settings.find_unused_parameters == "graph"
        if finds_unused and reducer is not None and reducer.is_open and output.loss is not None:
            reducer.mark_unused(unreached_parameters([output.loss], reducer.parameters))
        if self.timeline is not None:
            self.timeline.mark_backward()

    def reduce_zeros(self) -> None:
        """Take part in the reduction of the ranks that have samples, with zeros; collective."""
        assert self.reducer is not None
        self.reducer.reduce_zeros()

    def norm(self, phase_optimizer: PhaseOptimizer, device: torch.device) -> Tensor:
        """Return the global 2-norm of the gradients, computed on the flat buckets where they hold all of them."""
        # Other buckets hold gradients that are not clipped as well.
        if phase_optimizer.phase in self._complete:
            return self._reducers[phase_optimizer.phase].gradient_norm()
        return total_norm(phase_optimizer.gradients(), device)

    # ---- Profiles

    @property
    def waited_seconds(self) -> float | None:
        """Seconds that this rank has waited for buckets after backward; without the waits of a CUDA device."""
        reducers = self._reducers.values()
        return sum(reducer.waited_seconds for reducer in reducers) if reducers else None

    def start_overlap_profile(self) -> None:
        reducers = list(self._reducers.values())
        if reducers and reducers[0].world_size > 1:
            self._meter = OverlapMeter(reducers, Timeline(reducers[0].group.rank()))

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Stop measuring and return the overlap; `None` on a CUDA device."""
        meter, self._meter = self._meter, None
        return None if meter is None else meter.close(steps)


def check_rounding(reduce_dtype: str | None, phase_optimizer: PhaseOptimizer, precision: Precision) -> None:
    """Raise UserError if rounding to `reduce_dtype` cannot work with the other settings."""
    finds_overflow = phase_optimizer.skip_nonfinite or precision.scaler is not None
    if reduce_dtype == "fp16" and phase_optimizer.clip.value is not None and not finds_overflow:
        raise UserError(
            "max_grad_value would make finite gradients of those that overflow with reduce_dtype=fp16. Set "
            "strategy.reduce_dtype=bf16, trainer.on_nonfinite=skip, or trainer.max_grad_norm instead."
        )
