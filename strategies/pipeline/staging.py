"""The task's steps, each recorded when it is met first, and cut so that every part is where its parameters are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainkit.batches import to_device
from trainkit.errors import UserError
from trainkit.metric_states import metrics_in, set_aside

from .choice import Choice
from .events import Recording
from .materializing import has_meta
from .partition import Partition, Shared
from .placement import Placement, owned_bounds, place
from .planning import Costs, Cuts, plan, plan_again
from .recording import Step, observe
from .replay import Player
from .segments import segments
from .staged_step import StagedStep
from .structures import Signature, signature

logger = logging.getLogger(__name__)

Answer = tuple[Recording, Partition | None, Signature]


class Staging:
    """Knows the cuts. The first step asked for decides them; later steps follow the parameters.

    Args:
        num_ranks: Ranks of the pipeline.
        stages_per_rank: Stages on each of them.
        group: The pipeline.
        cuts: The user's wish, or none.
        shared: Whether stages may have copies of one parameter.
        balance: Share of memory against time.
        record: `real`, `fake`, or `auto`, which is `fake` for tasks on the meta device.
        device: Where this rank computes.

    """

    def __init__(
        self,
        *,
        num_ranks: int,
        stages_per_rank: int,
        group: dist.ProcessGroup,
        cuts: Cuts | None,
        shared: Shared,
        balance: float,
        record: str,
        device: torch.device,
    ):
        self.steps: dict[str, StagedStep] = {}
        self.placement: Placement | None = None
        self.partition: Partition | None = None
        self.known: Choice | None = None
        """How the task was cut in the run that this one resumes."""
        self._num_ranks = num_ranks
        self._stages_per_rank = stages_per_rank
        self._group = group
        self._cuts = cuts
        self._shared = shared
        self._balance = balance
        self._record_how = record
        self._device = device

    @property
    def choice(self) -> Choice | None:
        """How the task was cut, or will be if that still fits."""
        if self.partition is None:
            return self.known
        return Choice.of(self._wish, self.first.recording, self.partition)

    @property
    def _wish(self) -> str:
        cuts = dict(self._cuts) if isinstance(self._cuts, Mapping) else self._cuts and list(self._cuts)
        return f"{self._num_ranks} x {self._stages_per_rank} stages, {cuts}, {self._shared}, {self._balance}"

    @property
    def first(self) -> StagedStep:
        """The step by which the task was cut."""
        return next(iter(self.steps.values()))

    def add(self, name: str, task: nn.Module, step: Step, batch: Any, *, everywhere: bool) -> None:
        """Record `step` on one rank and cut it on all: those of the pipeline, or `everywhere`. Collective over them.

        Raises on every rank what went wrong on the one that records.
        """
        source = 0 if everywhere else dist.get_global_rank(self._group, 0)
        answer: Any = None
        if dist.get_rank() == source:
            try:
                with set_aside(metrics_in(task)):  # what is recorded is trained on, or evaluated, once more
                    answer = self._record(task, step, batch)
            except Exception as error:
                self._tell(error, source, everywhere=everywhere)
                raise
        answer = self._tell(answer, source, everywhere=everywhere)
        if isinstance(answer, Exception):
            raise answer
        recording, partition, recorded = answer
        bounds, ranks = self._settle(task, recording, partition)
        player = Player(recording, task, self._device)
        self.steps[name] = StagedStep.of(player, segments(recording, bounds, ranks), recorded)

    def _record(self, task: nn.Module, step: Step, batch: Any) -> Answer:
        if self.placement is not None:
            units = frozenset(event.name for event in self.first.recording.events if event.is_unit)
            fake = self._record_how == "fake"
            return observe(task, step, batch, units=units, fake=fake).recording, None, signature(batch)
        on_host = batch if self._device.type == "cpu" else to_device(batch, torch.device("cpu"))
        recording, partition = self._plan(task, step, on_host)
        return recording, partition, signature(batch)

    def _plan(self, task: nn.Module, step: Step, batch: Any) -> tuple[Recording, Partition]:
        costs = costs_of(self._record_how, task, self._device)
        if self.known is not None and self.known.wish == self._wish:
            again = plan_again(task, step, batch, self.known, costs=costs)
            if again is not None:
                return again
            logger.info("the step makes other calls than in the run that is resumed, and is cut anew")
        return plan(
            task,
            step,
            batch,
            num_stages=self._num_ranks * self._stages_per_rank,
            balance=self._balance,
            cuts=self._cuts,
            shared=self._shared,
            costs=costs,
        )

    def _tell(self, answer: Any, source: int, *, everywhere: bool) -> Any:
        box = [answer]
        dist.broadcast_object_list(box, source, group=None if everywhere else self._group)
        return box[0]

    def _settle(
        self, task: nn.Module, recording: Recording, partition: Partition | None
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the bounds and ranks of a step's segments."""
        if partition is not None:
            self.partition = partition
            self.placement = place(task, recording, partition, num_ranks=self._num_ranks)
            bounds = partition.bounds(len(recording.events))
            return bounds, [index % self._num_ranks for index in range(len(bounds))]
        assert self.placement is not None
        return owned_bounds(recording, self.placement, num_ranks=self._num_ranks)


def costs_of(record: str, task: nn.Module, device: torch.device) -> Costs:
    """Return how the costs of a step are found: timed only where it is run for real, on the device it trains on."""
    if record == "fake" or (record == "auto" and has_meta(task)):
        return "fake"
    if has_meta(task):
        raise UserError("strategy.record=real needs a task with real parameters, not on the meta device.")
    return "measured" if device.type == "cpu" else "estimated"
