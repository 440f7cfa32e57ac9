"""The strategy `pipeline`: one task over several devices, cut into stages, with copies of the whole if asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainkit.data import Source
from trainkit.distributed.collectives import Collectives, broadcast, gather
from trainkit.feed import make_feed
from trainkit.optimization import Clip, Optimization, configure
from trainkit.overlap import NO_COMMUNICATION, Overlap
from trainkit.phases import check_phases_run, has_phases
from trainkit.precision import Precision
from trainkit.step_output import StepOutput, read_training_output
from trainkit.strategy import loss_weight
from trainkit.task import TaskModule
from trainkit.window import BatchPlan, Window

from ..process_group import RankSettings
from .evaluation_pass import EvaluationPass, draw_seed
from .partition import Shared
from .planning import Costs
from .preview import preview
from .report import write_timeline
from .scaled_together import ScaledTogether
from .schedules import Span
from .staging import act_name, costs_of, rehearsals
from .table import PartitionPlan

MICRO_BATCHES_PER_STAGE = 2
"""Micro-batches for each stage where the user says nothing: a third of the time is idle with so many."""


class Pipeline(EvaluationPass):
    """Cuts the task into stages, one a process, and leads the micro-batches of each step through them.

    Four ranks as two stages and two copies (replicas); replicas read different samples, stages the same::

                    stage 0    stage 1
        replica 0   rank 0 --> rank 1
        replica 1   rank 2 --> rank 3

    The task needs no change: its step is recorded on the first batch, cut, and run again on every rank, which
    executes only its own part.

    Args:
        stages: Processes that share one copy of the task.
        replicas: Copies that train on different samples.
        schedule: `interleaved` (a backward as soon as it is possible), `simple` (all forwards, then all
            backwards), `interleaved_virtual` (`interleaved`, with several stages on each rank).
        stages_per_rank: Stages on each rank, for `interleaved_virtual`.
        cuts: Names of the modules that begin the second and later stages, or a stage for each pattern of names;
            by default found from what each module costs.
        shared: Where a parameter is that several places of the step use, as tied embeddings: `together` (these are in
            one stage), `replicated` (each stage that uses it has a copy, and gradients are added up), `auto`
            (together, unless that is much slower; cuts of your own must not come between).
        balance: `speed`, `memory`, or a share between 0 and 1 of memory against time.
        record: How the step is recorded: `real` (run on the CPU, and timed there if that is where it trains), `fake`
            (nothing is computed; times follow from operations), `auto` (`fake` for a task on the meta device).
        device: `auto`, `cpu` or `cuda`.
        accumulate: Micro-batches of a step on each replica; by default two for each stage.
        micro_batch_size: Samples of a micro-batch, at most; another way to say it.
        broadcast_buffers: Whether buffers (batch-norm statistics) are those of the first replica after every step.
        timeline: Whether each step leaves a picture of who did which micro-batch when in the run's folder.
        timeout_seconds: Seconds to wait for another rank.
        backend: `auto` (gloo on the CPU, nccl on CUDA), or a backend of torch.distributed, for what replicas say
            to each other; between stages it is always gloo.
        launcher: Who starts the ranks: `local` (this process, on this machine) or `ray` (a Ray cluster).

    """

    supports_module_hooks = False

    def __init__(
        self,
        *,
        stages: int = 2,
        replicas: int = 1,
        schedule: str = "interleaved",
        stages_per_rank: int = 2,
        cuts: Sequence[str] | Mapping[str, int] | None = None,
        shared: Shared = "auto",
        balance: str | float = "speed",
        record: str = "auto",
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        broadcast_buffers: bool = True,
        timeline: bool = False,
        timeout_seconds: float = 1800.0,
        backend: str = "auto",
        launcher: str = "local",
    ) -> None:
        super().__init__(
            stages=stages,
            replicas=replicas,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            cuts=cuts,
            shared=shared,
            balance=balance,
            record=record,
            ranks=RankSettings(device=device, timeout_seconds=timeout_seconds, backend=backend, launcher=launcher),
            accumulate=accumulate,
            micro_batch_size=micro_batch_size,
            broadcast_buffers=broadcast_buffers,
        )
        self.num_micro_batches = accumulate or MICRO_BATCHES_PER_STAGE * stages
        self.draws_timeline = timeline
        self._waited_before: float | None = None  # when overlap was asked for

    # ---- Who reads what

    def plan(self, batch_size: int, *, even: bool = True) -> BatchPlan:
        """Return how a global batch is cut; without a wish of the user's into enough micro-batches for all stages."""
        if self.accumulate is not None or self.micro_batch_size is not None:
            return super().plan(batch_size, even=even)
        share = -(-batch_size // self.comm.world_size)
        size = -(-share // min(self.num_micro_batches, share))
        return BatchPlan(batch_size, self.comm.world_size, -(-share // size), size)

    # ---- A step

    def forward_backward(self, task: TaskModule, batch: Window) -> list[StepOutput]:
        """Leave in every `.grad` of this stage the gradient of the weighted mean loss over the global batch.

        Returns the outputs of this replica's micro-batches, on every stage. Collective.
        """
        self._steps += 1
        with self._told():
            return self._forward_backward(task, batch)

    def _forward_backward(self, task: TaskModule, batch: Window) -> list[StepOutput]:
        step = partial(self._call, getattr(task, self._step_name))
        batches = [micro_batch.batch for micro_batch in batch.micro_batches]
        staged = self._staged_training(task, batches)
        outputs: dict[int, StepOutput] = {}

        def read_loss(index: int, returned: Any) -> Tensor:
            micro_batch = batch.micro_batches[index]
            output = read_training_output(returned, micro_batch.num_samples, task, self._step_name)
            loss = output.loss
            assert loss is not None
            output.loss = loss.detach()
            outputs[index] = output
            return self.precision.scale(loss * loss_weight(output, micro_batch, batch))

        self.precision.scale(torch.zeros((), device=self.device))  # a scaler must have seen a loss, on every stage
        gradients = self._gradients[self._phase]
        assert self._runtime is not None
        actions = self._schedule.actions(self.stage, len(batches))
        around, seed = gradients.session_around(actions), draw_seed()
        self._runtime.train(staged, step, batches, actions=actions, seed=seed, read_loss=read_loss, around=around)
        if not actions:
            gradients.reduce_nothing()
        shared = self._share(
            [outputs[index] for index in sorted(outputs)], staged, act_name(self._phase, self._step_name)
        )
        gradients.add_up_shared()
        self._normalize_gradients(shared, batch)
        if self._buffers is not None and self.replicas > 1:
            broadcast(self._buffers.now(), self.comm.group)
        if self.draws_timeline and batches:
            self._draw_timeline(len(batches))
        return shared

    def _grad_norm(self, optimization: Optimization) -> Tensor:
        """Return the 2-norm of all stages' gradients, those of shared parameters counted once; collective."""
        assert self._grid is not None
        return self._gradients[optimization.phase].norm(self._grid, self.device)

    def optimizer_step(self, optimization: Optimization) -> Tensor | None:
        """Update this stage's parameters; a step that fp16 skips on one stage is skipped on all. Collective."""
        if self.precision.scaler is None:
            return super().optimizer_step(optimization)
        return super().optimizer_step(ScaledTogether(optimization, self._agree_on_overflow))

    # ---- The plan without training

    def preview(self, task: TaskModule, source: Source, *, precision: Precision) -> tuple[PartitionPlan, str]:
        """Return the plan for training on `source`, and its drawing; nothing is started, and the task stays whole."""
        check_phases_run(task, self)
        self.comm = Collectives(world_size=self.replicas)  # type: ignore[assignment] # nothing is reduced
        self.precision = precision
        precision.setup(self.device)
        precision.prepare(task)
        self._all_trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        if has_phases(task):
            clip, steps = Clip(), 1000  # of which no plan depends
            phases = configure(task, clip=clip, precision=precision, total_steps=steps, fused=False, skip=False)
            self._optimizations = {optimization.phase: optimization for optimization in phases}
        batch = next(self.step_batches(make_feed(source, self, seed=0).windows(0, 0), pin_memory=source.pin_memory))
        try:
            return preview(
                rehearsals(self._acts(task), task.train(), batch.micro_batches[0].batch, self._costs(task)),
                len(batch.micro_batches),
                schedule=self._schedule,
                balance=self.balance,
                cuts=self.cuts,
                shared=self.shared,
            )
        finally:
            self.end_phases()
            self._optimizations = {}

    def _costs(self, task: TaskModule) -> Costs:
        return costs_of(self.record, task, self.device)

    # ---- What happened when

    @property
    def waited_seconds(self) -> float | None:
        """Seconds in which this stage has waited for others."""
        return None if self._runtime is None else self._runtime.waited_seconds

    def start_overlap_profile(self) -> None:
        """Note what has been waited so far."""
        self._waited_before = self.waited_seconds

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Return what this stage has waited since the start; messages that nobody waits for are hidden."""
        before, after = self._waited_before, self.waited_seconds
        self._waited_before = None
        if self.comm.num_processes == 1 or before is None or after is None or not steps:
            return NO_COMMUNICATION if self.comm.num_processes == 1 else None
        return Overlap((after - before) / steps, steps=steps, note="messages and the schedule's bubble, on this stage")

    def timeline(self) -> list[list[Span]]:
        """Return what each stage of this replica did in the last window, and when; collective over its stages."""
        assert self._runtime is not None
        answers = gather((self._runtime.began, self._runtime.spans), self._stage_group)
        first = min(began for began, _ in answers)
        return [
            [Span(span.action, span.start + began - first, span.end + began - first) for span in spans]
            for began, spans in answers
        ]

    def _draw_timeline(self, num_micro_batches: int) -> None:
        spans = self.timeline()
        if self.comm.is_main and self.log_dir is not None:
            write_timeline(spans, Path(self.log_dir), expected=self._schedule.bubble(num_micro_batches))
