"""The task's steps, each recorded when it is met first, and cut so that every part is where its parameters are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainkit.batches import to_device
from trainkit.errors import UserError
from trainkit.metrics.sync import detach_metrics, metrics_in

from .choice import Choice
from .events import Recording
from .materializing import has_meta
from .partition import Shared
from .placement import Placement, owned_bounds, place
from .planning import Costs, Cuts, Planned, Rehearsal, plan_again, plan_steps
from .recording import Step, observe
from .replay import Player
from .segments import Segment, segments
from .staged_step import StagedStep
from .structures import Signature, signature

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Act:
    """A step of the task that is trained by."""

    step: Step
    begin: Callable[[], None]
    """Turns to the phase that the step belongs to."""
    share: float
    """How often it is made, for one of the task's steps."""


def only_act(step: Step) -> Act:
    """Return the act of a task without phases."""
    return Act(step, _nothing, 1.0)


def act_name(phase: str, step_name: str) -> str:
    """Return the name of a phase's step, or of the task's only one."""
    return f"{phase}: {step_name}" if phase else step_name


def rehearsals(acts: Mapping[str, Act], task: nn.Module, batch: Any, costs: Costs) -> list[Rehearsal]:
    """Return the acts with what they are recorded with."""
    return [Rehearsal(task, act.step, batch, costs, act.begin, act.share) for act in acts.values()]


def _nothing() -> None:
    """There is no other phase."""


class Staging:
    """Knows the cuts. The steps that `cut` is given decide them; those of `add` follow the parameters.

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
        self.planned: Planned | None = None
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
        if self.planned is None:
            return self.known
        return Choice.of(self._wish, self.planned.whole, self.planned.partition)

    @property
    def _wish(self) -> str:
        cuts = dict(self._cuts) if isinstance(self._cuts, Mapping) else self._cuts and list(self._cuts)
        return f"{self._num_ranks} x {self._stages_per_rank} stages, {cuts}, {self._shared}, {self._balance}"

    @property
    def first(self) -> StagedStep:
        """The step that was recorded first: what the task is trained by, or the first of its phases."""
        return next(iter(self.steps.values()))

    def cut(self, task: nn.Module, acts: Mapping[str, Act], batch: Any, *, everywhere: bool) -> None:
        """Record steps on one rank and cut the task by them on all. Collective, as `add`."""

        def planned() -> tuple[Planned, Signature]:
            on_host = batch if self._device.type == "cpu" else to_device(batch, torch.device("cpu"))
            return self._plan(task, acts, on_host), signature(batch)

        self.planned, recorded = self._asked(task, planned, everywhere=everywhere)
        cuts = list(zip(self.planned.steps, self.planned.partitions, strict=True))
        self.placement = place(task, cuts, num_ranks=self._num_ranks)
        for name, (recording, partition) in zip(acts, cuts, strict=True):
            bounds = partition.bounds(len(recording.events))
            ranks = [index % self._num_ranks for index in range(len(bounds))]
            self._keep(name, task, recording, segments(recording, bounds, ranks), recorded)

    def add(self, name: str, task: nn.Module, step: Step, batch: Any, *, everywhere: bool) -> None:
        """Record `step` on one rank, and divide it by the cuts on all: those of the pipeline, or `everywhere`.

        Collective over them. Raises on every rank what went wrong on the one that records.
        """
        assert self.planned is not None and self.placement is not None
        units = frozenset(event.name for recording in self.planned.steps for event in recording.events if event.is_unit)
        fake = self._record_how == "fake"

        def recorded() -> tuple[Recording, Signature]:
            return observe(task, step, batch, units=units, fake=fake).recording, signature(batch)

        recording, seen = self._asked(task, recorded, everywhere=everywhere)
        bounds, ranks = owned_bounds(recording, self.placement, num_ranks=self._num_ranks)
        self._keep(name, task, recording, segments(recording, bounds, ranks), seen)

    def _keep(
        self, name: str, task: nn.Module, recording: Recording, pieces: list[Segment], recorded: Signature
    ) -> None:
        player = Player(recording, task, self._device)
        self.steps[name] = StagedStep.of(player, pieces, recorded)

    def _asked(self, task: nn.Module, answer_of: Callable[[], T], *, everywhere: bool) -> T:
        """Return on every rank what one of them finds out, or raise what it raised."""
        source = 0 if everywhere else dist.get_global_rank(self._group, 0)
        answer: Any = None
        if dist.get_rank() == source:
            try:
                with detach_metrics(metrics_in(task)):  # what is recorded is trained on, or evaluated, once more
                    answer = answer_of()
            except Exception as error:
                self._tell(error, source, everywhere=everywhere)
                raise
        answer = self._tell(answer, source, everywhere=everywhere)
        if isinstance(answer, Exception):
            raise answer
        received: T = answer
        return received

    def _plan(self, task: nn.Module, acts: Mapping[str, Act], batch: Any) -> Planned:
        costs = costs_of(self._record_how, task, self._device)
        rehearsed = rehearsals(acts, task, batch, costs)
        if self.known is not None and self.known.wish == self._wish:
            again = plan_again(rehearsed, self.known)
            if again is not None:
                return again
            logger.info("the step makes other calls than in the run that is resumed, and is cut anew")
        return plan_steps(
            rehearsed,
            num_stages=self._num_ranks * self._stages_per_rank,
            balance=self._balance,
            cuts=self._cuts,
            shared=self._shared,
        )

    def _tell(self, answer: Any, source: int, *, everywhere: bool) -> Any:
        box = [answer]
        dist.broadcast_object_list(box, source, group=None if everywhere else self._group)
        return box[0]


def costs_of(record: str, task: nn.Module, device: torch.device) -> Costs:
    """Return how the costs of a step are found: timed only where it is run for real, on the device it trains on."""
    if record == "fake" or (record == "auto" and has_meta(task)):
        return "fake"
    if has_meta(task):
        raise UserError("strategy.record=real needs a task with real parameters, not on the meta device.")
    return "measured" if device.type == "cpu" else "estimated"
