"""Schedules of micro-batches (GPipe, 1F1B, interleaved 1F1B): pure generators of actions, one list for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FORWARD = "F"
BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or the backward of one micro-batch through one stage."""

    kind: str
    stage: int
    micro_batch: int

    def place(self) -> str:
        """Return the name of the action in messages."""
        work = "forward" if self.kind == FORWARD else "backward"
        return f"{work} of micro-batch {self.micro_batch} in stage {self.stage}"


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
SYNONYMS = {"simple": "gpipe", "interleaved": "1f1b"}


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule for a number of ranks; only `interleaved_1f1b` has several stages per rank."""

    name: str
    num_ranks: int
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return self.num_ranks * self.stages_per_rank

    def actions(self, rank: int, num_micro_batches: int) -> list[Action]:
        """Return the actions of a rank for one step batch, in order."""
        if self.name == "interleaved_1f1b":
            per_rank = self.stages_per_rank
            return list(interleaved_one_f_one_b(rank, self.num_ranks, num_micro_batches, stages_per_rank=per_rank))
        return list((gpipe if self.name == "gpipe" else one_f_one_b)(rank, self.num_ranks, num_micro_batches))

    def bubble(self, num_micro_batches: int) -> float:
        """Return the idle share with equal stages: `(p - 1) / (m * stages_per_rank + p - 1)` with p ranks."""
        return (self.num_ranks - 1) / (max(num_micro_batches, 1) * self.stages_per_rank + self.num_ranks - 1)


def gpipe(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield all forwards, then all backwards; every micro-batch is in flight at once.

    Three ranks, four micro-batches, a backward twice as long as a forward::

        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
        rank 1  .. F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3 .. ..
        rank 2  .. .. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .. .. .. ..
    """
    del num_ranks
    for micro_batch in range(num_micro_batches):
        yield Action(FORWARD, rank, micro_batch)
    for micro_batch in range(num_micro_batches):
        yield Action(BACKWARD, rank, micro_batch)


def one_f_one_b(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield each backward as early as possible; at most `num_ranks - rank` micro-batches are in flight.

    Three ranks, four micro-batches, a backward twice as long as a forward::

        rank 0  F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3
        rank 1  .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..
        rank 2  .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. ..
    """
    warm_up = min(num_ranks - rank - 1, num_micro_batches)
    forwards = (Action(FORWARD, rank, index) for index in range(num_micro_batches))
    backwards = (Action(BACKWARD, rank, index) for index in range(num_micro_batches))
    yield from _one_forward_one_backward(forwards, backwards, warm_up=warm_up)


def interleaved_one_f_one_b(
    rank: int, num_ranks: int, num_micro_batches: int, *, stages_per_rank: int = 2
) -> Iterator[Action]:
    """Yield `1f1b` work over several stages a rank: stage `s` belongs to rank `s % num_ranks`.

    Micro-batches go in groups of `num_ranks` through all stages of a rank, so the pipeline fills in one
    stage's time, not in one rank's: the idle share falls by `stages_per_rank`, for more messages and memory.
    Two ranks, two stages each, four micro-batches (`sFm`: stage s, micro-batch m), all equally long::

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
        rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...
    """
    padded = -(-num_micro_batches // num_ranks) * num_ranks
    total = padded * stages_per_rank
    warm_up = min((num_ranks - rank - 1) * 2 + (stages_per_rank - 1) * num_ranks, total)
    forwards = _grouped(FORWARD, range(rank, num_ranks * stages_per_rank, num_ranks), padded, num_ranks)
    backwards = _grouped(BACKWARD, range(rank, num_ranks * stages_per_rank, num_ranks)[::-1], padded, num_ranks)
    for action in _one_forward_one_backward(forwards, backwards, warm_up=warm_up):
        # Whole groups cannot deadlock, and neither can they without some actions.
        if action.micro_batch < num_micro_batches:
            yield action


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end in seconds."""

    action: Action
    start: float
    end: float


def idle_share(spans: Sequence[Sequence[Span]]) -> float:
    """Return the idle share of all ranks' time until the last end."""
    length = max((rank_spans[-1].end for rank_spans in spans if rank_spans), default=0.0)
    busy = sum(span.end - span.start for rank_spans in spans for span in rank_spans)
    return 1.0 - busy / (length * len(spans)) if length else 0.0


def _grouped(kind: str, stages: Sequence[int], num_micro_batches: int, group_size: int) -> Iterator[Action]:
    for first in range(0, num_micro_batches, group_size):
        for stage in stages:
            for micro_batch in range(first, first + group_size):
                yield Action(kind, stage, micro_batch)


def _one_forward_one_backward(
    forwards: Iterator[Action], backwards: Iterator[Action], *, warm_up: int
) -> Iterator[Action]:
    for _ in range(warm_up):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards
